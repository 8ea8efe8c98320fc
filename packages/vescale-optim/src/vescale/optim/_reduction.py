"""The reduction of one buffer over the ranks of an axis, from its launch to the mean in its place.

    rules       ZeRO   collectives                       bytes sent per rank, N ranks    buffers beside the gradients
    backend     0      all-reduce                        2 (N-1)/N                       none
    backend     1-3    reduce-scatter                    (N-1)/N; gloo: 2 (N-1)/N        1/N; gloo: 1 while in flight
    ordered     0      all-to-all, sum, all-gather       2 (N-1)/N                       1 while in flight
    ordered     1-3    all-to-all, sum                   (N-1)/N                         1 while in flight

Bytes and buffers in units of the bucket, in the dtype of the wire; a wire of another dtype than the gradients is one
more buffer while it is in flight. At most three buckets are in flight where that takes memory. In the ordered sum every
coord gets all addends of its shard

    received    | from coord 0 | from coord 1 | from coord 2 |        shard = (0 + 1) + 2, element by element

so that an element's sum does not depend on where in a buffer, and in which buffer, it lies. A backend's ring adds in an
order that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._axis import Axis, Pending
from ._rules import average_

if TYPE_CHECKING:
    from ._flat import FlatBucket

__all__ = ["Reduction", "ScatteredSum"]


class ScatteredSum:
    """A sum over ranks of which every coord gets its shard.

    Args:
        axis: Of more than one rank.
        wire: Every coord's shard, one after the other; unchanged until `result` returns.
        ordered: Add in the order of coords.
        what: Name in errors.
        out: Where the backend may put the sum; by default a new tensor.
    """

    def __init__(self, axis: Axis, wire: Tensor, *, ordered: bool, what: str, out: Tensor | None = None):
        self._ordered = ordered
        self._num_ranks = axis.size
        self._pending: Pending | None
        if ordered:
            self._out = torch.empty_like(wire)
            self._pending = axis.exchange(self._out, wire, what=what)
        else:
            self._out = wire.new_empty(wire.numel() // axis.size) if out is None else out
            self._pending = axis.reduce_scatter(self._out, wire, what=what)

    def result(self) -> Tensor:
        """Wait for, and return, this coord's shard of the sum."""
        if self._pending is not None:
            self._pending.wait()
        if not self._ordered:
            return self._out
        first, *others = self._out.view(self._num_ranks, -1).unbind()
        for other in others:
            first.add_(other)
        return first


class Reduction:
    """The reduction of a bucket's gradients on its way; ``finish`` leaves the mean in its place.

    It is begun by constructing it. ``proceed`` and ``finish`` may launch a collective and wait for one: every rank must
    call them at the same place in its sequence of collectives.
    """

    def __init__(self, bucket: FlatBucket):
        self.bucket = bucket
        self._sum: ScatteredSum | None = None
        self._whole: Tensor | None = None  # the buffer that holds, in the end, the sum of the whole bucket
        self._pending: Pending | None = None
        if bucket.axis.size == 1:
            return
        wire = bucket.grads.to(bucket.wire_dtype)  # the gradients themselves, if that is their dtype
        if bucket.sharded:
            direct = wire is bucket.grads and not bucket.accumulates
            out = bucket.grad_shard if direct else None
            self._sum = ScatteredSum(bucket.axis, wire, ordered=bucket.ordered, what=bucket.label, out=out)
            return
        self._whole = wire
        if bucket.ordered:
            self._sum = ScatteredSum(bucket.axis, wire, ordered=True, what=bucket.label)
        else:
            self._pending = bucket.axis.all_reduce(wire, what=bucket.label)

    @property
    def is_gathering(self) -> bool:
        """Whether the ordered sum is taken and travels to the other ranks (ZeRO 0)."""
        return self.bucket.ordered and self._pending is not None

    def proceed(self) -> None:
        """Free what buffers can be freed before the end: add up, and gather if the bucket is not sharded."""
        if self._whole is None or self._sum is None:
            return
        bucket = self.bucket
        shard = self._whole[bucket.start : bucket.stop]
        shard.copy_(self._sum.result())
        self._sum = None
        self._pending = bucket.axis.all_gather(self._whole, shard, what=bucket.label)

    def finish(self) -> None:
        """Wait, divide by the number of ranks, and store or add the result."""
        self.proceed()
        bucket = self.bucket
        bucket.store(average_(self._total(), bucket.axis.size, bucket.grads.dtype))
        self._sum = self._whole = None

    def _total(self) -> Tensor:
        bucket = self.bucket
        if self._sum is not None:
            return self._sum.result()
        if self._pending is not None:
            self._pending.wait()
        return bucket.grads if self._whole is None else self._whole
