"""Flat buffers at run time: gradients, the shard of reduced gradients, parameter values, and the views into them.

    grads        | slot | slot | slot |pad|     local gradients of all parameters of the bucket (full size)
    grad_shard             | part |             ZeRO 1, 2: this coord's part of the reduced gradient
    values       | slot | slot | slot |pad|     ZeRO 1, 2: the parameters themselves are views of this buffer

Note: state of a slot
    ``param.grad`` decides whether a parameter has a gradient at all, so that every way of clearing it is understood:
    None means that neither buffer counts. Otherwise ``unreduced`` says that ``grads`` holds a local gradient, and, for
    ZeRO 1 and 2, ``reduced`` that ``grad_shard`` holds one. Both may: micro-batches under ``no_sync`` after a
    reduction. The next reduction adds.

With ZeRO 2 the storage of ``grads`` exists from the first gradient of a bucket to the end of its reduction. It is
resized to nothing and back, which keeps the views valid.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _torch
from ._axis import Axis
from ._buckets import Bucket, Part, Slot
from ._grads import ShardedGradient, aligned

__all__ = ["FlatBucket", "FlatSlot"]


class FlatSlot:
    """One parameter's place in a bucket.

    Attributes:
        grad_view: Its place in ``grads``, wrapped like the parameter (a DTensor for a DTensor).
        grad_part: Its flat part in ``grad_shard`` (ZeRO 1, 2).
        value_part: Its flat part in ``values`` (ZeRO 1, 2).
        placeholder: What ``param.grad`` is while the gradient is sharded (ZeRO 1, 2).
    """

    grad_part: Tensor
    value_part: Tensor

    def __init__(self, bucket: FlatBucket, plan: Slot, param: nn.Parameter, part: Part):
        self.bucket = bucket
        self.fqn = plan.fqn
        self.param = param
        self.part = (part.start, part.stop)
        self.unreduced = False
        self.reduced = False
        local = _torch.local_tensor(param)
        self.local_view = bucket.grads[plan.start : plan.start + plan.numel].view(local.shape)
        self.grad_view = _torch.wrap_like(self.local_view, param)
        self.placeholder = ShardedGradient(self) if bucket.sharded else None

    def before_accumulation(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient as it is to be accumulated, into a real tensor: take the placeholder away.

        ``None`` comes from an autograd function that has no gradient for the parameter: nothing is accumulated then.
        """
        if grad is None:
            return None
        if self.placeholder is not None:
            self._take_placeholder_away()
        return aligned(self.fqn, self.param, grad)

    def _take_placeholder_away(self) -> None:
        if self.param.grad is self.placeholder:
            self.param.grad = self.grad_view if self.unreduced else None
        else:
            self.unreduced = self.reduced = False  # cleared or replaced since: what the buffers hold does not count

    def take(self) -> None:
        """Move the gradient that autograd has left in ``param.grad`` into the bucket."""
        grad = self.param.grad
        if grad is not self.grad_view:
            grad = aligned(self.fqn, self.param, grad)
            self.bucket.allocate()
            self.local_view.copy_(_torch.local_tensor(grad))
        self.unreduced = True
        self.publish()

    def publish(self) -> None:
        """Set ``param.grad`` to what it is between backward passes."""
        self.param.grad = self.grad_view if self.placeholder is None else self.placeholder

    def settle(self) -> None:
        """Before a reduction: give ``grads`` a value also where this backward brought no gradient."""
        grad = self.param.grad
        if grad is None:
            self.unreduced = self.reduced = False
        elif grad is not self.grad_view and grad is not self.placeholder:
            self.take()  # assigned by hand
        if grad is None or (grad is self.placeholder and not self.unreduced):
            self.local_view.zero_()

    def zero(self) -> None:
        """Make the sharded gradient zero (which is not the same as having none)."""
        self.grad_part.zero_()
        self.unreduced, self.reduced = False, True

    def check_reduced(self) -> None:
        """Raise RuntimeError if the gradient is there and has not been reduced."""
        if self.unreduced and self.param.grad is not None:
            raise RuntimeError(
                f"the gradient of {self.fqn!r} is this rank's alone: it was accumulated inside no_sync() and never "
                "reduced. Run the last backward of an accumulation outside of no_sync()"
            )


class FlatBucket:
    """The buffers of one bucket.

    Args:
        plan: Layout.
        params: The parameters of ``plan.slots``, in that order.
        axis: Data-parallel axis.
        zero: 0, 1 or 2.
    """

    def __init__(self, plan: Bucket, params: list[nn.Parameter], axis: Axis, *, zero: int):
        self.plan = plan
        self.axis = axis
        self.sharded = zero >= 1
        self.frees_grads = zero == 2
        self.start, self.stop = plan.shard(axis.coord)
        device = _torch.local_tensor(params[0]).device
        self.grads = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
        parts = plan.parts(axis.coord)
        self.slots = [FlatSlot(self, *each) for each in zip(plan.slots, params, parts, strict=True)]
        if self.sharded:
            self.grad_shard = torch.zeros(plan.shard_numel, dtype=plan.dtype, device=device)
            self.values = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
            self._adopt_parameters()
        self.release()

    def _adopt_parameters(self) -> None:
        """Move the parameters into ``values`` and cut this coord's parts."""
        shard = self.values[self.start : self.stop]
        for slot, plan in zip(self.slots, self.plan.slots, strict=True):
            local = _torch.local_tensor(slot.param)
            view = self.values[plan.start : plan.start + plan.numel].view(local.shape)
            view.copy_(local.detach())
            local.data = view
            first, last = (min(max(plan.start + at - self.start, 0), len(shard)) for at in slot.part)
            slot.value_part = shard[first:last]
            slot.grad_part = self.grad_shard[first:last]

    def allocate(self) -> None:
        """Give ``grads`` its storage, if it has none."""
        storage = self.grads.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.plan.num_bytes)

    def release(self) -> None:
        """Free the storage of ``grads`` (ZeRO 2)."""
        if self.frees_grads:
            self.grads.untyped_storage().resize_(0)

    def reduce(self) -> Reduction:
        """Start the reduction of ``grads``."""
        self.allocate()
        for slot in self.slots:
            slot.settle()
        if not self.sharded:
            return Reduction(self, self.grads, self.axis.all_reduce(self.grads))
        accumulates = any(slot.reduced for slot in self.slots)
        out = torch.empty_like(self.grad_shard) if accumulates else self.grad_shard
        return Reduction(self, out, self.axis.reduce_scatter(out, self.grads))

    def gather_values(self) -> dist.Work | None:
        """Start filling ``values`` with what every coord's optimizer has made of its shard."""
        return self.axis.all_gather(self.values, self.values[self.start : self.stop])


class Reduction:
    """A reduction on its way; ``finish`` leaves the mean in its place."""

    def __init__(self, bucket: FlatBucket, out: Tensor, work: dist.Work | None):
        self.bucket = bucket
        self.out = out
        self.work = work

    def finish(self) -> None:
        """Wait, divide by the number of ranks, and store or add the result."""
        bucket = self.bucket
        if self.work is not None:
            self.work.wait()
        if bucket.axis.size > 1:
            self.out.div_(bucket.axis.size)  # after the sum: one rounding, and exact for a power of two
        if bucket.sharded and self.out is not bucket.grad_shard:
            self._add()
        for slot in bucket.slots:
            slot.unreduced = False
            slot.reduced = bucket.sharded
        bucket.release()

    def _add(self) -> None:
        for slot in self.bucket.slots:
            start = slot.grad_part.storage_offset()
            fresh = self.out[start : start + slot.grad_part.numel()]
            if slot.reduced:
                slot.grad_part.add_(fresh)
            else:
                slot.grad_part.copy_(fresh)
