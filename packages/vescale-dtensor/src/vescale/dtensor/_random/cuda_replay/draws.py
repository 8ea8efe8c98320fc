"""Draw the wanted part of one random operator by replay: plan, run, and leave the generator where stock leaves it.

Nothing here asks whether the replay is exact on this device; `_selftest` does, by calling these functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._layout.boxes import Box, flat_offset, index_from
from ..._torch import dispatch as _torch
from .backend import Backend, PhiloxGenerator
from .geometry import (
    BERNOULLI_ADVANCE,
    Draw,
    Rounds,
    dropout_advance,
    dropout_rounds,
    nullary_advance,
    nullary_draws,
    nullary_rounds,
)
from .replay import reads_as, run_bernoulli, run_dropout, run_fill
from .windows import Launch, Request, flat_runs, plan

__all__ = ["DIRECT_NUMEL", "SCRATCH_NUMEL", "Fill", "bernoulli_part", "dropout_part", "fill_part"]

SCRATCH_NUMEL = 2**22
"""Elements of scratch, if a window is not larger."""

DIRECT_NUMEL = 2**26
"""Elements of a launch into a shard."""

Views = Sequence[tuple[Box, Tensor]]


@dataclass(frozen=True)
class Fill:
    """An in-place operator with its arguments.

    Attributes:
        op: the operator.
        values: values of each block that it uses for ``dtype``.
        dtype: element type of the tensor.
        args: positional arguments after the tensor.
        kwargs: keyword arguments but the generator.
    """

    op: _torch.Op
    values: int
    dtype: torch.dtype
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def fill_part(
    backend: Backend,
    fill: Fill,
    views: Views,
    *,
    shape: Sequence[int],
    device: torch.device,
    generator: PhiloxGenerator,
) -> None:
    """Fill ``views``, boxes of a dense tensor of ``shape``, dims from the slowest to the fastest in memory.

    Raises:
        UnexpectedAdvance: the operator does not draw as assumed; the views hold anything, the generator is as before.
    """
    grid, before = backend.grid(device), generator.get_offset()
    draws, total = nullary_draws(math.prod(shape), fill.dtype.itemsize, fill.values, grid)
    advance = functools.partial(nullary_advance, values=fill.values, grid=grid)

    def native(tensor: Tensor) -> None:
        backend.fill(fill.op, tensor, fill.args, fill.kwargs, generator)

    def run() -> None:
        rounds = nullary_rounds(fill.values, grid)
        parts = _in_runs(views, shape, rounds.window)
        direct = [tensor.is_contiguous() for _, tensor in parts]
        launches = _plan(parts, direct, shape, draws, rounds, 1, grid.index_limit // fill.dtype.itemsize)
        run_fill(launches, shape, parts, native, generator, advance)
        if not launches:
            native(torch.empty(0, dtype=fill.dtype, device=device))  # which checks the arguments

    _leave_at(generator, before, total, run)


def dropout_part(
    backend: Backend,
    views: Sequence[tuple[Box, Tensor, Tensor, Tensor]],
    *,
    shape: Sequence[int],
    device: torch.device,
    p: float,
    vector: int,
    widest: int,
) -> None:
    """Fill outputs and masks of ``native_dropout``; ``views`` are (box, input, output, mask), dims in memory order.

    Args:
        backend: the device's operators.
        views: boxes of the global tensor with this rank's memory of each.
        shape: shape of the global tensor.
        device: where the tensors are.
        p: probability of a zero.
        vector: neighbours that the kernel reads at once of the global tensor.
        widest: most neighbours that it reads at once of this dtype.

    Raises:
        UnexpectedAdvance: the operator does not draw as assumed; outputs hold anything, the generator is as before.
    """
    grid, generator, numel = backend.grid(device), backend.generator(device, None), math.prod(shape)
    before, rounds = generator.get_offset(), dropout_rounds(vector, grid)

    def run() -> None:
        parts = _in_runs(views, shape, rounds.window)
        direct = [_reads_directly(part, shape, rounds.window, vector, widest) for part in parts]
        launches = _plan(parts, direct, shape, (Draw(0, 0, numel),), rounds, vector, grid.index_limit)
        advance = functools.partial(dropout_advance, grid=grid)
        native = functools.partial(backend.dropout, p=p)
        shift = 0 if vector == widest else vector
        run_dropout(launches, shape, parts, native, generator, advance, shift=shift)

    _leave_at(generator, before, dropout_advance(numel, grid), run)


def bernoulli_part(
    views: Sequence[tuple[Box, Tensor, Tensor]], *, shape: Sequence[int], generator: PhiloxGenerator
) -> None:
    """Fill outputs of ``bernoulli_`` with probabilities; ``views`` are (box, probabilities, output), row-major."""

    def run() -> None:
        for box, p, out in views:
            run_bernoulli(shape, box, p, out, generator)

    _leave_at(generator, generator.get_offset(), BERNOULLI_ADVANCE, run)


def _in_runs(views: Sequence[tuple], shape: Sequence[int], window: int) -> list[tuple]:
    """Cut views into flat ranges of at least a window, where they are made of such."""
    parts = ((view, box) for view in views for box in flat_runs(shape, view[0], window))
    return [(box, *(tensor[index_from(view[0][0], box)] for tensor in view[1:])) for view, box in parts]


def _plan(
    views: Sequence[tuple],
    direct: Sequence[bool],
    shape: Sequence[int],
    draws: tuple[Draw, ...],
    rounds: Rounds,
    multiple: int,
    limit: int,
) -> tuple[Launch, ...]:
    """Plan with scratch and launches of at most ``limit`` elements, which 32-bit indices reach."""
    boxes = tuple(box for box, *_ in views)
    numels = min(SCRATCH_NUMEL, limit), min(DIRECT_NUMEL, limit)
    return plan(Request(tuple(shape), boxes, tuple(direct), draws, rounds, multiple, *numels))


def _reads_directly(view: tuple, shape: Sequence[int], window: int, vector: int, widest: int) -> bool:
    """Tell whether launches at window boundaries read the input in place as they read the global tensor."""
    (offsets, _), *tensors = view
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    return reads_as(vector, widest, tensors[0], -flat_offset(shape, offsets) % window)


def _leave_at(generator: PhiloxGenerator, before: int, total: int, run: Callable[[], None]) -> None:
    """Run, and set the generator ``total`` words after ``before``; back to ``before`` if that fails."""
    try:
        run()
    except BaseException:
        generator.set_offset(before)
        raise
    generator.set_offset(before + total)
