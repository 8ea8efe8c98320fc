"""Plan of the flat gradient buckets: which parameter lies where, and which rank owns which part.

Gradients are reduced in flat buffers, one collective each. Parameters are added in reverse registration order. This is
roughly the order in which backward finishes them, so the first bucket can be launched while backward still runs. A
bucket has one dtype and is closed before it would exceed ``bucket_bytes``; a larger parameter has a bucket of its own.

    bucket 0      | head.weight       |pad| norm.weight |pad| layers.1.weight          |   padding   |
    shards        |<-------- coord 0 -------->|<-------- coord 1 -------->|<-------- coord 2 ------->|

A bucket is cut into equal shards, one per coord of the axis. Shards ignore where parameters begin and end: every rank
owns the same number of elements, and a parameter may belong to several ranks. Padding lies between parameters and at
the end only, and starts every parameter on a cache line: the views into the buffer are as fast as, and give the same
bits as, tensors of their own.

**Uneven shards.** Local tensors of a tensor-parallel parameter may differ in size between ranks. Its slot has room for
the largest local tensor, so that all ranks cut every parameter at the same positions.

**Blocks.** A parameter may consist of blocks that no shard boundary may cut (`layout.py`). Its bucket is then filled
until every shard has room for the largest of them, even beyond ``bucket_bytes``, because a shard cannot be smaller. The
last bucket joins the one before if it would be mostly padding. Parameters may lie in another order. Blocks have no
effect on a bucket without such parameters.

Everything here is integers: no tensors and no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .layout import BlockedTensor, plan_layout

__all__ = ["ALIGN_BYTES", "Bucket", "BucketPlan", "ParamInfo", "Part", "Slot", "plan_buckets"]

#: A CPU cache line. It also covers the 16 bytes that the fast paths of GPU kernels and NCCL need.
ALIGN_BYTES = 64


@dataclass(frozen=True)
class ParamInfo:
    """The input of the plan for one parameter.

    Attributes:
        fqn: Its name.
        numel: Size of its local tensor.
        dtype: Its dtype.
        block: Number of elements that must stay together, counted from its first element.
        room: Size of its slot, if that is larger: the size of the largest local tensor on any rank.
    """

    fqn: str
    numel: int
    dtype: torch.dtype
    block: int = 1
    room: int = 0

    @property
    def size(self) -> int:
        """Elements of its slot."""
        return max(self.numel, self.room)


@dataclass(frozen=True)
class Slot:
    """Elements ``[start, start + numel)`` of a bucket, which hold one parameter."""

    fqn: str
    start: int
    numel: int


@dataclass(frozen=True)
class Part:
    """Elements ``[start, stop)`` of a parameter's flat local tensor that one coord owns; may be empty."""

    fqn: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """One flat buffer.

    Attributes:
        index: Position in the plan, and so in the sequence of collectives.
        dtype: Dtype of all its parameters.
        slots: Its parameters, by increasing start.
        num_shards: Size of the mesh axis over which it is sharded.
        shard_numel: Elements per coord; the buffer has ``num_shards * shard_numel``.
    """

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer, padding included."""
        return self.numel * self.dtype.itemsize

    def shard(self, coord: int) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the buffer that ``coord`` owns."""
        return coord * self.shard_numel, (coord + 1) * self.shard_numel

    def parts(self, coord: int) -> tuple[Part, ...]:
        """Return the part of each slot that ``coord`` owns, empty parts included, in the order of ``slots``."""
        return tuple(self.part(slot, coord) for slot in self.slots)

    def part(self, slot: Slot, coord: int) -> Part:
        """Return the part of one slot that ``coord`` owns."""
        first, last = self.shard(coord)
        start = min(max(first - slot.start, 0), slot.numel)
        return Part(slot.fqn, start, min(max(last - slot.start, start), slot.numel))

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        head = f"bucket {self.index}: {name}, {self.num_shards} x {self.shard_numel} elements, {self.num_bytes} bytes"
        return "\n".join([head, *(f"  [{s.start}, {s.start + s.numel})  {s.fqn}" for s in self.slots)])


@dataclass(frozen=True)
class BucketPlan:
    """All buckets, in the order in which every rank reduces them; ``print`` shows it."""

    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.buckets))


def plan_buckets(
    params: Sequence[ParamInfo],
    *,
    num_shards: int,
    bucket_bytes: int,
    num_pieces: int = 1,
    align_bytes: int = ALIGN_BYTES,
) -> BucketPlan:
    """Lay out parameters, given in registration order, in buckets.

    Args:
        params: Each parameter once, even if it is tied.
        num_shards: Size of the mesh axis over which buckets are sharded.
        bucket_bytes: Largest size of a bucket that holds more than one parameter, before shards are made equal; where
            parameters have blocks, a bucket may hold as many of the largest block as there are shards.
        num_pieces: Number of equal pieces into which the replicas of a shard can cut it.
        align_bytes: Parameters, shards and their pieces start at a multiple of this.

    Raises:
        ValueError: If ``num_shards`` or ``bucket_bytes`` is not positive, or a name comes twice.

    Example:
        >>> params = [ParamInfo("a", 5, torch.float32), ParamInfo("b", 3, torch.float32)]
        >>> print(plan_buckets(params, num_shards=2, bucket_bytes=1024, align_bytes=8))
        bucket 0: float32, 2 x 6 elements, 48 bytes
          [0, 3)  b
          [4, 9)  a
    """
    if num_shards < 1 or bucket_bytes < 1:
        raise ValueError(f"num_shards and bucket_bytes must be positive, got {num_shards} and {bucket_bytes}")
    if len({param.fqn for param in params}) != len(params):
        raise ValueError("a parameter name comes twice; give tied parameters once")
    closed: list[_Open] = []
    filling: dict[torch.dtype, _Open] = {}
    for position, param in enumerate(reversed(params)):
        open_ = filling.get(param.dtype)
        if open_ is None or not open_.fits(param, bucket_bytes):
            if open_ is not None:
                closed.append(open_)
            open_ = filling[param.dtype] = _Open(param.dtype, max(1, align_bytes // param.dtype.itemsize), num_shards)
        open_.add(param, position)
    for dtype, last in filling.items():
        before = next((bucket for bucket in reversed(closed) if bucket.dtype == dtype), None)
        if before is None or not last.is_mostly_padding(num_pieces):
            closed.append(last)
        else:
            before.absorb(last)
    # A bucket is complete when its last parameter is.
    sequence = sorted(closed, key=lambda bucket: bucket.last_position)
    return BucketPlan(tuple(bucket.close(index, num_pieces) for index, bucket in enumerate(sequence)))


class _Open:
    """A bucket to which parameters can be added."""

    def __init__(self, dtype: torch.dtype, align: int, num_shards: int):
        self.dtype = dtype
        self.align = align
        self.num_shards = num_shards
        self.params: list[ParamInfo] = []
        self.end = 0
        self.longest = 0
        self.last_position = -1

    def fits(self, param: ParamInfo, bucket_bytes: int) -> bool:
        room = max(bucket_bytes, self.num_shards * max(self.longest, _uncut(param)) * self.dtype.itemsize)
        return (_round_up(self.end, self.align) + param.size) * self.dtype.itemsize <= room

    def add(self, param: ParamInfo, position: int) -> None:
        self.params.append(param)
        self.end = _round_up(self.end, self.align) + param.size
        self.longest = max(self.longest, _uncut(param))
        self.last_position = position

    def absorb(self, other: _Open) -> None:
        """Add the parameters of a bucket that would be complete later."""
        for param in other.params:
            self.add(param, other.last_position)

    def is_mostly_padding(self, num_pieces: int) -> bool:
        """Return whether blocks that must not be cut make the bucket more than twice as large as its parameters."""
        return self.longest > 0 and self.close(0, num_pieces).numel > 2 * _round_up(self.end, self.align)

    def close(self, index: int, num_pieces: int) -> Bucket:
        tensors = [BlockedTensor(param.size, param.block) for param in self.params]
        layout = plan_layout(tensors, num_shards=self.num_shards, align=self.align, num_pieces=num_pieces)
        places = zip(self.params, layout.starts, strict=True)
        slots = [Slot(param.fqn, start, param.numel) for param, start in places]
        slots.sort(key=lambda slot: (slot.start, slot.start + slot.numel))  # an empty one first
        return Bucket(index, self.dtype, tuple(slots), self.num_shards, layout.shard_numel)


def _uncut(param: ParamInfo) -> int:
    """Return how many elements must stay together; 0 for a parameter that may be cut anywhere."""
    return param.block if param.block > 1 and param.size else 0


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
