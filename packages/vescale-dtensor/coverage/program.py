"""A random program as a small data structure: inputs with placements, a mesh, and lines of Python.

One function runs a program on plain tensors and on DTensors. Its results are every variable as it is at the end, the
first or second gradients of the inputs, and the state of the generator::

    inputs   x0, x1, ...       values follow from the number of the input alone
    lines    v2 = x0.cumsum(-1)
             v2[1].mul_(2.0)   any statement; `move` copies a tensor and redistributes the copy
    order    0: without autograd, 1: gradients of the inputs, 2: gradients of those, too

A program prints as a script that compares itself with one device (`script.py`), and as one line for
`hunt.py --replay`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence

import _torch
import torch
import torch.nn.functional as F
from combos import parse
from pieces import Mismatch, close
from torch.distributed.tensor import Placement, Replicate, Shard

__all__ = [
    "DTYPES",
    "RTOL",
    "Input",
    "LineFailed",
    "Program",
    "is_steady",
    "one_device",
    "run",
    "same_results",
    "variables_in",
    "weight",
]

RTOL = {"float": 1e-10, "float32": 1e-4}
NOISE = {"float": 1e-15, "float32": 3e-7}  # relative: what another order of additions may change
DTYPES = {"float": torch.float64, "float32": torch.float32, "complex": torch.complex128}


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a program.

    Attributes:
        shape: Its shape.
        kind: ``"float"``, ``"float32"``, ``"complex"``, ``"bool"``, or ``"int5"``: indices below 5.
        placements: One letter for each mesh axis, and the dim of a shard: ``"S0R"``.
        requires_grad: Whether the program computes its gradient.
        is_transposed: Whether its memory has the order of the transposed tensor.
    """

    shape: tuple[int, ...]
    kind: str
    placements: str
    requires_grad: bool = False
    is_transposed: bool = False

    def value(self, number: int, noise: float = 0.0) -> torch.Tensor:
        """Return the values of input ``number``, those of floats changed by a relative ``noise``."""
        shape = self.shape[::-1] if self.is_transposed else self.shape
        value = self._drawn(shape, torch.Generator().manual_seed(1000 + number), noise)
        return value.permute(*range(value.ndim)[::-1]).clone() if self.is_transposed else value  # not a view

    def num_addends(self, mesh: Sequence[int]) -> int:
        """Return of how many ranks' parts an element is the sum or mean; two have one order only."""
        return math.prod(size for size, p in zip(mesh, parse(self.placements), strict=True) if _adds_up(p))

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator, noise: float) -> torch.Tensor:
        if self.kind == "bool":
            return torch.rand(shape, generator=generator) < 0.6
        if self.kind not in DTYPES:
            return torch.randint(int(self.kind.removeprefix("int")), shape, generator=generator)
        value = torch.randn(shape, generator=generator, dtype=DTYPES[self.kind])
        return value * (1 + noise * torch.randn(shape, generator=generator, dtype=DTYPES[self.kind]))


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: the mesh's shape, inputs, lines, and the order of the gradients."""

    mesh: tuple[int, ...]
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    order: int = 0

    def precision(self, found: dict[str, torch.Tensor | None]) -> str:
        """Return the least precise kind of its inputs and results: ``"float"`` or ``"float32"``.

        An integer times 0.5 is a number of 32 bits.
        """
        dtypes = {value.dtype for value in found.values() if isinstance(value, torch.Tensor)}
        is_coarse = any(each.kind == "float32" for each in self.inputs) or dtypes & {torch.float32, torch.complex64}
        return "float32" if is_coarse else "float"

    def replay_line(self) -> str:
        """Return the program as one line of text, which `parse_line` reads."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def parse_line(cls, line: str) -> Program:
        """Return the program of a replay line."""
        tree = json.loads(line)
        inputs = tuple(Input(**{**each, "shape": tuple(each["shape"])}) for each in tree["inputs"])
        return cls(tuple(tree["mesh"]), inputs, tuple(tree["lines"]), tree["order"])


class LineFailed(Exception):  # noqa: N818 - carries an error of the program
    """The error of a line; `where` is the line, or ``gradient`` or ``second gradient``."""

    def __init__(self, where: str):
        super().__init__(where)
        self.where = where


def run(
    program: Program,
    inputs: Sequence[torch.Tensor],
    move: Callable,
    weigh: Callable,
    mode: contextlib.AbstractContextManager | None = None,
    in_gradients: contextlib.AbstractContextManager | None = None,
) -> dict[str, torch.Tensor | None]:
    """Run a program; return its variables as they are at the end, its gradients and the generator's state, by name.

    Args:
        program: What to run.
        inputs: Plain tensors or DTensors.
        move: What the lines call ``move``.
        weigh: Returns the gradient of result ``number`` where the backward pass starts, given ``(number, result)``.
        mode: Around each line.
        in_gradients: Around gradients, some of which torch computes under a mode by other formulas: those for
            subclasses of tensors, so those of DTensors.

    Raises:
        LineFailed: A line, or the backward pass, raised an error; it is the cause.
    """
    names = {f"x{n}": tensor for n, tensor in enumerate(inputs)}
    scope = {"torch": torch, "F": F, "Shard": Shard, "Replicate": Replicate, "move": move, **names}
    torch.manual_seed(7)
    with torch.set_grad_enabled(program.order > 0):
        for line in program.lines:
            try:
                with mode or contextlib.nullcontext():
                    exec(line, scope)
            except Exception as error:
                raise LineFailed(line) from error
        found = {name: value for name, value in scope.items() if re.fullmatch(r"[xv]\d+", name)}
        wanted = {name: tensor for name, tensor in names.items() if tensor.requires_grad}
        outs = _differentiable(found.values())
        for turn in range(1, program.order + 1 if wanted and outs else 1):
            try:
                weights = [weigh(number, out) for number, out in outs.items()]
                again, tensors = turn < program.order, list(wanted.values())
                with in_gradients or contextlib.nullcontext():
                    grads = torch.autograd.grad(
                        [*outs.values()], tensors, weights, create_graph=again, allow_unused=True
                    )
            except Exception as error:
                raise LineFailed("second gradient" if turn == 2 else "gradient") from error
            found |= {f"grad{turn} of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
            outs = _differentiable(grads)
            if not outs:
                break
    found["generator"] = torch.get_rng_state()
    return found


def _differentiable(values: Iterable[object]) -> dict[int, torch.Tensor]:
    """Return the tensors that require gradients by their number, which does not depend on what the others require."""
    return {n: v for n, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad}


def one_device(
    program: Program,
    share: float = 0.0,
    unit: float = 0.0,
    in_gradients: contextlib.AbstractContextManager | None = None,
) -> dict[str, torch.Tensor | None]:
    """Run a program on plain tensors; with a ``share`` of noise, ``unit`` times as large, in inputs and sums."""
    inputs = [
        each.value(number, share * unit).requires_grad_(each.requires_grad and program.order > 0)
        for number, each in enumerate(program.inputs)
    ]
    partial = [x for x, each in zip(inputs, program.inputs, strict=True) if each.num_addends(program.mesh) > 2]
    has_sums = any(each.num_addends(program.mesh) > 1 for each in program.inputs)
    mode = _torch.NoisySums(share, unit, has_sums=has_sums, partial=partial) if share else None
    found = run(program, inputs, lambda tensor, _: tensor.clone(), weight, mode, in_gradients)
    return {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in found.items()}


def weight(number: int, out: torch.Tensor) -> torch.Tensor:
    """Return the gradient of result ``number``: random, because the gradients of a plain sum hide errors."""
    generator = torch.Generator().manual_seed(99 + number)
    dtype = torch.complex128 if out.is_complex() else torch.float64
    return torch.randn(tuple(out.shape), generator=generator, dtype=dtype).to(out.dtype)


def is_steady(program: Program) -> dict[str, torch.Tensor | None] | None:
    """Return the results of one device, or None where the program has none that another order of additions keeps.

    Such a program fails on plain tensors, has results that are not finite, or results that rounding errors change.
    What is added up to gradients, and cancels, has rounding errors of the largest number; formulas have large ones
    inside, such as the second gradients of norms of a single element.
    """
    height = _torch.Height()
    try:
        expected = one_device(program)
        if not all(torch.isfinite(v).all() for v in expected.values() if isinstance(v, torch.Tensor)):
            return None
        precision = program.precision(expected)
        gradients = max((_largest(value) for name, value in expected.items() if name.startswith("grad")), default=0.0)
        if program.order:
            one_device(program, in_gradients=height)
        if NOISE[precision] * height.largest > RTOL[precision] / 30 * max(1e-3, gradients):
            return None
        for share in (1, -1, 0.5, -0.5):  # the noise of an input has the same pattern in every run
            noisy = one_device(program, share, NOISE[precision])
            same_results(noisy, expected, rtol=RTOL[precision] / 30)
    except (LineFailed, Mismatch):
        return None
    return expected


def same_results(actual: dict, expected: dict, rtol: float) -> None:
    """Compare the results of two runs.

    What is zero but for rounding differs by rounding of the numbers that cancel, about as large as the results.

    Raises:
        Mismatch: Naming the first result that differs.
    """
    largest = max((_largest(v) for v in expected.values()), default=0.0)
    for name, wanted in expected.items():
        got = actual.get(name)  # no gradient where the one before it has none
        if isinstance(wanted, torch.Tensor) != isinstance(got, torch.Tensor):
            there = got if wanted is None else wanted
            if (
                name.startswith("grad")
                and isinstance(there, torch.Tensor)
                and close(torch.zeros_like(there), there, rtol)
            ):
                continue  # a gradient of zeros, up to rounding errors, or none
            raise Mismatch(f"{name} is {got}, on one device {wanted}")
        if not isinstance(wanted, torch.Tensor):
            got, wanted = (torch.tensor(v) for v in (got, wanted)) if wanted is not None else (torch.ones(()),) * 2
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            raise Mismatch(
                f"{name} is {got.dtype} {tuple(got.shape)}, on one device {wanted.dtype} {tuple(wanted.shape)}"
            )
        if not close(got, wanted, rtol) and not _is_rounding(got, wanted, largest):
            raise Mismatch(f"{name} is {_short(got)}, on one device {_short(wanted)}")


def _largest(value: object) -> float:
    """Return the largest finite magnitude of a tensor of numbers that are no integers; 0 for all else."""
    return _torch.largest(value) if isinstance(value, torch.Tensor) else 0.0


def _is_rounding(got: torch.Tensor, wanted: torch.Tensor, largest: float) -> bool:
    """Return whether two results are zero up to a few roundings of numbers as large as ``largest``."""
    if not wanted.is_floating_point() or not (got.isfinite().all() and wanted.isfinite().all()):
        return False
    limit = 4 * torch.finfo(wanted.dtype).eps * largest
    return max(_largest(got), _largest(wanted)) <= limit


def _adds_up(placement: Placement) -> bool:
    return any(placement.is_partial(op) for op in ("sum", "avg"))


def variables_in(line: str) -> list[str]:
    """Return the names of the variables of a line, in order."""
    return re.findall(r"\b[xv]\d+\b", line)


def _short(tensor: torch.Tensor) -> str:
    flat = [f"{v:.12g}" if isinstance(v, float) else str(v) for v in tensor.flatten()[:4].tolist()]
    return f"[{', '.join(flat)}{', ...' if tensor.numel() > 4 else ''}]"
