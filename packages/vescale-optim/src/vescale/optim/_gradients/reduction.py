"""The reduction of one buffer over the data-parallel ranks, from its launch to the mean in its place.

With N = S R ranks, of which S hold the shards of the buffer and R each of them (`_axes.py`; ZeRO 0: S = 1; one axis and
ZeRO 1 to 3: R = 1), the buffer is the bucket's, and the result this rank's shard of 1/S:

    rules      first, from the launch       then, from `proceed` on         bytes sent per rank
    backend    reduce-scatter over S        all-reduce over R               (S-1)/S + 2 (R-1)/N;  gloo: 2 (S-1)/S + ...
    ordered    all-to-all over N, sum       all-gather over R               (N-1)/N + (R-1)/N

A collective over one rank is left out; an all-reduce that comes first is launched at once. So ZeRO 0 sends 2 (N-1)/N,
and ZeRO 1 to 3 on one axis (N-1)/N, by either rule. Bytes are in units of the bucket, in the dtype of the wire; a wire
of another dtype than the gradients is one more buffer while it is in flight. The first collective needs one more by
``"ordered"``; by ``"backend"`` 1/S. At most three buckets are in flight where that takes memory or where a second
collective is to follow (ZeRO 3: where communication keeps up).

In the ordered sum the replicas of a shard cut it into pieces, and every rank gets all addends of its own

    received    | from rank 0 | from rank 1 | from rank 2 |        piece = (0 + 1) + 2, element by element

so that an element's sum does not depend on where in a buffer, and in which buffer, it lies, nor on what is sharded. A
backend's ring adds in an order that does, and in hybrid sharding it adds the sums of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._ranks.axis import Axis, Pending
from .._ranks.data_axes import DataAxes
from .rules import average_

__all__ = ["Reduction", "ScatteredSum"]


class ReducibleBucket(Protocol):
    """A bucket as its reduction uses it; see `bucket.FlatBucket`.

    Attributes:
        label: Names the bucket in errors.
        axes: The data-parallel axes.
        ordered: Whether ranks are added in the order of the batch.
        wire_dtype: In which gradients travel and are added.
        grads: The local gradients, flat.
        grad_shard: This rank's shard of the reduced gradients (ZeRO 1 to 3).
        accumulates: Whether the mean is added to a reduced gradient.
    """

    label: str
    axes: DataAxes
    ordered: bool
    wire_dtype: torch.dtype
    grads: Tensor
    grad_shard: Tensor

    @property
    def accumulates(self) -> bool: ...

    def store(self, mean: Tensor) -> None:
        """Put the mean in its place, or add it to the reduced gradient."""


class ScatteredSum:
    """A sum over ranks of which every coord gets its part.

    Args:
        axis: Of more than one rank.
        wire: Every coord's part, one after the other. Nobody else may write to it until `result` returns; what it holds
            then is not defined.
        order: Coords in the order in which to add; None leaves it to the backend.
        what: Name in errors.
        out: Where the backend may put the sum; by default a new tensor.
    """

    def __init__(self, axis: Axis, wire: Tensor, *, order: Sequence[int] | None, what: str, out: Tensor | None = None):
        self._order = order
        self._pending: Pending | None
        if order is not None:
            self._out = torch.empty_like(wire)
            self._pending = axis.exchange(self._out, wire, what=what)
        else:
            self._out = wire.new_empty(wire.numel() // axis.size) if out is None else out
            self._pending = axis.reduce_scatter(self._out, wire, what=what)

    def comes_within(self, seconds: float) -> bool:
        """Wait no longer than that, and tell whether `result` will not wait."""
        return self._pending is None or self._pending.ends_within(seconds)

    def result(self) -> Tensor:
        """Wait for, and return, this coord's part of the sum."""
        if self._pending is not None:
            self._pending.wait()
        if self._order is None:
            return self._out
        addends = self._out.view(len(self._order), -1)
        total = addends[self._order[0]]
        for coord in self._order[1:]:
            total.add_(addends[coord])
        return total


class Reduction:
    """The reduction of a bucket's gradients on its way; ``finish`` leaves the mean in its place.

    It is begun by constructing it. ``proceed`` and ``finish`` may launch a collective and wait for one: every rank must
    call them at the same place in its sequence of collectives over that axis.

    Attributes:
        is_spreading: Whether its second collective has been launched, which brings the sum to the replicas.
    """

    def __init__(self, bucket: ReducibleBucket):
        self.bucket = bucket
        self.is_spreading = False
        self._sum: ScatteredSum | None = None
        self._pending: Pending | None = None
        self._total = bucket.grads  # where the sum of this rank's shard will be, unless `_sum` brings it
        axes = bucket.axes
        if axes.all.size == 1:
            return
        wire = bucket.grads.to(bucket.wire_dtype)  # the gradients themselves, if that is their dtype
        self._total = axes.own_shard(wire)
        if bucket.ordered:
            self._sum = ScatteredSum(axes.pieces, wire, order=axes.batch_order, what=bucket.label)
        elif axes.shard.size > 1:
            direct = wire is bucket.grads and not bucket.accumulates
            out = bucket.grad_shard if direct else None
            self._sum = ScatteredSum(axes.shard, wire, order=None, what=bucket.label, out=out)
        else:
            self._pending = axes.replicate.all_reduce(wire, what=bucket.label)

    def comes_within(self, seconds: float) -> bool:
        """Wait no longer than that, and tell whether what is on its way now has come."""
        if self._sum is not None:
            return self._sum.comes_within(seconds)
        return self._pending is None or self._pending.ends_within(seconds)

    def proceed(self) -> None:
        """Free what buffers can be freed before the end: take the first sum, and launch what has to follow."""
        if self._sum is None or self.bucket.axes.replicate.size == 1:
            return
        axes, label = self.bucket.axes, self.bucket.label
        found, self._sum = self._sum.result(), None
        if self.bucket.ordered:
            piece = axes.own_piece(self._total)
            piece.copy_(found)
            self._pending = axes.replicate.all_gather(self._total, piece, what=label)
        else:
            self._total = found
            self._pending = axes.replicate.all_reduce(found, what=label)
        self.is_spreading = True

    def finish(self) -> None:
        """Wait, divide by the number of ranks, and store or add the result."""
        self.proceed()
        if self._sum is not None:
            self._total = self._sum.result()
        elif self._pending is not None:
            self._pending.wait()
        bucket = self.bucket
        bucket.store(average_(self._total, bucket.axes.all.size, bucket.grads.dtype))
        self._sum = self._pending = None
        self._total = bucket.grads  # frees what was the bucket's no longer
