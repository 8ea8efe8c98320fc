"""Placements that torch lacks: interleaved shards of a merged dim, ragged shards, and shards of blocks.

    InterleavedShard(0, 3) over 2 ranks, n = 6        RaggedShard((0, 1), (1, 3)) over 2 ranks, shape (2, 4)
    rows  q q | k k | v v                             0 0 1 1      4 units of 2 elements in row-major order:
    rank  0 1 | 0 1 | 0 1                             1 1 1 1      the first for rank 0, three for rank 1

`BlockShard` is what a view of an uneven shard has. All are values: immutable, hashable, picklable, equal if their
fields are equal. Their repr can be evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Placement

from .._checked import checked
from .._torch.placements import StridedShard

__all__ = ["BlockShard", "InterleavedShard", "RaggedShard"]


class InterleavedShard(StridedShard):
    """Shard a merged dim: view dim ``dim`` of size n as (k, n / k) and shard the second factor.

    Each rank holds one strip of each of the ``k`` parts, for instance its heads of Q, K and V in a merged projection.
    The sizes of the strips follow ``torch.chunk``, so strips may be uneven or empty; ``k`` must divide n.

    Args:
        dim: the tensor dim, not negative.
        k: number of parts in the dim.

    Raises:
        ValueError: ``dim`` is negative or ``k`` is not positive.

    Example:
        >>> InterleavedShard(0, 3)
        InterleavedShard(dim=0, k=3)
        >>> eval(repr(InterleavedShard(1, 2))) == InterleavedShard(1, 2)
        True
    """

    def __init__(self, dim: int, k: int | None = None, *, split_factor: int | None = None):
        k = split_factor if k is None else k  # torch's own code constructs strided shards with this keyword
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k < 2**63:
            raise ValueError(
                f"InterleavedShard expects a positive number of parts, got k={k!r}; pass 3 for merged Q, K and V"
            )
        if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < 2**63:
            raise ValueError(
                f"InterleavedShard expects a dim counted from the front, got dim={dim!r}; pass 0 for the first dim"
            )
        super().__init__(dim, split_factor=k)

    @property
    def k(self) -> int:
        """Number of parts in the dim."""
        return self.split_factor

    def __reduce__(self) -> tuple:
        return type(self), (self.dim, self.k)

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self.dim}, k={self.k})"

    __str__ = __repr__


class RaggedShard(Placement):
    """Cut the flattened leading dims into equal units; rank i of the mesh axis holds ``local_units[i]`` of them.

    The units of a rank are consecutive in row-major order. Its local tensor has shape (elements of the flattened dims
    held, \\*remaining dims), so it is flat if ``dims`` names all dims. A tensor has at most one ragged placement. The
    placements of the other mesh axes are applied first, in any order of the axes.

    Args:
        dims: the leading dims, ``(0,)``, ``(0, 1)``, and so on.
        local_units: number of units of each rank of the mesh axis; zero is allowed.

    Raises:
        ValueError: ``dims`` are not leading dims, or the units are negative or all zero.

    Example:
        >>> RaggedShard((0,), (1, 0, 3))
        RaggedShard(dims=(0,), local_units=(1, 0, 3))
        >>> RaggedShard((0,), (1, 3)).rows(8, 1)
        (2, 6)
    """

    @checked
    def __init__(self, dims: Sequence[int], local_units: Sequence[int]):
        super().__init__()
        self.dims = tuple(dims)
        self.local_units = tuple(local_units)
        if not self.dims or self.dims != tuple(range(len(self.dims))):
            raise ValueError(f"RaggedShard expects the leading dims (0,) or (0, 1) and so on, got dims={self.dims}")
        if min(self.local_units, default=-1) < 0 or sum(self.local_units) == 0:
            raise ValueError(
                "RaggedShard: expected numbers of units >= 0 with a positive sum for local_units, got "
                f"{self.local_units}"
            )

    def rows(self, numel: int, coord: int) -> tuple[int, int]:
        """Return ``(start, count)``: the range of ``numel`` flattened elements that the rank at ``coord`` holds.

        Raises:
            ValueError: ``numel`` is not divisible by the number of units.
        """
        total = sum(self.local_units)
        if numel % total:
            raise ValueError(
                f"{self} cuts {numel} elements of the flattened dims into {total} units: {numel} is not divisible by "
                f"{total}; choose units whose sum divides it"
            )
        unit = numel // total
        return sum(self.local_units[:coord]) * unit, self.local_units[coord] * unit

    def check(self, shape: Sequence[int], axis_size: int) -> None:
        """Raise a ValueError unless this placement fits ``shape`` (the local shape, if sharded before) and its axis.

        Example:
            >>> RaggedShard((0,), (1, 2)).check((6, 4), 2)
        """
        if len(self.local_units) != axis_size:
            raise ValueError(
                f"{self} names {len(self.local_units)} ranks; its mesh axis has {axis_size}; give one number of units "
                "for each rank of the axis"
            )
        if len(self.dims) > len(shape):
            raise ValueError(f"{self} flattens {len(self.dims)} dims, but a tensor of shape {tuple(shape)} has fewer")
        self.rows(math.prod(shape[: len(self.dims)]), 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.dims == other.dims and self.local_units == other.local_units

    def __hash__(self) -> int:
        return hash((self.dims, self.local_units))

    def __reduce__(self) -> tuple:
        return RaggedShard, (self.dims, self.local_units)

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    __str__ = __repr__


class BlockShard(Placement):
    """Shard a dim in blocks: view dim ``dim`` of size n as (n / block, block) and shard the first factor.

    A view that merges a dim with uneven shards and the dims after it has this placement::

        (5, 12)   Shard(0) over 3 ranks         2 + 2 + 1 rows
        (60,)     BlockShard(0, 12)             24 + 24 + 12 elements; Shard(0) would be 20 + 20 + 20

    Operators treat it as ``Shard(dim)``. The numbers of blocks follow ``torch.chunk``; ``block`` must divide n.

    Args:
        dim: the tensor dim, not negative.
        block: number of elements that stay together.

    Example:
        >>> BlockShard(0, 12)
        BlockShard(dim=0, block=12)
    """

    def __init__(self, dim: int, block: int):
        super().__init__()
        if dim < 0 or block < 1:
            raise ValueError(
                f"BlockShard expects a dim counted from the front and a positive size of blocks, got dim={dim}, "
                f"block={block}; pass BlockShard(0, 12) for rows of 12 elements"
            )
        self.dim, self.block = dim, block

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether this shards ``dim``, or any dim."""
        return dim is None or dim == self.dim

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockShard) and (self.dim, self.block) == (other.dim, other.block)

    def __hash__(self) -> int:
        return hash((BlockShard, self.dim, self.block))

    def __reduce__(self) -> tuple:
        return BlockShard, (self.dim, self.block)

    def __repr__(self) -> str:
        return f"BlockShard(dim={self.dim}, block={self.block})"

    __str__ = __repr__
