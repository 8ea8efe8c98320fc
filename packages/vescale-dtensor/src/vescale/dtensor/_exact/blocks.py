"""Blocks of a dim, and whether shards hold whole blocks; integers only.

A dim of ``size`` elements has blocks of ``ceil(size / num_blocks)`` elements. The last one may be smaller, and there
are fewer blocks than ``num_blocks`` where the size asks for it. The boundaries depend on the global size alone::

    size 17, num_blocks 8      [0:3] [3:6] [6:9] [9:12] [12:15] [15:17]       6 blocks
    over 2 ranks               [0:9] [9:17]                                   whole blocks
    over 4 ranks               [0:5] ...                                      cut at 5, inside of a block

`starts_of` follows torch's rule for ``Shard``: each rank has ``ceil(size / num_ranks)`` elements as long as there are
any. That rule and the rule of blocks commute: a shard of whole blocks holds what ``Shard`` gives its rank of the tensor
of block results, which therefore is a DTensor in the same placements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

__all__ = ["are_whole", "block_size", "num_blocks_of", "starts_of"]


def block_size(size: int, num_blocks: int) -> int:
    """Return the number of elements of a block.

    Example:
        >>> block_size(17, 8), block_size(16, 8), block_size(3, 8), block_size(0, 8)
        (3, 2, 1, 1)
    """
    return max(1, -(-size // num_blocks))


def num_blocks_of(size: int, num_blocks: int) -> int:
    """Return how many blocks a dim has.

    Example:
        >>> num_blocks_of(17, 8), num_blocks_of(16, 8), num_blocks_of(3, 8)
        (6, 8, 3)
    """
    return -(-size // block_size(size, num_blocks))


@functools.lru_cache(maxsize=4096)
def starts_of(size: int, num_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the shards of a dim begin that mesh axes of ``num_ranks`` shard one after another.

    Shards without elements are left out.

    Example:
        >>> starts_of(17, (2,)), starts_of(17, (2, 2)), starts_of(3, (8,))
        ((0, 9), (0, 5, 9, 13), (0, 1, 2))
    """
    segments = [(0, size)]
    for num in num_ranks:
        segments = [part for start, length in segments for part in _chunks(start, length, num)]
    return tuple(start for start, length in segments if length)


def _chunks(start: int, length: int, num: int) -> list[tuple[int, int]]:
    each = -(-length // num)
    return [(start + i * each, max(0, min(each, length - i * each))) for i in range(num)]


def are_whole(starts: Sequence[int], unit: int) -> bool:
    """Return whether every shard begins at a multiple of ``unit``.

    Example:
        >>> are_whole(starts_of(17, (2,)), 3), are_whole(starts_of(17, (4,)), 3)
        (True, False)
    """
    return all(start % unit == 0 for start in starts)
