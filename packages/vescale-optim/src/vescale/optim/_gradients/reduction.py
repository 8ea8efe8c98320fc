"""The reduction of one buffer over the data-parallel ranks, from its launch to the stored mean.

Let N = S R ranks: S ranks hold the shards of the buffer, and each shard has R replicas (`_ranks/data_axes.py`). ZeRO 0
has S = 1; one axis with ZeRO 1 to 3 has R = 1. The input is the bucket's buffer, the result is this rank's shard of
1/S:

    rules      first, from the launch       then, from `proceed` on         bytes sent per rank
    backend    reduce-scatter over S        all-reduce over R               (S-1)/S + 2 (R-1)/N;  gloo: 2 (S-1)/S + ...
    ordered    all-to-all over N, sum       all-gather over R               (N-1)/N + (R-1)/N

A collective over one rank is left out. An all-reduce that comes first is launched immediately. So ZeRO 0 sends
2 (N-1)/N, and ZeRO 1 to 3 on one axis (N-1)/N, with either rule. Bytes are in units of the bucket, in ``wire_dtype``. A
wire dtype other than that of the gradients takes one more buffer while the collective is in flight. The first
collective takes one more buffer with ``"ordered"``, and 1/S of one with ``"backend"``. At most three buckets are in
flight where that takes memory or where a second collective follows (ZeRO 3: where communication keeps up).

In the ordered sum the replicas of a shard cut it into pieces, and every rank receives all addends of its own piece:

    received    | from rank 0 | from rank 1 | from rank 2 |        piece = (0 + 1) + 2, element by element

So the sum of an element depends neither on its position in a buffer, nor on the bucket, nor on what is sharded. The
order of a backend's ring depends on the position, and hybrid sharding adds the sums of rows.

Inside of ``vescale.dtensor.exact`` every rank gets whole gradients from its backward. The first in the order of the
batch adds them, and the others ``-0.0``: the sum is one device's gradient under either rule, and nothing is divided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vescale.dtensor.extension import exact_num_blocks, one_addend

from .._ranks.axis import Axis, Pending
from .._ranks.data_axes import DataAxes
from .rules import average_

__all__ = ["ReducibleBucket", "Reduction", "ScatteredSum"]


class ReducibleBucket(Protocol):
    """The bucket protocol of a reduction; see `bucket.FlatBucket`.

    Attributes:
        label: Name of the bucket in errors.
        axes: The data-parallel axes.
        ordered: Whether ranks are added in the order of the batch.
        wire_dtype: Dtype in which gradients are sent and added.
        grads: The local gradients, flat.
        grad_shard: This rank's shard of the reduced gradients (ZeRO 1 to 3); None for new memory.
        accumulates: Whether the mean is added to a reduced gradient.
    """

    label: str
    axes: DataAxes
    ordered: bool
    wire_dtype: torch.dtype
    grads: Tensor
    grad_shard: Tensor | None

    @property
    def accumulates(self) -> bool: ...

    def store(self, mean: Tensor) -> None:
        """Store the mean, or add it to the reduced gradient."""


class ScatteredSum:
    """A sum over ranks that gives every coord its part.

    Args:
        axis: An axis of more than one rank.
        wire: Every coord's part, one after the other. No other code may write to it until `result` returns; its values
            are undefined afterwards.
        order: Coords in the order in which to add; None leaves the order to the backend.
        what: Name in errors.
        out: Where the backend may write the sum; by default a new tensor.
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

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` and return whether `result` need not wait."""
        return self._pending is None or self._pending.ends_within(seconds)

    def result(self) -> Tensor:
        """Wait for this coord's part of the sum and return it."""
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
    """The reduction of a bucket's gradients in flight; ``finish`` stores the mean.

    The constructor launches it. ``proceed`` and ``finish`` may launch a collective and wait for one, so every rank must
    call them at the same position in its sequence of collectives over that axis.

    Attributes:
        is_spreading: Whether the second collective, which brings the sum to the replicas, has been launched.
    """

    def __init__(self, bucket: ReducibleBucket):
        self.bucket = bucket
        self.is_spreading = False
        self._sum: ScatteredSum | None = None
        self._pending: Pending | None = None
        self._total = bucket.grads  # where the sum of this rank's shard will be, unless `_sum` brings it
        axes, is_exact = bucket.axes, exact_num_blocks() is not None
        self._adding = one_addend if is_exact else contextlib.nullcontext
        self._num_addends = 1 if is_exact else axes.all.size
        if axes.all.size > 1:
            with self._adding():
                self._launch()

    def _launch(self) -> None:
        bucket, axes = self.bucket, self.bucket.axes
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

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` and return whether the collective in flight has ended."""
        if self._sum is not None:
            return self._sum.ends_within(seconds)
        return self._pending is None or self._pending.ends_within(seconds)

    def proceed(self) -> None:
        """Free buffers before the end where possible: take the first sum, and launch the collective that follows."""
        if self._sum is not None and self.bucket.axes.replicate.size > 1:
            with self._adding():
                self._spread()

    def _spread(self) -> None:
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
        bucket.store(average_(self._total, self._num_addends, bucket.grads.dtype))
        self._sum = self._pending = None
        self._total = bucket.grads  # drops a buffer that is not the bucket's
