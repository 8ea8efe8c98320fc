"""Partial gradients over other mesh axes: kept in the buckets as they arrive, and summed once per step.

On each tensor-parallel rank, a replicated parameter used on sharded activations gets a partial gradient. Summing each
one on arrival costs a small collective per parameter and micro-batch. But sums over different axes commute. So partial
gradients lie in the flat buffers like any local gradient and are averaged over the data-parallel ranks with all others.
Afterwards the parts that this rank keeps are summed over the other axes, all together:

    backward     partial gradient of norm.weight, gradient of up.weight, ...       -->  flat bucket
    buckets      mean over dp                                                      -->  this rank's part of the mean
    at the end   parts of all partial gradients --> one buffer, one collective per axis and dtype --> written back
    then         ``param.grad`` is the full gradient

Under ``no_sync`` nothing is sent. With ZeRO 0 ``param.grad`` is then a DTensor with ``Partial`` placements.

Note: what the ranks agree on
    Data-parallel ranks may take different paths through the model, but the gradients that they average must be partial
    over the same axes. So at the first reduction of a bucket the ranks agree on these axes for each gradient: the union
    over all ranks. A rank whose gradient is full along such an axis adds it at coord 0 only. A later gradient that is
    partial over other axes is summed when it arrives. With ``find_unused_parameters`` the ranks add its axes at the end
    of that backward. Ranks along those other axes run the same program, as for every tensor-parallel operator.

Note: order of additions
    ``"ordered"`` adds in the order of coords here, too. So the bits of a gradient depend neither on the position of an
    element in the buffer, nor on bucket sizes, nor on what is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from .. import _torch
from .._ranks.axis import Axis, Pending
from .reduction import ScatteredSum

__all__ = ["Agreement", "Form", "sum_partials"]

#: Largest size, in bytes over all ranks, at which an ordered sum gathers partial gradients: one collective, not two.
GATHERED_BYTES = 1 << 22


class PartialBucket(Protocol):
    """The properties of a bucket that determine how its partial gradients are summed."""

    wire_dtype: torch.dtype
    ordered: bool


class PartialSlot(Protocol):
    """The slot protocol for partial gradients; see `bucket.FlatSlot`."""

    bucket: PartialBucket
    form: Form | None

    @property
    def partial_dims(self) -> tuple[int, ...]:
        """The mesh dims over which the local gradient is partial."""

    @property
    def kept_part(self) -> Tensor:
        """The flat part of the reduced gradient that this rank keeps."""


class Form:
    """The mesh dims over which the local gradient of a DTensor parameter is partial; none for a full gradient.

    Args:
        param: The parameter.

    Attributes:
        dims: The mesh dims over which its gradient may be partial.
        over: The dims over which the gradient in the buffers is partial.
        agreed: The dims over which the gradient of every rank is partial at a reduction; None before the agreement.
        requested: The dims of gradients that were summed on arrival, because the agreement does not have them.
    """

    def __init__(self, param: DTensor):
        self.mesh, self.placements = param.device_mesh, tuple(param.placements)
        self.dims = tuple(d for d, p in enumerate(self.placements) if p.is_replicate() and self.mesh.size(d) > 1)
        self.over: tuple[int, ...] = ()
        self.agreed: tuple[int, ...] | None = None
        self.requested: set[int] = set()
        self._last: tuple[object, tuple[int, ...] | None] = None, None
        self._views: dict[tuple[int, ...], DTensor] = {}

    def dims_of(self, placements: Sequence[Placement]) -> tuple[int, ...] | None:
        """Return the mesh dims over which a gradient is partial; None if its placements differ in other ways, too."""
        known, dims = self._last
        if placements is not known:  # usually the same tuple object
            self._last = placements, self._find(placements)
            dims = self._last[1]
        return dims

    def _find(self, placements: Sequence[Placement]) -> tuple[int, ...] | None:
        dims = []
        for dim, (has, wants) in enumerate(zip(placements, self.placements, strict=True)):
            if has == wants or (self.mesh.size(dim) == 1 and has.is_partial() and wants.is_replicate()):
                continue
            if type(has) is not Partial or has.reduce_op != "sum" or dim not in self.dims:
                return None
            dims.append(dim)
        return tuple(dims)

    def admits(self, dims: Iterable[int]) -> bool:
        """Return whether a gradient that is partial over ``dims`` can stay so; record other dims in `requested`."""
        if self.agreed is None:
            return True
        others = set(dims) - set(self.agreed)
        self.requested |= others
        return not others

    def adds(self, dims: Iterable[int], target: Iterable[int]) -> bool:
        """Return whether this rank adds a gradient partial over ``dims`` to one partial over more dims, ``target``.

        Along the dims that only ``target`` has, the gradient is the same on all ranks, and coord 0 adds it.
        """
        return all(self.mesh.get_local_rank(dim) == 0 for dim in set(target) - set(dims))

    def union(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Return the dims over which the gradient in the buffers is partial after one over ``dims`` is added."""
        return tuple(sorted({*self.over, *dims}))

    @property
    def is_silent(self) -> bool:
        """Whether another rank adds the full gradient that lies in the buffers, so that this one must not."""
        return bool(self.agreed) and not self.adds((), self.agreed)

    def view(self, local: Tensor, param: DTensor) -> DTensor:
        """Return the gradient in the buffers as the partial gradient that it is."""
        if self.over not in self._views:
            placements = [Partial() if dim in self.over else p for dim, p in enumerate(self.placements)]
            shape, stride = param.shape, param.stride()
            with torch.no_grad():
                view = DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)
            self._views[self.over] = view
        return self._views[self.over]

    def conform(self, local: Tensor) -> None:
        """Make the gradient in the buffers partial over the agreed dims."""
        if self.agreed and self.over != self.agreed:
            if not self.adds(self.over, self.agreed):
                local.zero_()
            self.over = self.agreed

    # The ranks exchange requests as one number per gradient, a mask of dims, by a reduction that takes the maximum.

    def take_request(self) -> int:
        """Return the requested dims as a mask, and clear them."""
        mask = sum(1 << dim for dim in self.requested)
        self.requested.clear()
        return mask

    def grant(self, mask: int) -> None:
        """Let gradients be partial over the requested dims of a rank, from the next one on."""
        if mask and self.agreed is not None:
            self.agreed = tuple(sorted({*self.agreed, *(dim for dim in self.dims if mask >> dim & 1)}))

    @cached_property
    def axes(self) -> dict[int, Axis]:
        """The mesh axes by dim."""
        return {dim: Axis.of_dim(self.mesh, dim) for dim in self.dims}


class Agreement:
    """The one-time agreement of the ranks on the axes over which each gradient of a bucket is partial.

    Args:
        slots: The slots of the bucket.
        axis: All data-parallel ranks.
    """

    def __init__(self, slots: Sequence[PartialSlot], axis: Axis):
        self._slots = [slot for slot in slots if slot.form is not None and slot.form.dims]
        self._axis = axis
        self._flags: Tensor | None = None
        self._pending: Pending | None = None
        self._is_made = not self._slots

    def ends_within(self, seconds: float) -> bool:
        """Start the agreement unless it is made; wait at most ``seconds``; return whether `finish` need not wait."""
        if self._is_made:
            return True
        self._start()
        return self._pending is None or self._pending.ends_within(seconds)

    def finish(self) -> None:
        """Make the agreement unless it exists; the host waits."""
        if self._is_made:
            return
        self._start()
        if self._pending is not None:
            self._pending.wait()
        answers = iter(self._flags.tolist())
        for slot in self._slots:
            slot.form.agreed = tuple([dim for dim in slot.form.dims if next(answers)])
        self._is_made, self._flags, self._pending = True, None, None

    def _start(self) -> None:
        if self._flags is None:
            flags = [dim in slot.partial_dims for slot in self._slots for dim in slot.form.dims]
            self._flags = torch.tensor(flags, dtype=torch.int32, device=self._axis.device_type)
            what = "the axes over which gradients are partial sums"
            self._pending = self._axis.all_reduce(self._flags, dist.ReduceOp.MAX, what=what)


def sum_partials(slots: Sequence[PartialSlot]) -> None:
    """Sum this rank's parts of averaged partial gradients over their axes, in place.

    Args:
        slots: In an order that is the same on all ranks of those axes.
    """
    slots = [slot for slot in slots if slot.form.agreed]
    axes = {slot.form.axes[dim].ranks: slot.form.axes[dim] for slot in slots for dim in slot.form.agreed}
    for ranks, axis in axes.items():
        groups: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for slot in slots:
            if any(slot.form.axes[dim].ranks == ranks for dim in slot.form.agreed):
                groups.setdefault((slot.bucket.wire_dtype, slot.bucket.ordered), []).append(slot.kept_part)
        running = [_FlatSum(axis, parts, dtype, ordered=ordered) for (dtype, ordered), parts in groups.items()]
        for flat_sum in running:
            flat_sum.finish()
    for slot in slots:
        slot.form.over = ()


class _FlatSum:
    """A sum of flat tensors over the ranks of an axis, in flight.

    Args:
        axis: Its ranks hold tensors of the same sizes.
        parts: Overwritten with their sums at the end.
        dtype: Dtype of the sum.
        ordered: Add in the order of coords.
    """

    WHAT = "gradients that are partial sums"

    def __init__(self, axis: Axis, parts: Sequence[Tensor], dtype: torch.dtype, *, ordered: bool):
        self.axis, self.parts = axis, parts
        self.flat = torch.cat([part.to(dtype) for part in parts])
        self._sum: ScatteredSum | None = None
        self._every: Tensor | None = None
        self._pending: Pending | None = None
        num_bytes = self.flat.numel() * self.flat.element_size() * axis.size
        if not num_bytes:
            return  # the same on all ranks of the axis
        if not ordered:
            self._pending = axis.all_reduce(self.flat, what=self.WHAT)
        elif axis.size == 2 or num_bytes <= GATHERED_BYTES:
            self._every = self.flat.new_empty(axis.size * self.flat.numel())
            self._pending = axis.all_gather(self._every, self.flat, what=self.WHAT)
        else:
            self.flat = torch.nn.functional.pad(self.flat, (0, -self.flat.numel() % axis.size))
            self._sum = ScatteredSum(axis, self.flat, order=range(axis.size), what=self.WHAT)

    def finish(self) -> None:
        """Wait, and write the sums into the parts."""
        if self._sum is not None:
            own = self.flat.view(self.axis.size, -1)[self.axis.coord]
            own.copy_(self._sum.result())
            self._pending = self.axis.all_gather(self.flat, own, what=self.WHAT)
        if self._pending is not None:
            self._pending.wait()
        total = self.flat
        if self._every is not None:
            total, *others = self._every.view(self.axis.size, -1).unbind()
            for other in others:
                total.add_(other)
        sizes = [part.numel() for part in self.parts]
        _torch.foreach_copy_(self.parts, total[: sum(sizes)].split(sizes))
