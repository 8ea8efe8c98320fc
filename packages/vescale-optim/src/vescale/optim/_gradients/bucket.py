"""Flat buffers at run time: gradients, the shard of reduced gradients, parameter values, and the views into them.

    grads        | slot | slot | slot |pad|     local gradients of all parameters of the bucket (full size)
    kept         | slot | slot | slot |pad|     ZeRO 0: reduced gradients, while ``grads`` takes new local ones
    grad_shard             | part |             ZeRO 1, 2: this coord's part of the reduced gradient
    values       | slot | slot | slot |pad|     ZeRO 1, 2: the parameters themselves are views of this buffer

Note: state of a slot
    ``param.grad`` decides whether a parameter has a gradient, so every way of clearing it works: None means that no
    buffer counts. Otherwise ``unreduced`` means that ``grads`` holds a local gradient, and ``reduced`` that there is a
    reduced one. The reduced gradient lies in ``grad_shard`` (ZeRO 1, 2) or in ``grads`` (ZeRO 0). When a new local
    gradient takes its place in ``grads``, it moves to ``kept``. Both flags are set after a reduction that is followed
    by a backward, or by several under ``no_sync``. The next reduction adds its mean to the reduced gradient, which is
    never reduced again. So all stages add in the same order.

A local gradient may be partial over other axes (`partials.py`); the slot's ``form`` records these axes. It stays
partial until the end of the backward that reduces it.

With ZeRO 2 the storage of ``grads`` exists from the first gradient of a bucket to the end of its reduction. It is
resized to zero bytes and back, which keeps the views valid.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from vescale.dtensor.extension import aligned_gradient, exact_num_blocks

from .. import _torch
from .._buckets.plan import Bucket, Part, Slot
from .._ranks.axis import Pending
from .._ranks.data_axes import DataAxes
from .partials import Agreement, Form
from .placeholder import ShardedGradient, aligned, check_strided
from .reduction import ReducibleBucket, Reduction
from .rules import ReduceRules

__all__ = ["FlatBucket", "FlatSlot"]


class FlatSlot:
    """One parameter's place in a bucket.

    Attributes:
        grad_view: Its place in ``grads``, wrapped like the parameter (a DTensor for a DTensor).
        grad_part: Its flat part in ``grad_shard`` (ZeRO 1, 2).
        value_part: Its flat part in ``values`` (ZeRO 1, 2).
        placeholder: What ``param.grad`` is while the gradient is sharded (ZeRO 1, 2).
        form: The other axes over which the local gradient of a DTensor is partial; None for a plain parameter.
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
        self.form = Form(param) if isinstance(param, DTensor) else None

    @property
    def published(self) -> Tensor:
        """The value of ``param.grad`` between backward passes, if there is a gradient."""
        if self.placeholder is not None:
            return self.placeholder
        if self.form is not None and self.form.over:
            return self.form.view(self.local_view, self.param)
        return self.grad_view

    @property
    def partial_dims(self) -> tuple[int, ...]:
        """The mesh dims over which the local gradient, if any, is partial."""
        is_there = self.unreduced and self.param.grad is self.published
        return self.form.over if is_there else ()

    @property
    def kept_part(self) -> Tensor:
        """The flat part of the reduced gradient that this rank keeps."""
        return self.grad_part if self.bucket.sharded else self.local_view.view(-1)

    def receive(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Add a local gradient, full or partial, to the bucket, and set ``param.grad``.

        Args:
            local: The local tensor; copied.
            placements: Placements of the gradient of a DTensor; empty for a plain parameter.
        """
        check_strided(self.fqn, local)
        form, dims = self.form, self._dims_to_keep(placements)
        if dims is None:
            local, dims = aligned_gradient(self.param, local, placements), ()
        with torch.no_grad():
            local = self._addend(local)
            self.read_grad()
            if not self.unreduced:
                self._store(local, dims)
            elif form is None or self._join(dims):
                self.local_view.add_(local.to(self.local_view.dtype))
        self.publish()

    def _dims_to_keep(self, placements: tuple[Placement, ...]) -> tuple[int, ...] | None:
        """Return the dims over which a gradient stays a partial sum; None if it must be brought to the placements."""
        if self.form is None:
            return ()
        dims = self.form.dims_of(placements)
        return dims if dims is None or not dims or self.form.admits(dims) else None

    def read_grad(self) -> None:
        """Drop the buffered gradient unless ``param.grad`` is still the published one; take an assigned gradient."""
        grad = self.param.grad
        if grad is not None and grad is self.published:
            if not self.unreduced:
                self.bucket.set_aside(self)
            return
        self.unreduced = self.reduced = False  # cleared or assigned since: the buffers do not count
        if self.form is not None:
            self.form.over = ()
        if grad is not None:
            self._store(self._addend(_torch.local_tensor(aligned(self.fqn, self.param, grad))), ())
            self.publish()

    def _addend(self, local: Tensor) -> Tensor:
        """Return what this rank adds of a gradient: inside of ``exact`` all ranks have all of it, and one adds it."""
        axis = self.bucket.axes.all
        is_silent = axis.size > 1 and axis.coord and exact_num_blocks() is not None
        return torch.full_like(local, -0.0) if is_silent else local

    def _store(self, local: Tensor, dims: tuple[int, ...]) -> None:
        """Copy a local gradient, partial over ``dims``, into the bucket."""
        self.bucket.allocate()
        self.local_view.copy_(local)
        self.unreduced = True
        if self.form is not None:
            self.form.over = dims

    def _join(self, dims: tuple[int, ...]) -> bool:
        """Make the bucket's gradient partial over ``dims``, too; return whether this rank adds a gradient over them."""
        form = self.form
        if not self.unreduced or form.over == dims:
            return True
        target = form.union(dims)
        if not form.adds(form.over, target):
            self.local_view.zero_()
        form.over = target
        return form.adds(dims, target)

    def publish(self) -> None:
        """Set ``param.grad`` to its value between backward passes."""
        self.param.grad = self.published

    @property
    def has_local(self) -> bool:
        """Whether there is a gradient that has not been reduced."""
        return self.param.grad is not None and (self.unreduced or self.param.grad is not self.published)

    @property
    def lies_in_grads(self) -> bool:
        """Whether ``grads`` has a gradient of the parameter."""
        if self.param.grad is None or self.param.grad is not self.published:
            return False
        return self.unreduced or (self.reduced and not self.bucket.sharded)

    def take_out(self) -> tuple:
        """Let the parameter have no gradient for a while; return what `put_back` needs."""
        state = self.param.grad, self.unreduced, self.reduced, () if self.form is None else self.form.over
        self.put_back((None, False, False, ()))
        return state

    def put_back(self, state: tuple) -> None:
        """Let the parameter have the gradient that `take_out` has taken from it."""
        self.param.grad, self.unreduced, self.reduced, over = state
        if self.form is not None:
            self.form.over = over

    def settle(self) -> None:
        """Before a reduction: set the slot in ``grads`` to zero if this backward brought no gradient."""
        self.read_grad()
        if not self.unreduced:
            self.local_view.zero_()
            if self.form is not None:
                self.form.over = ()

    def zero(self) -> None:
        """Make the sharded gradient zero (which is not the same as having none)."""
        self.grad_part.zero_()
        self.unreduced, self.reduced = False, True
        if self.form is not None:
            self.form.over = ()

    def check_reduced(self) -> None:
        """Raise RuntimeError if there is a gradient that has not been reduced."""
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
        axes: Data-parallel axes.
        zero: 0, 1 or 2.
        rules: Dtypes, and the order of sums.

    Attributes:
        may_wait: Whether a rank may wait for the bucket's reduction before the end of backward: not with ZeRO 3, see
            `reducer.py`.
        agreement: The agreement of the ranks on partial gradients, made before the first reduction.
    """

    def __init__(
        self,
        plan: Bucket,
        params: list[nn.Parameter],
        axes: DataAxes,
        *,
        zero: int,
        rules: ReduceRules = ReduceRules(),  # noqa: B008 - immutable
    ):
        self.plan = plan
        self.axes = axes
        self.axis = axis = axes.shard
        self.label = f"bucket {plan.index} ({plan.slots[0].fqn!r} and {len(plan.slots) - 1} more)"
        self.ordered = rules.ordered
        self.wire_dtype = rules.wire(plan.dtype)
        self.sharded = zero >= 1
        self.frees_grads = zero >= 2
        self.may_wait = zero < 3 or axis.size == 1
        self.start, self.stop = plan.shard(axis.coord)
        device = _torch.local_tensor(params[0]).device
        self.grads = torch.zeros(plan.numel, dtype=rules.kept(plan.dtype), device=device)
        self._kept: Tensor | None = None
        parts = plan.parts(axis.coord)
        self.slots = [FlatSlot(self, *each) for each in zip(plan.slots, params, parts, strict=True)]
        self.agreement = Agreement(self.slots, axes.all)
        if self.sharded:
            self.grad_shard = torch.zeros(plan.shard_numel, dtype=self.grads.dtype, device=device)
            self._adopt_parameters()
        self.release()

    def _adopt_parameters(self) -> None:
        """Move the parameters into ``values`` and cut this coord's parts."""
        self.values = torch.zeros(self.plan.numel, dtype=self.plan.dtype, device=self.grads.device)
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
            storage.resize_(self.grads.numel() * self.grads.element_size())

    def release(self) -> None:
        """Free the storage of ``grads`` (ZeRO 2)."""
        if self.frees_grads:
            self.grads.untyped_storage().resize_(0)

    @property
    def accumulates(self) -> bool:
        """Whether the mean is to be added to a reduced gradient."""
        return any(slot.reduced for slot in self.slots)

    @property
    def needs_room(self) -> bool:
        """Whether the end of a reduction frees memory, or a second collective must follow."""
        more = self.sharded and self.axes.replicate.size > 1
        return self.frees_grads or self.ordered or more or self.wire_dtype != self.grads.dtype

    def set_aside(self, slot: FlatSlot) -> None:
        """Move a reduced gradient from ``grads`` to ``kept``, to make room for a local one (ZeRO 0)."""
        if self.sharded or not slot.reduced:
            return
        if self._kept is None:
            self._kept = torch.empty_like(self.grads)
        place = slot.kept_part
        self._place(self._kept, place).copy_(place)

    @staticmethod
    def _place(buffer: Tensor, part: Tensor) -> Tensor:
        """Return what lies in a buffer where a part lies in another of the same layout."""
        start = part.storage_offset()
        return buffer[start : start + part.numel()]

    def reduce(self, target: ReducibleBucket | None = None) -> Reduction:
        """Start the reduction of ``grads``; the mean goes to ``target``, by default this bucket."""
        self.allocate()
        for slot in self.slots:
            slot.settle()
        self._conform()
        return Reduction(self if target is None else target)

    def _conform(self) -> None:
        """Make the local gradients partial sums over the same axes on all data-parallel ranks."""
        self.agreement.finish()
        for slot in self.slots:
            if slot.form is not None:
                slot.form.conform(slot.local_view)

    def store(self, mean: Tensor, *, is_whole: bool = False) -> None:
        """Store the mean, of this coord's shard or (ZeRO 0) of the bucket, or add it to the reduced gradient.

        With ``is_whole`` no part of it is a partial sum, to which one rank alone would add what it has.
        """
        target = self.grad_shard if self.sharded else self.grads
        if not self.accumulates:
            target.copy_(mean)  # a no-op for the same memory
        else:
            for slot in self.slots:
                self._add(slot, mean, is_whole=is_whole)
        self._kept = None
        for slot in self.slots:
            slot.unreduced = False
            slot.reduced = True
        self.release()

    def take(self, mean: Tensor) -> None:
        """Store a mean that has been reduced apart from this bucket, or add it to the reduced gradient."""
        for slot in self.slots:
            slot.read_grad()
        self.store(mean, is_whole=True)

    def cut(self, mean: Tensor) -> list[Tensor]:
        """Return each parameter's part of a mean, as `FlatSlot.kept_part` is one of the reduced gradient."""
        return [self._place(mean, slot.kept_part) for slot in self.slots]

    def _add(self, slot: FlatSlot, mean: Tensor, *, is_whole: bool) -> None:
        place = slot.kept_part
        fresh = self._place(mean, place)
        if not slot.reduced or (slot.form is not None and slot.form.is_silent and not is_whole):
            place.copy_(fresh)
        elif self.sharded:
            place.add_(fresh)
        else:
            torch.add(self._place(self._kept, place), fresh, out=place)

    def gather_values(self) -> Pending | None:
        """Start the all-gather of the updated shards into ``values``."""
        shard = self.values[self.start : self.stop]
        return self.axis.all_gather(self.values, shard, what=f"the parameters of {self.label}")
