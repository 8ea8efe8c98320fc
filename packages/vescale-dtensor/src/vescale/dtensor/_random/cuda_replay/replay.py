"""Carry out a plan: set the generator, run the native operator, keep what is wanted.

The kernels and their transforms are stock torch's own; only the generator's offset is ours. After each launch the
offset must have moved as the plan expects. If it has not, the operator does not draw as assumed, and the caller draws
the whole tensor instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._layout.boxes import Box, flat_offset
from ..philox.cipher import words_of_subsequences
from .backend import PhiloxGenerator
from .geometry import Word, bernoulli_word, vector_size
from .windows import Copy, Launch

__all__ = ["UnexpectedAdvance", "reads_as", "run_bernoulli", "run_dropout", "run_fill"]

CHUNK = 2**20
"""Elements whose words are computed at a time."""


class UnexpectedAdvance(RuntimeError):  # noqa: N818 - it names what happened
    """An operator moved the generator by another amount than planned."""


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


def run_fill(
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
        shape: shape of the whole tensor, dims from the slowest to the fastest in memory.
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


def run_dropout(
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

    ``shift`` elements of padding in front of scratch input let the kernel read no more neighbours at once than it does
    for the whole tensor.
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


def run_bernoulli(
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


def reads_as(vector: int, widest: int, tensor: Tensor, start: int) -> bool:
    """Tell whether the kernel reads the memory of ``tensor`` from element ``start`` on ``vector`` neighbours at once.

    Example:
        >>> reads_as(4, 4, torch.empty(64), 0), reads_as(2, 4, torch.empty(64), 0)
        (True, False)
    """
    itemsize = tensor.element_size()
    return vector_size(widest, itemsize, tensor.data_ptr() + start * itemsize, widest) == vector
