"""Make a random program from a seed: propose lines, keep those that run on plain tensors."""

from __future__ import annotations

import dataclasses
import random

import torch
from program import DTYPES, Input, LineFailed, Program, is_steady, one_device
from proposals import propose

__all__ = ["make_program"]

SIZES = (0, 1, 2, 3, 4, 5, 6, 7)
WEIGHTS = (0.5, 2, 3, 4, 4, 4, 2, 1)
KINDS = {"float": 12, "float32": 1, "complex": 1}  # of most inputs of a program, and how often
MAX_NUMEL = 400
MAX_TRIES = 150


def make_program(seed: str, mesh: tuple[int, ...]) -> Program | None:
    """Return the program of a seed on a mesh of this shape, or None where it has no steady result on one device."""
    chooser = random.Random(f"{seed} {mesh}")
    order = chooser.choices((0, 1, 2), (3, 6, 3))[0]
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
    (main,) = chooser.choices(list(KINDS), list(KINDS.values()))
    index = f"int{max(1, min(sizes))}"
    made = []
    for number in range(chooser.randint(2, 4)):
        kind = main if number < 1 or chooser.random() < 0.9 else "float"
        kind = kind if number < 2 else chooser.choice((kind, "bool", index, index))
        num_dims = chooser.choices((1, 2, 3), (2, 5, 2))[0]
        shape = tuple(chooser.choice(sizes) for _ in range(num_dims))
        if number and chooser.random() < 0.5:
            shape = made[0].shape
        placements = _placements(chooser, len(shape), kind, num_axes)
        grad = kind in DTYPES and order > 0 and chooser.random() < 0.7
        made.append(Input(shape, kind, placements, grad, chooser.random() < 0.15))
    return tuple(made)


def _placements(chooser: random.Random, num_dims: int, kind: str, num_axes: int) -> str:
    """Return placements as text; there are partial values of one kind at most, as torch allows it."""
    letters, weights = ["R", *(f"S{dim}" for dim in range(num_dims))], [1.0, *[2.0] * num_dims]
    partial = chooser.choices("PAXN", (20, 4, 2, 2) if kind in ("float", "float32") else (1, 0, 0, 0))[0]
    if kind != "bool":
        letters, weights = [*letters, partial], [*weights, 1.4]
    return "".join(chooser.choices(letters, weights, k=num_axes))
