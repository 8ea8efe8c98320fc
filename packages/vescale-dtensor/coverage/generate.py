"""Make a random program from a seed: propose lines, keep those that run on plain tensors."""

from __future__ import annotations

import dataclasses
import random

import torch
from program import Input, LineFailed, Program, is_steady, one_device
from proposals import propose

__all__ = ["make_program"]

SIZES = (1, 2, 3, 4, 5, 6, 7)
WEIGHTS = (2, 3, 4, 4, 4, 2, 1)
MAX_NUMEL = 400
MAX_TRIES = 150


def make_program(seed: str, mesh: tuple[int, ...]) -> Program | None:
    """Return the program of a seed on a mesh of this shape, or None where it has no steady result on one device."""
    chooser = random.Random(f"{seed} {mesh}")
    order = chooser.choices((0, 1, 2), (3, 6, 2))[0]
    program = Program(mesh, _inputs(chooser, len(mesh), order), (), order)
    wanted = chooser.randint(5, 15)
    tensors = _tensors(program)
    for number in range(MAX_TRIES):
        line = propose(chooser, tensors, f"v{number}", len(mesh))
        if line is None or (order and ".data" in line):  # hides writes from autograd: what gradients are is not defined
            continue
        longer = dataclasses.replace(program, lines=(*program.lines, line))
        try:
            found = _tensors(longer)
        except LineFailed:
            continue
        if not all(_is_usable(tensor) for tensor in found.values()) or not found:
            continue
        program, tensors = longer, found
        if len(program.lines) == wanted:
            break
    for lower in range(program.order, -1, -1):
        program = dataclasses.replace(program, order=lower)
        if is_steady(program) is not None:
            return program
    return None


def _tensors(program: Program) -> dict[str, torch.Tensor]:
    first = dataclasses.replace(program, order=min(program.order, 1))
    found = one_device(first)
    return {n: v for n, v in found.items() if n[0] in "xv" and isinstance(v, torch.Tensor)}


def _is_usable(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= MAX_NUMEL and bool(torch.isfinite(tensor).all())


def _inputs(chooser: random.Random, num_axes: int, order: int) -> tuple[Input, ...]:
    """Return two to four inputs; many of their sizes are equal, so that operators of two tensors fit."""
    sizes = chooser.choices(SIZES, WEIGHTS, k=3)
    made = []
    for number in range(chooser.randint(2, 4)):
        kind = "float" if number < 2 else chooser.choice(("float", "bool", f"int{min(sizes)}", f"int{min(sizes)}"))
        num_dims = chooser.choices((1, 2, 3), (2, 5, 2))[0]
        shape = tuple(chooser.choice(sizes) for _ in range(num_dims))
        if number and chooser.random() < 0.5:
            shape = made[0].shape
        placements = "".join(_placement(chooser, len(shape), kind) for _ in range(num_axes))
        made.append(Input(shape, kind, placements, kind == "float" and order > 0 and chooser.random() < 0.7))
    return tuple(made)


def _placement(chooser: random.Random, num_dims: int, kind: str) -> str:
    letters = ["R", *(f"S{dim}" for dim in range(num_dims))]
    weights = [1, *[2] * num_dims]
    if kind == "float":
        letters, weights = [*letters, "P"], [*weights, 1]
    return chooser.choices(letters, weights)[0]
