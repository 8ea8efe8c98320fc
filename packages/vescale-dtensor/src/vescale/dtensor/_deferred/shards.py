"""Storages that a rank replays as shards: how they are chosen, and the operators on them.

Planning. A storage can be a shard if every operator on it is pointwise with exact results: fills and random draws of
the full storage, exact element-wise operators with scalars or with a tensor that is sharded alike, and fills of a
contiguous range such as a padding row. The storages of one call form a group. If a group has any other use, or two of
its storages need different parts, the group is replayed on full tensors::

    empty -> s0, normal_(s0), mul_(s0, 0.5), _to_copy(s0) -> s1          group {s0, s1}: shards
    empty -> s2, qr(s3) -> s4, copy_(s2, s4)                             group {s2, s4}: full, because of qr

Execution. A shard is a row-major tensor that stores one or several boxes of the global tensor (see
``_layout/shards.py``). Fills and arithmetic run on it directly. Draws walk over the full stream in bounded pieces and
keep the elements of the boxes.

Guarantee: the shard is bit for bit this rank's part of the tensor that one device computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._containers import leaves
from .._layout.boxes import Box, index_from, overlaps
from .._layout.shards import Piece
from .._random.global_position import GlobalPosition
from .._random.rules import draw_part
from .._random.stock.draw import Scratch
from .liveness import Draw, skippable_draw
from .ops import EXACT_POINTWISE, FILLS, GEOMETRY_FACTORIES, scale_of_second
from .tape import Call, Tape, Value

__all__ = ["Region", "draw_into", "fill_range", "plan_shards"]


@dataclass(frozen=True)
class Region:
    """This rank's part of a row-major global tensor.

    Attributes:
        shape: of the global tensor.
        sizes: of the shard.
        pieces: the boxes of the part, and where the shard stores them.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the full tensor."""
        return self.sizes == self.shape

    def views(self, shard: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes, each with the part of the shard that stores it."""
        for piece in self.pieces:
            yield piece.box, piece.view(shard)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return a copy of this part of a full tensor."""
        origin = (0,) * len(self.shape)
        if len(self.pieces) == 1 and self.pieces[0].rows is None:
            return tensor[index_from(origin, self.pieces[0].box)].clone()
        shard = tensor.new_empty(self.sizes)
        for box, view in self.views(shard):
            view.copy_(tensor[index_from(origin, box)])
        return shard


# ------------------------------------------------------------------------------------------------- planning


def plan_shards(tape: Tape, needed: Iterable[int], wanted: Iterable[tuple[int, Region]]) -> dict[int, Region]:
    """Return the storages that can be replayed as shards, with the region of each.

    Args:
        tape: the tape.
        needed: calls that will be replayed.
        wanted: `(value, region)`: the part of each value that this rank needs.
    """
    groups = _Groups()
    for index in needed:
        call = tape.entries[index]
        touched = tape.storages((*call.reads, *call.writes)) | tape.created(call)
        together = _treated_alike(tape, call)
        groups.join(together)
        groups.spoil(touched - together)
    for value, region in wanted:
        if not _is_whole(tape, tape.values[value]):
            groups.spoil({tape.values[value].storage})
        groups.want(tape.values[value].storage, region)
    return groups.regions()


class _Groups:
    """Sets of storages that must be sharded alike, and the regions requested of each."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._spoiled: set[int] = set()
        self._wanted: list[tuple[int, Region]] = []

    def find(self, storage: int) -> int:
        parent = self._parent.setdefault(storage, storage)
        while parent != storage:
            storage, parent = parent, self._parent[parent]
        return storage

    def join(self, storages: set[int]) -> None:
        first, *others = (self.find(storage) for storage in storages) if storages else (None,)
        for other in others:
            self._parent[self.find(other)] = self.find(first)

    def spoil(self, storages: set[int]) -> None:
        self._spoiled |= storages

    def want(self, storage: int, region: Region) -> None:
        self._wanted.append((storage, region))

    def regions(self) -> dict[int, Region]:
        spoiled = {self.find(storage) for storage in self._spoiled}
        found: dict[int, set[Region]] = {}
        for storage, region in self._wanted:
            found.setdefault(self.find(storage), set()).add(region)
        alike = {group: next(iter(regions)) for group, regions in found.items() if len(regions) == 1}
        chosen = {group: region for group, region in alike.items() if group not in spoiled and not region.is_whole}
        return {storage: chosen[self.find(storage)] for storage in self._parent if self.find(storage) in chosen}


def _treated_alike(tape: Tape, call: Call) -> set[int]:
    """Return the storages of a call that could all be shards of one region; its other storages must be full."""
    values = [tape.values[v] for v in (*call.reads, *call.writes, *call.outputs.values())]
    if call.op in GEOMETRY_FACTORIES or skippable_draw(tape, call) is not None:
        values = [tape.values[v] for v in (*call.writes, *call.outputs.values())]
    elif call.op in FILLS:
        return {v.storage for v in values if v.meta.is_contiguous() and _keeps_dtype(tape, v)}
    elif call.op not in EXACT_POINTWISE or scale_of_second(call.op, call.args, call.kwargs) != 1:
        return set()
    values = [value for value in values if value.meta.dim() > 0]
    shapes = {tuple(value.meta.shape) for value in values}
    shapes |= {tuple(leaf.shape) for leaf in _real_tensors(call) if leaf.dim() > 0}
    if len(shapes) != 1 or not all(_is_whole(tape, value) for value in values):
        return set()
    return {value.storage for value in values}


def _real_tensors(call: Call) -> list[Tensor]:
    return [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]


def _is_whole(tape: Tape, value: Value) -> bool:
    """Return whether a value covers its full storage in row-major order."""
    meta = value.meta
    covers = meta.numel() * meta.element_size() == meta.untyped_storage().nbytes()
    return covers and meta.is_contiguous() and _keeps_dtype(tape, value)


def _keeps_dtype(tape: Tape, value: Value) -> bool:
    return value.meta.dtype == tape.values[tape.roots[value.storage]].meta.dtype


# ------------------------------------------------------------------------------------------------- execution


def draw_into(shard: Tensor | None, region: Region | None, draw: Draw, scratch: Scratch) -> None:
    """Advance the generator by a full draw; if there is a ``shard``, fill it with the values of the region."""
    if shard is None or region is None:
        shard, region = torch.empty(0, dtype=draw.dtype, device=draw.device), Region((draw.numel,), (0,), ())
    position = GlobalPosition(region.shape, tuple(range(len(region.shape))), True, region.pieces)
    draw_part(draw.op, shard, position, draw.args, draw.kwargs, generator=draw.generator, scratch=scratch)


def fill_range(shard: Tensor, region: Region, start: int, stop: int, number: object) -> None:
    """Fill the part of the region that lies in a flat range of the global tensor."""
    for box, view in region.views(shard):
        for _, common in overlaps(region.shape, box, start, stop):
            view[index_from(box[0], common)].fill_(number)
