"""Draw this rank's part of one random operator by replay: plan the launches, run them, set the generator.

The kernels and their transforms are those of stock torch; only the offset of the generator is ours. After each launch
the offset must have moved as planned. Otherwise the operator does not draw as assumed, and the caller draws the full
tensor instead. At the end the generator is where stock torch leaves it.

Nothing here checks that the replay is exact on this device: `selftest` does, by calling these functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._layout.boxes import Box, flat_offset, index_from
from ..._torch.dispatch import Op
from ..philox.cipher import words_of_subsequences
from .backend import Backend, PhiloxGenerator
from .geometry import (
    BERNOULLI_ADVANCE,
    Draw,
    Rounds,
    Word,
    bernoulli_word,
    dropout_advance,
    dropout_rounds,
    nullary_advance,
    nullary_draws,
    nullary_rounds,
    vector_size,
)
from .windows import Copy, Launch, Request, flat_runs, plan

__all__ = [
    "DIRECT_NUMEL",
    "SCRATCH_NUMEL",
    "Fill",
    "UnexpectedAdvance",
    "bernoulli_part",
    "dropout_part",
    "fill_part",
    "uniform_of",
]

SCRATCH_NUMEL = 2**22
"""Elements of scratch, if a window is not larger."""

DIRECT_NUMEL = 2**26
"""Elements of a launch into a shard."""

CHUNK = 2**20
"""Elements whose words are computed at a time."""

Views = Sequence[tuple[Box, Tensor]]


class UnexpectedAdvance(RuntimeError):  # noqa: N818 - it names what happened
    """An operator moved the generator by another amount than planned."""


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

    op: Op
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
        _run_fill(launches, shape, parts, native, generator, advance)
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
        vector: neighbors that the kernel reads at once of the global tensor.
        widest: most neighbors that it reads at once of this dtype.

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
        _run_dropout(launches, shape, parts, native, generator, advance, shift=shift)

    _leave_at(generator, before, dropout_advance(numel, grid), run)


def bernoulli_part(
    views: Sequence[tuple[Box, Tensor, Tensor]], *, shape: Sequence[int], generator: PhiloxGenerator
) -> None:
    """Fill outputs of ``bernoulli_`` with probabilities; ``views`` are (box, probabilities, output), row-major."""

    def run() -> None:
        for box, p, out in views:
            _run_bernoulli(shape, box, p, out, generator)

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
    """Return whether launches at window boundaries read the input in place as they read the global tensor."""
    (offsets, _), *tensors = view
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    return _reads_as(vector, widest, tensors[0], -flat_offset(shape, offsets) % window)


def _leave_at(generator: PhiloxGenerator, before: int, total: int, run: Callable[[], None]) -> None:
    """Run, and set the generator ``total`` words after ``before``; back to ``before`` if that fails."""
    try:
        run()
    except BaseException:
        generator.set_offset(before)
        raise
    generator.set_offset(before + total)


# ------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class _Run:
    """A draw under way: the generator, its offset before the draw, and how far a launch must move it."""

    generator: PhiloxGenerator
    before: int
    advance: Callable[[int], int]

    def launch(self, offset: int, numel: int, native: Callable[[], object]) -> object:
        self.generator.set_offset(self.before + offset)
        result = native()
        moved = self.generator.get_offset() - self.before - offset
        if moved != self.advance(numel):
            raise UnexpectedAdvance(f"{numel} elements moved the generator by {moved}, not {self.advance(numel)}")
        return result


def _run_fill(
    launches: Sequence[Launch],
    shape: Sequence[int],
    views: Sequence[tuple[Box, Tensor]],
    native: Callable[[Tensor], object],
    generator: PhiloxGenerator,
    advance: Callable[[int], int],
) -> None:
    """Fill ``views`` by the launches of a plan. The generator's offset is left anywhere.

    Args:
        launches: the plan.
        shape: shape of the global tensor, dims from the slowest to the fastest in memory.
        views: wanted boxes with the memory of each, dims in the same order.
        native: fills a flat tensor.
        generator: what ``native`` draws from.
        advance: words by which a launch of some elements moves the generator.
    """
    run = _Run(generator, generator.get_offset(), advance)
    scratch = None
    for launch in launches:
        if launch.direct is not None:
            piece = _flat(shape, views[launch.direct], launch)
        else:
            scratch = _scratch(launches, views[0][1]) if scratch is None else scratch
            piece = scratch[: launch.numel]
        run.launch(launch.offset, launch.numel, lambda piece=piece: native(piece))
        for copy in launch.copies:
            views[copy.box][1][copy.index].copy_(_kept(piece, copy))


def _run_dropout(
    launches: Sequence[Launch],
    shape: Sequence[int],
    views: Sequence[tuple[Box, Tensor, Tensor, Tensor]],
    native: Callable[[Tensor], tuple[Tensor, Tensor]],
    generator: PhiloxGenerator,
    advance: Callable[[int], int],
    *,
    shift: int,
) -> None:
    """Fill outputs and masks by the launches of a plan for ``native_dropout``; ``views`` are (box, input, out, mask).

    ``shift`` elements of padding in front of scratch input let the kernel read no more neighbors at once than it does
    for the global tensor.
    """
    run = _Run(generator, generator.get_offset(), advance)
    scratch = None
    for launch in launches:
        if launch.direct is not None:
            box, *tensors = views[launch.direct]
            piece, out, mask = (_flat(shape, (box, tensor), launch) for tensor in tensors)
        else:
            scratch = _scratch(launches, views[0][1], shift) if scratch is None else scratch
            piece = scratch[shift : shift + launch.numel]
        for copy in launch.copies:
            _kept(piece, copy).copy_(views[copy.box][1][copy.index])
        drawn = run.launch(launch.offset, launch.numel, lambda piece=piece: native(piece))
        if launch.direct is not None:
            out.copy_(drawn[0])
            mask.copy_(drawn[1])
        for copy in launch.copies:
            for target, source in zip(views[copy.box][2:], drawn, strict=True):
                target[copy.index].copy_(_kept(source, copy))


def _scratch(launches: Sequence[Launch], like: Tensor, shift: int = 0) -> Tensor:
    numel = max(launch.numel for launch in launches if launch.direct is None)
    return torch.empty(numel + shift, dtype=like.dtype, device=like.device)


def _flat(shape: Sequence[int], view: tuple[Box, Tensor], launch: Launch) -> Tensor:
    (offsets, _), tensor = view
    first = launch.start - flat_offset(shape, offsets)
    return tensor.view(-1)[first : first + launch.numel]


def _kept(piece: Tensor, copy: Copy) -> Tensor:
    return piece[copy.first : copy.first + math.prod(copy.sizes)].view(copy.sizes)[copy.inside]


def _run_bernoulli(
    shape: Sequence[int], box: Box, p: Tensor, out: Tensor, generator: PhiloxGenerator, *, chunk: int = CHUNK
) -> None:
    """Fill ``out`` with the elements of ``box`` of a ``bernoulli_`` draw with probabilities; the offset stays."""
    seed, block = generator.initial_seed(), generator.get_offset() // 4
    cast = torch.float64 if out.dtype == torch.float64 else torch.float32
    for part, element in _positions(shape, box, chunk, out.device):
        word = bernoulli_word(element)
        drawn = uniform_of(_select(words_of_subsequences(seed, word.subsequence, block + word.block), word))
        probability = p[part].to(cast)
        torch.ops.aten._assert_async.default(((probability >= 0) & (probability <= 1)).all())
        out[part].copy_(drawn <= probability)


def uniform_of(word: Tensor) -> Tensor:
    """Return the float32 in (0, 1] that cuRAND makes of a word: the middle of its interval of length 2^-32.

    Example:
        >>> uniform_of(torch.tensor([0, 2**31, 2**32 - 1])).tolist()
        [1.1641532182693481e-10, 0.5, 1.0]
    """
    return word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)


def _select(words: Sequence[Tensor], word: Word) -> Tensor:
    return torch.stack(tuple(words)).gather(0, word.lane.unsqueeze(0)).squeeze(0)


def _positions(
    shape: Sequence[int], box: Box, chunk: int, device: torch.device
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield parts of a box of at most about ``chunk`` elements, and the flat positions of their elements."""
    offsets, sizes = box
    for part in _parts(sizes, chunk):
        element = torch.zeros((), dtype=torch.int64, device=device)
        for size, offset, cut in zip(shape, offsets, part, strict=True):
            along = torch.arange(offset + cut.start, offset + cut.stop, device=device)
            element = (element * size).unsqueeze(-1) + along
        yield part, element


def _parts(sizes: Sequence[int], chunk: int) -> Iterator[tuple[slice, ...]]:
    """Cut a box of these sizes along its leading dims."""
    if not sizes:
        yield ()
        return
    size, *rest = sizes
    row = math.prod(rest)
    if row > chunk:
        for i in range(size):
            for part in _parts(rest, chunk):
                yield slice(i, i + 1), *part
        return
    step = max(chunk // max(row, 1), 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size)), *(slice(0, other) for other in rest)


def _reads_as(vector: int, widest: int, tensor: Tensor, start: int) -> bool:
    """Return whether the kernel reads ``tensor`` from element ``start`` on in vectors of ``vector`` elements."""
    itemsize = tensor.element_size()
    return vector_size(widest, itemsize, tensor.data_ptr() + start * itemsize, widest) == vector
