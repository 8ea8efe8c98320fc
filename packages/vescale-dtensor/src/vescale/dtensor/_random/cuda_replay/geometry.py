"""Which random word each element of a CUDA draw gets: functions over integers, and the operators they hold for.

The CUDA generator is Philox4x32-10. A word has three coordinates: the **subsequence** (one per thread), the **block**
(four words each, counted from the generator's offset divided by 4) and the **lane** within the block. A kernel is a
grid-stride loop, so the coordinates of an element follow from the number of threads ``T`` that the launch has::

    threads     0  1  2 .. T-1        nullary kernel, U = 4 values per call, N = 2 T + 2 elements
    lane 0      0  1  2 .. T-1
    lane 1      T T+1 ..  2T-1        element e: subsequence e mod T, call e div T, block (e div T) div U,
    lane 2     2T 2T+1                           lane (e div T) mod U

``T`` depends on the number of elements, but only where it does not matter: a launch of at most ``most_threads``
elements uses lane 0 of the first block, subsequence = element. So every function below takes the largest ``T``.

The generator is advanced by the number of loop rounds times 4, for all operators but one. ``native_dropout`` reads
``V`` neighbors at a time, which moves the lanes inside the element order, and advances as if ``V`` were 1.

Source: ATen/native/cuda/{DistributionTemplates.h, Dropout.cu}, ATen/cuda/ApplyGridUtils.cuh of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..._torch.dispatch import Op

__all__ = [
    "BERNOULLI_ADVANCE",
    "NARROW",
    "WIDE",
    "Draw",
    "Grid",
    "Rounds",
    "Word",
    "bernoulli_word",
    "dropout_advance",
    "dropout_rounds",
    "dropout_word",
    "nullary_advance",
    "nullary_draws",
    "nullary_rounds",
    "nullary_word",
    "split_tree",
    "trial_args",
    "values_per_block",
    "vector_size",
]

aten = torch.ops.aten

FLOATING = {
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.bernoulli_.float,
    aten.geometric_.default,
}
"""Fills that transform floats, or doubles for a tensor of doubles."""

RANDOM_FROM = getattr(aten.random_, "from")
UNBOUNDED_64 = {torch.int64, torch.float64}

WIDE_RANGE = 2**28
"""From this range on, integers are drawn from 64 bits."""

NARROW, WIDE = 4, 2

WORDS = 4
"""Words of a Philox block; offsets of the generator count words and are multiples of it."""

BERNOULLI_ADVANCE = 12
"""`bernoulli` with a tensor of probabilities reserves 10 words, rounded up to whole blocks, for any size."""


class Word(NamedTuple):
    """Coordinates of a random value; `block` counts from the generator's offset before the draw."""

    subsequence: int
    block: int
    lane: int


class Rounds(NamedTuple):
    """What one round of the grid-stride loop does: all threads draw `window` elements and `offset` words each."""

    window: int
    offset: int


class Draw(NamedTuple):
    """A kernel launch of the native operator: elements `[start, start + numel)`, `offset` words after the state."""

    offset: int
    start: int
    numel: int


@dataclass(frozen=True)
class Grid:
    """The launch geometry of a device.

    Attributes:
        num_sms: streaming multiprocessors that the device shows.
        threads_per_sm: resident threads of each.
        block: threads of a block in the random kernels.
        index_limit: largest number that 32-bit indexing takes.

    Example:
        >>> Grid(132, 2048).most_threads
        270336
    """

    num_sms: int
    threads_per_sm: int
    block: int = 256
    index_limit: int = 2**31 - 1

    @property
    def most_threads(self) -> int:
        """Threads of a launch that fills the device."""
        return self.block * self.num_sms * (self.threads_per_sm // self.block)


# ------------------------------------------------------------------------------------------------- fills


def nullary_word(element: int, values: int, grid: Grid) -> Word:
    """Return the coordinates of an element of a fill that uses `values` values of each block (4, or 2 of 64 bits).

    Example:
        >>> nullary_word(5 * 270336 + 7, 4, Grid(132, 2048))
        Word(subsequence=7, block=1, lane=1)
    """
    call, subsequence = divmod(element, grid.most_threads)
    return Word(subsequence, *divmod(call, values))


def nullary_rounds(values: int, grid: Grid) -> Rounds:
    """Return the rounds of a fill."""
    return Rounds(values * grid.most_threads, WORDS)


def nullary_advance(numel: int, values: int, grid: Grid) -> int:
    """Return how far one launch of a fill advances the generator's offset.

    Example:
        >>> nullary_advance(4 * 270336 + 1, 4, Grid(132, 2048))
        8
    """
    return -(-numel // (values * grid.most_threads)) * WORDS


def split_tree(numel: int, itemsize: int, limit: int) -> list[tuple[int, int]]:
    """Return `(start, numel)` of the launches of a dense fill: halves, front half first, until 32-bit indices do.

    Example:
        >>> split_tree(10, 4, 12)
        [(0, 2), (2, 3), (5, 2), (7, 3)]
    """
    if _fits(numel, itemsize, limit):
        return [(0, numel)]
    front = numel // 2
    back = [(front + start, size) for start, size in split_tree(numel - front, itemsize, limit)]
    return split_tree(front, itemsize, limit) + back


def _fits(numel: int, itemsize: int, limit: int) -> bool:
    return numel <= limit and 1 + (numel - 1) * itemsize <= limit


def nullary_draws(numel: int, itemsize: int, values: int, grid: Grid) -> tuple[tuple[Draw, ...], int]:
    """Return the launches of a fill of a dense tensor, and its total advance.

    A tensor that needs 64-bit indices reserves its own advance first, unused, and then draws each half for itself.

    Example:
        >>> nullary_draws(6, 4, 4, Grid(1, 2, block=2, index_limit=12))
        ((Draw(offset=4, start=0, numel=3), Draw(offset=8, start=3, numel=3)), 12)
    """
    leaves = split_tree(numel, itemsize, grid.index_limit)
    offset = nullary_advance(numel, values, grid) if len(leaves) > 1 else 0
    draws = []
    for start, size in leaves:
        draws.append(Draw(offset, start, size))
        offset += nullary_advance(size, values, grid)
    return tuple(draws), offset


# ------------------------------------------------------------------------------------------------- dropout


def vector_size(numel: int, itemsize: int, address: int, widest: int) -> int:
    """Return how many neighbors a thread of `native_dropout` reads at once.

    Args:
        numel: elements of the dense input.
        itemsize: bytes of one.
        address: where the input starts in memory.
        widest: most elements that this dtype is read by: 16 bytes, at most 8 elements.

    Example:
        >>> [vector_size(numel, 2, address, 8) for numel, address in ((16, 0), (12, 0), (16, 4), (15, 0))]
        [8, 4, 2, 1]
    """
    size = widest
    while size > 1 and (address % (size * itemsize) or numel % size):
        size //= 2
    return size


def dropout_word(element: int, vector: int, grid: Grid) -> Word:
    """Return the coordinates of an element of `native_dropout` on a dense tensor.

    Example:
        >>> dropout_word(8 * 270336 + 5, 8, Grid(132, 2048))
        Word(subsequence=0, block=3, lane=1)
    """
    if vector == 1:
        return nullary_word(element, WORDS, grid)
    group, inside = divmod(element, vector)
    call, subsequence = divmod(group, grid.most_threads)
    return Word(subsequence, call * max(1, vector // WORDS) + inside // WORDS, inside % WORDS)


def dropout_rounds(vector: int, grid: Grid) -> Rounds:
    """Return the rounds of `native_dropout`; with 2 neighbors a round spends a block of 4 words on them."""
    if vector == 1:
        return nullary_rounds(WORDS, grid)
    return Rounds(vector * grid.most_threads, WORDS * max(1, vector // WORDS))


def dropout_advance(numel: int, grid: Grid) -> int:
    """Return how far `native_dropout` advances the generator's offset, independent of its use."""
    return nullary_advance(numel, WORDS, grid)


# ------------------------------------------------------------------------------------------------- bernoulli


def bernoulli_word(element: int) -> Word:
    """Return the coordinates of an element of `bernoulli` with a tensor of probabilities: a thread draws 4 neighbors.

    Example:
        >>> bernoulli_word(1_000_003)
        Word(subsequence=250000, block=0, lane=3)
    """
    return Word(element // WORDS, 0, element % WORDS)


# ------------------------------------------------------------------------------------------------- operators


def values_per_block(op: Op, dtype: torch.dtype, args: Sequence[object]) -> int | None:
    """Return how many values of each Philox block a fill uses: 4, 2, or None where that is not known.

    Args:
        op: the in-place operator.
        dtype: element type of the tensor.
        args: positional arguments of `op` after the tensor.

    Example:
        >>> values_per_block(RANDOM_FROM, torch.int32, (0, 2**28)), values_per_block(RANDOM_FROM, torch.int32, (0, 9))
        (2, 4)
    """
    if dtype.is_complex:
        return None
    if op in FLOATING:
        return WIDE if dtype == torch.float64 else NARROW
    if op is aten.random_.default:
        return WIDE if dtype in UNBOUNDED_64 else NARROW
    size = _range(op, dtype, args)
    if size is None or (dtype.is_floating_point and WIDE_RANGE // 2 < size < WIDE_RANGE * 2):
        return None  # the bounds of a draw of integers into floats are rounded first
    return WIDE if size >= WIDE_RANGE else NARROW


def _range(op: Op, dtype: torch.dtype, args: Sequence[object]) -> int | None:
    """Return the number of integers that `random_` chooses from."""
    if op is aten.random_.to and len(args) == 1:
        start, stop = 0, args[0]
    elif op is RANDOM_FROM and len(args) == 2:
        start, stop = args
    else:
        return None
    if stop is None and not dtype.is_floating_point:
        stop = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    if not (isinstance(start, int) and isinstance(stop, int)):
        return None
    return stop - start


def trial_args(op: Op, dtype: torch.dtype, *, wide: bool) -> tuple[object, ...]:
    """Return arguments for a test draw that uses blocks as ``wide`` says, for any dtype that has such draws.

    Example:
        >>> trial_args(RANDOM_FROM, torch.int64, wide=True)
        (0, 268435456)
    """
    if op in (RANDOM_FROM, aten.random_.to):
        stop = WIDE_RANGE if wide else 2 if dtype == torch.bool else 100
        return (stop,) if op is aten.random_.to else (0, stop)
    return (0.5,) if op in (aten.bernoulli_.float, aten.geometric_.default) else ()
