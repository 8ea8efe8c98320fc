"""A part of a tensor as numbers that add up over parts, whatever the parts are.

Every element has a place in the global tensor: its row (index on dim 0) and its column (flat index on other dims).

    hash        sum over rows of  a(row) * sum over columns of  mix(bits, column)      modulo 2**64
    projection  sum over rows of  s(row) * sum over columns of  t(column) * value      signs s and t of 1 or -1
    square      sum of squares

All three are sums over elements, so the digest of a tensor is the sum of the digests of disjoint parts of it: of
shards, of rows of data-parallel ranks, of micro-batches. No value has to be gathered. A rank keeps the inner sums, one
per row, until it knows which rows of the global batch they are, and then adds them up in `NUM_BLOCKS` blocks of rows.

Equal hashes mean equal bits: the multipliers of splitmix64 mix bits and place, and zeros of either sign are equal. The
difference of two projections has, over the signs, the mean square of the difference of the tensors. So blocks of
projections estimate the norm of a difference without the other tensor, and see permutations, which norms do not.

Sources: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), for the constants; Alon, Matias
and Szegedy, "The space complexity of approximating the frequency moments" (1996), section 2.2, for the projections.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Blocks of rows that have digests of their own, and so say where in a tensor a difference lies.
NUM_BLOCKS = 8

#: Elements that are digested at a time: intermediate values stay in a core's cache, or fill an accelerator.
_CHUNK = {"cpu": 1 << 16}
_CHUNK_ELSEWHERE = 1 << 21

#: Columns whose keys are kept for the next tensor of the same layout.
_KEPT = 1 << 16

_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class RowSums:
    """The inner sums of a part of a tensor, one for each of its rows.

    Attributes:
        hashes: int64, ``[rows]``.
        projections: float64, ``[rows]``.
        squares: float64, ``[rows]``.
        start: the first row, in the tensor of which it is a part.
    """

    hashes: Tensor
    projections: Tensor
    squares: Tensor
    start: int


def row_sums(part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> RowSums:
    """Return the sums of the rows of a rectangle of a tensor.

    Args:
        part: the values of the rectangle, of any dtype.
        offsets: where it begins in the tensor, one per dim.
        shape: of the tensor.

    Example:
        >>> whole = torch.arange(6.0).reshape(2, 3)
        >>> left, right = row_sums(whole[:, :2], (0, 0), (2, 3)), row_sums(whole[:, 2:], (0, 2), (2, 3))
        >>> torch.equal(left.hashes + right.hashes, row_sums(whole, (0, 0), (2, 3)).hashes)
        True
    """
    if part.is_complex():
        part, offsets, shape = torch.view_as_real(part.resolve_conj()), (*offsets, 0), (*shape, 2)
    if part.dim() == 0:
        part, offsets, shape = part[None], (0,), (1,)
    rows, sizes = part.shape[0], tuple(part.shape[1:])
    make = _kept_columns if math.prod(sizes) <= _KEPT else _columns
    keys, signs = make(shape[1:], offsets[1:], sizes, part.device)
    hashes = torch.zeros(rows, dtype=torch.int64, device=part.device)
    projections, squares = hashes.double(), hashes.double()
    flat = part.reshape(rows, keys.numel())
    chunk = _CHUNK.get(part.device.type, _CHUNK_ELSEWHERE)
    columns = max(1, min(keys.numel(), chunk))
    height = max(1, min(rows, chunk // columns))
    scratch = torch.empty(2, height * columns, dtype=torch.int64, device=part.device)
    for first in range(0, rows, height):
        there = slice(first, first + height)
        for start in range(0, keys.numel(), columns):
            here = slice(start, start + columns)
            found = _sums(flat[there, here], keys[here], signs[here], scratch)
            for total, each in zip((hashes, projections, squares), found, strict=True):
                total[there] += each
    return RowSums(hashes, projections, squares, offsets[0])


def _sums(rows: Tensor, keys: Tensor, signs: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mixed, other = (each[: rows.numel()].view(rows.shape) for each in scratch)
    bits = rows
    if rows.is_floating_point():
        bits = (rows.float() if rows.element_size() == 1 else rows) + 0.0  # -0.0 becomes 0.0
        bits = bits.contiguous().view(_BITS[bits.element_size()])
    mixed.copy_(bits).bitwise_xor_(keys)
    hashes = _mix_(mixed, other).sum(1)
    wide = other.view(torch.float64).copy_(rows)
    return hashes, wide @ signs, torch.linalg.vector_norm(wide, dim=1).square_()


def _mix_(values: Tensor, other: Tensor) -> Tensor:
    """Mix in place, with another tensor of that size for what comes between."""
    for distance, factor in ((30, _FIRST), (27, _SECOND)):
        values.bitwise_xor_(torch.bitwise_right_shift(values, distance, out=other)).mul_(factor)
    return values.bitwise_xor_(torch.bitwise_right_shift(values, 31, out=other))


def _keys(indices: Tensor) -> Tensor:
    scaled = (indices + 1) * _GOLDEN
    return _mix_(scaled, torch.empty_like(scaled))


def _signs(keys: Tensor) -> Tensor:
    return ((keys >> 17) & 1).double() * 2 - 1


def _columns(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the keys and signs of the columns of a rectangle."""
    flat = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        along = torch.arange(offset, offset + size, device=device) * math.prod(shape[dim + 1 :])
        flat = flat + along.reshape([-1 if other == dim else 1 for other in range(len(shape))])
    keys = _keys(flat.reshape(-1))
    return keys, _signs(keys)


_kept_columns = functools.lru_cache(maxsize=256)(_columns)


@dataclass(frozen=True)
class Digest:
    """The digest of a part of a tensor, or of all of it.

    Attributes:
        hashes: of each block of rows, modulo 2**64.
        projections: of each block.
        squares: of each block.
    """

    hashes: tuple[int, ...]
    projections: tuple[float, ...]
    squares: tuple[float, ...]

    def __add__(self, other: Digest) -> Digest:
        return Digest(
            tuple((a + b) % 2**64 for a, b in zip(self.hashes, other.hashes, strict=True)),
            tuple(a + b for a, b in zip(self.projections, other.projections, strict=True)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )

    @property
    def norm(self) -> float:
        """The Euclidean norm of the tensor."""
        return math.sqrt(sum(self.squares))


def block_digests(parts: list[tuple[RowSums, int, int]]) -> list[Digest]:
    """Add up the sums of the rows of many parts, and read them from the device at once.

    Args:
        parts: sums of rows, the first row in the global tensor, and the number of rows of that tensor.
    """
    if not parts:
        return []
    device = parts[0][0].hashes.device
    sizes = torch.tensor([len(sums.hashes) for sums, _, _ in parts])
    first = torch.tensor([start for _, start, _ in parts])
    total = torch.tensor([max(1, rows) for _, _, rows in parts])
    place = torch.arange(len(parts)).repeat_interleave(sizes)
    row = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes)[place] + first[place]
    block = (place * NUM_BLOCKS + row * NUM_BLOCKS // total[place]).to(device)
    keys = _keys(row).to(device)
    size = (len(parts) * NUM_BLOCKS,)
    weighted = torch.cat([sums.hashes for sums, _, _ in parts]) * (keys | 1)
    hashes = torch.zeros(size, dtype=torch.int64, device=device).index_add_(0, block, weighted)
    signed = torch.cat([sums.projections for sums, _, _ in parts]) * _signs(keys)
    projections = torch.zeros(size, dtype=torch.float64, device=device).index_add_(0, block, signed)
    squares = torch.zeros(size, dtype=torch.float64, device=device)
    squares = squares.index_add_(0, block, torch.cat([sums.squares for sums, _, _ in parts]))
    columns = [values.reshape(-1, NUM_BLOCKS).tolist() for values in (hashes, projections, squares)]
    return [
        Digest(tuple(value % 2**64 for value in each), tuple(signed), tuple(squared))
        for each, signed, squared in zip(*columns, strict=True)
    ]
