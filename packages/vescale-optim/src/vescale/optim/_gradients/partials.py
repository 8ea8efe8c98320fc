"""Local gradients that are partial sums over other mesh axes: kept as they come, and summed once per step.

A replicated parameter on sharded activations gets, on each tensor-parallel rank, a summand of its gradient. Reducing it
as it comes costs one small collective per parameter and micro-batch. But sums over different axes commute: the summands
lie in the flat buffers like any local gradient, are averaged over the data-parallel ranks with everything else, and
then those parts of them that this rank keeps are summed over their own axes, all together:

    backward     summand of norm.weight, gradient of up.weight, ...       -->  flat bucket
    buckets      mean over dp                                             -->  this rank's part of the mean
    at the end   the parts of all summands --> one buffer, one collective per axis and dtype --> written back
    then         ``param.grad`` says that it is the gradient

Under ``no_sync`` nothing is sent at all, and with ZeRO 0 ``param.grad`` is a DTensor whose placements say that it is a
partial sum.

Note: what the ranks agree on
    Data-parallel ranks may take different paths through the model, but what they average must be of one kind. So they
    agree, when a bucket is reduced for the first time, over which axes each of its gradients is a partial sum: over all
    over which that of any rank is. A gradient that is whole along such an axis is added by the rank at its coord 0
    alone. Whatever comes later over other axes is summed at once; with ``find_unused_parameters`` ranks learn of it at
    the end of that backward. Ranks along those other axes run the same program, as with every tensor-parallel operator.

Note: order of additions
    ``"ordered"`` adds in the order of coords here, too. So the bits of a gradient do not depend on the layout: not on
    the place of an element in the buffer, on bucket sizes or on what is sharded.
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

#: Bytes of all ranks' summands up to which an ordered sum gathers them: one collective instead of two.
GATHERED_BYTES = 1 << 22


class PartialBucket(Protocol):
    """The properties of a bucket that decide how its partial gradients are summed."""

    wire_dtype: torch.dtype
    ordered: bool


class PartialSlot(Protocol):
    """A parameter's slot in a bucket, as far as partial gradients concern it; see `bucket.FlatSlot`."""

    bucket: PartialBucket
    form: Form | None

    @property
    def partial_dims(self) -> tuple[int, ...]:
        """The mesh dims over which the local gradient is a partial sum."""

    @property
    def kept_part(self) -> Tensor:
        """The flat part of the reduced gradient that this rank keeps."""


class Form:
    """What the local gradient of a DTensor parameter is to its gradient: a partial sum over some mesh dims, or none.

    Args:
        param: The parameter.

    Attributes:
        dims: The mesh dims over which its gradient may be a partial sum.
        over: Those over which what the buffers hold is one.
        agreed: Those over which every rank's is, at a reduction; None until the ranks have agreed.
        wishes: Those over which a gradient was one that had to be summed at once.
    """

    def __init__(self, param: DTensor):
        self.mesh, self.placements = param.device_mesh, tuple(param.placements)
        self.dims = tuple(d for d, p in enumerate(self.placements) if p.is_replicate() and self.mesh.size(d) > 1)
        self.over: tuple[int, ...] = ()
        self.agreed: tuple[int, ...] | None = None
        self.wishes: set[int] = set()
        self._last: tuple[object, tuple[int, ...] | None] = None, None
        self._views: dict[tuple[int, ...], DTensor] = {}

    def dims_of(self, placements: Sequence[Placement]) -> tuple[int, ...] | None:
        """Return the mesh dims over which a gradient is a partial sum; None if it differs in other ways, too."""
        known, dims = self._last
        if placements is not known:  # most often it is the very same tuple
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
        """Tell whether a gradient that is a partial sum over ``dims`` can be kept as it is; note it if not."""
        if self.agreed is None:
            return True
        others = set(dims) - set(self.agreed)
        self.wishes |= others
        return not others

    def adds(self, dims: Iterable[int], target: Iterable[int]) -> bool:
        """Tell whether this rank adds a partial sum over ``dims`` to one over more; else the rank at coord 0 does."""
        return all(self.mesh.get_local_rank(dim) == 0 for dim in set(target) - set(dims))

    def union(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Return the dims over which the sum of what the buffers hold and of a partial sum over ``dims`` is one."""
        return tuple(sorted({*self.over, *dims}))

    @property
    def is_silent(self) -> bool:
        """Whether another rank adds what is there of the whole gradient already."""
        return bool(self.agreed) and not self.adds((), self.agreed)

    def view(self, local: Tensor, param: DTensor) -> DTensor:
        """Return what the buffers hold, as the partial sum that it is."""
        if self.over not in self._views:
            placements = [Partial() if dim in self.over else p for dim, p in enumerate(self.placements)]
            shape, stride = param.shape, param.stride()
            with torch.no_grad():
                view = DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)
            self._views[self.over] = view
        return self._views[self.over]

    def conform(self, local: Tensor) -> None:
        """Make of what the buffers hold a partial sum over what has been agreed on."""
        if self.agreed and self.over != self.agreed:
            if not self.adds(self.over, self.agreed):
                local.zero_()
            self.over = self.agreed

    # The mask of dims says all this in one number, for a reduction that takes the maximum.

    def mark(self) -> int:
        """Return a number for the wishes, and forget them."""
        mask = sum(1 << dim for dim in self.wishes)
        self.wishes.clear()
        return mask

    def learn(self, mask: int) -> None:
        """Fulfil the wishes of a rank, from the next gradient on."""
        if mask and self.agreed is not None:
            self.agreed = tuple(sorted({*self.agreed, *(dim for dim in self.dims if mask >> dim & 1)}))

    @cached_property
    def axes(self) -> dict[int, Axis]:
        """The axes by dim."""
        return {dim: Axis.of_dim(self.mesh, dim) for dim in self.dims}


class Agreement:
    """What the ranks agree on, once: over what each gradient of a bucket is a partial sum.

    Args:
        slots: Those of the bucket.
        axis: All data-parallel ranks.
    """

    def __init__(self, slots: Sequence[PartialSlot], axis: Axis):
        self._slots = [slot for slot in slots if slot.form is not None and slot.form.dims]
        self._axis = axis
        self._flags: Tensor | None = None
        self._pending: Pending | None = None
        self._is_made = not self._slots

    def comes_within(self, seconds: float) -> bool:
        """Ask the ranks, unless that has been done, and wait for their answers no longer than that."""
        if self._is_made:
            return True
        self._ask()
        return self._pending is None or self._pending.ends_within(seconds)

    def finish(self) -> None:
        """Make the agreement, unless that has been done; the host waits."""
        if self._is_made:
            return
        self._ask()
        if self._pending is not None:
            self._pending.wait()
        answers = iter(self._flags.tolist())
        for slot in self._slots:
            slot.form.agreed = tuple([dim for dim in slot.form.dims if next(answers)])
        self._is_made, self._flags, self._pending = True, None, None

    def _ask(self) -> None:
        if self._flags is None:
            flags = [dim in slot.partial_dims for slot in self._slots for dim in slot.form.dims]
            self._flags = torch.tensor(flags, dtype=torch.int32, device=self._axis.device_type)
            what = "the axes over which gradients are partial sums"
            self._pending = self._axis.all_reduce(self._flags, dist.ReduceOp.MAX, what=what)


def sum_partials(slots: Sequence[PartialSlot]) -> None:
    """Sum what this rank keeps of averaged partial sums over their axes, in place.

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
    """The sum over the ranks of an axis of some flat tensors, under way.

    Args:
        axis: Its ranks hold tensors of the same sizes.
        parts: Replaced by their sums in the end.
        dtype: Of the sum.
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
        """Wait, and put the sums in their places."""
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
