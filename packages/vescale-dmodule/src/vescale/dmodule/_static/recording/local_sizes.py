"""Tensors of which local code makes a part, because it reads local sizes, where the recording makes whole ones.

``torch.zeros(x.size(0))`` with a sharded ``x`` is a whole tensor on all ranks when the module runs on DTensors, and
this rank's part on local tensors. The shapes show it. All ranks settle together which dim is cut by which mesh axis::

    recording               local code        ways that fit on this rank       fit on all ranks
    (4, 6), whole           (2, 6)            dim 0 by dp, dim 0 by tp         dim 0 by dp

Then an operator that runs on DTensors takes such a tensor as one that is sharded in this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from vescale.dtensor.extension import BlockShard, chunk

from ..operators import Part
from .calls import KeptCall, Place

__all__ = ["LocalSizes"]

Way = tuple[int, int, int]
"""A mesh axis, the dim that it cuts, and how many elements of the dim it keeps together."""


class LocalSizes:
    """Compares results on local tensors with the whole ones of the recording.

    Args:
        kept: the recorded calls.
        mesh: of the recorded layouts.
    """

    def __init__(self, kept: Mapping[Place, KeptCall], mesh: DeviceMesh):
        self._kept, self._mesh = kept, mesh
        self._results: dict[int, tuple[Place, Tensor]] = {}  # by the identity of the tensor, which stays alive
        self._operands: dict[Place, dict[int, Place]] = {}  # those that are results of other calls
        self._flags: dict[Place, list[bool]] = {}
        self._ways: dict[Place, list[Way]] = {}
        operands = [operand for call in kept.values() for operand in call.operator.operands]
        self._cut = {
            (axis, operand.shape[p.dim], getattr(p, "block", 1))
            for operand in operands
            for axis, p in enumerate(operand.placements)
            if p.is_shard()
        }

    def parts(self, place: Place, mine: Tensor) -> list[Part]:
        """Return the parts of the recorded result that have the shape of the local one; empty if it is not cut."""
        whole, ways = self._kept[place].result.shape, self._candidates(place)
        found = [self._part(place, way) for way in ways]
        fits = [
            mine.shape == (*whole[:dim], length, *whole[dim + 1 :]) and start + length <= whole[dim]
            for dim, start, length in found
        ]
        self._flags[place] = [mine.shape != whole, *(not fit for fit in fits)]
        return list(itertools.compress(found, fits)) if mine.shape != whole else []

    def note_result(self, place: Place, result: Tensor) -> None:
        """Note the local result of a call that is whole in the recording."""
        self._results[id(result)] = place, result

    def note_operands(self, place: Place, operands: Sequence[Tensor]) -> None:
        """Note which operands of a call are such results."""
        sources = {i: self._results[id(t)][0] for i, t in enumerate(operands) if id(t) in self._results}
        if sources:
            self._operands[place] = sources

    def flags(self) -> list[bool]:
        """Return what the ranks must settle; of each flag, whether it is set on any rank."""
        return [flag for place in sorted(self._kept) for flag in self._flags_of(place)]

    def settle(self, flags: Iterator[bool]) -> None:
        """Take the flags that are set on any rank."""
        for place in sorted(self._kept):
            is_cut, *misfits = itertools.islice(flags, len(self._flags_of(place)))
            if is_cut:
                self._ways[place] = [way for way, no in zip(self._candidates(place), misfits, strict=True) if not no]

    def part(self, place: Place) -> Part | None:
        """Return the part of a result that local code has on this rank; None if it is whole, or not known."""
        ways = self._ways.get(place, ())
        return self._part(place, ways[0]) if len(ways) == 1 else None

    def operands(self, place: Place) -> dict[int, tuple[Placement, ...]]:
        """Return the placements that operands of a call have on local tensors, where they are not the recorded ones."""
        found = {}
        recorded = self._kept[place].operator.operands
        sharded = {axis for operand in recorded for axis, p in enumerate(operand.placements) if not p.is_replicate()}
        for i, source in self._operands.get(place, {}).items():
            if ways := self._ways.get(source):
                # several axes fit only if their parts are equal: that of the other operands needs no communication
                axis, dim, block = next((way for way in ways if way[0] in sharded), ways[0])
                before = recorded[i].placements
                placement = Shard(dim) if block == 1 else BlockShard(dim, block)
                found[i] = (*before[:axis], placement, *before[axis + 1 :])
        return found

    def _flags_of(self, place: Place) -> list[bool]:
        return self._flags.get(place, [False] * (1 + len(self._candidates(place))))  # it made no such call

    def _candidates(self, place: Place) -> list[Way]:
        """Return the axes that cut any tensor of the program with a dim of this size."""
        call = self._kept[place]
        sizes = call.shape if call.whole else ()  # not the local sizes, which other axes may cut unevenly
        cuts = sorted(self._cut)
        return [(a, dim, block) for a, cut, block in cuts if a in call.whole for dim, s in enumerate(sizes) if s == cut]

    def _part(self, place: Place, way: Way) -> Part:
        axis, dim, block = way
        number = self._kept[place].shape[dim] // block
        start, length = chunk(number, self._mesh.size(axis), self._mesh.get_local_rank(axis))
        return dim, start * block, length * block
