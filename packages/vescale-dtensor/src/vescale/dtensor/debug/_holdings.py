"""The elements that each rank of a mesh holds, computed for all ranks without communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from .._layout.boxes import Box
from .._layout.groups import ranks_of
from .._layout.shards import pieces

__all__ = ["Holding", "box_text", "boxes_text", "holdings"]


@dataclass(frozen=True)
class Holding:
    """The elements that one rank holds.

    Attributes:
        rank: its global rank.
        coord: its position on every axis of the mesh.
        boxes: ``(offsets, sizes)`` in the global tensor, none of them empty.
    """

    rank: int
    coord: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return sum(math.prod(sizes) for _, sizes in self.boxes)


def holdings(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Holding]:
    """Return the holding of each rank of the mesh; a partial tensor counts as full on every rank of that axis."""
    cuts = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    mesh_shape = tuple(mesh.shape)
    found = []
    for coord, rank in zip(itertools.product(*map(range, mesh_shape)), ranks_of(mesh), strict=True):
        boxes = (piece.box for piece in pieces(tuple(shape), mesh_shape, coord, cuts))
        found.append(Holding(rank, coord, tuple(box for box in boxes if math.prod(box[1]))))
    return found


def box_text(box: Box) -> str:
    """Return a box as the index that selects it.

    Example:
        >>> box_text(((2, 0), (2, 6)))
        '[2:4, 0:6]'
    """
    return "[" + (", ".join(f"{o}:{o + s}" for o, s in zip(*box, strict=True)) or "()") + "]"


def boxes_text(boxes: Sequence[Box], *, limit: int = 3) -> str:
    """Return boxes as indices, and the number of boxes beyond the limit.

    Example:
        >>> boxes_text([((i,), (1,)) for i in range(5)])
        '[0:1] [1:2] [2:3] and 2 more boxes'
        >>> boxes_text([])
        'nothing'
    """
    if not boxes:
        return "nothing"
    text = " ".join(map(box_text, boxes[:limit]))
    more = len(boxes) - limit
    return text if more <= 0 else f"{text} and {more} more box{'es' if more > 1 else ''}"
