"""What one backward pass has collected: gradients and summands, collectives under way, sums that go into ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not, ne
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from .._report.ranges import Meter, is_watched, profiler_range
from .flat import Bucket, FlatReduction, Slot

__all__ = ["Arrivals", "Owner", "Pass", "accumulate", "as_gradient"]


Counts = dict[tuple[Slot, Bucket], int]
"""How many summands each parameter has brought for a bucket."""


class Arrivals:
    """The summands that a pass is expected to bring.

    Attributes:
        counts: of each parameter.
        order: the buckets, in the order in which they are launched.
        num_missing: summands for each bucket.
    """

    def __init__(self, counts: Counts | None = None):
        self.counts = counts or {}
        self.num_missing: dict[Bucket, int] = {}
        for (_, bucket), count in self.counts.items():
            self.num_missing[bucket] = self.num_missing.get(bucket, 0) + count
        self.order = sorted(self.num_missing, key=lambda bucket: bucket.order)


class Owner(Protocol):
    """What a pass needs to know of the :class:`GradientSync` that it works for.

    Attributes:
        meter: hears of reductions while a report is open.
    """

    meter: Meter | None

    def unreduced(self) -> dict[Bucket, list[Slot]]:
        """Return the parameters whose ``.grad`` is partial and that no running pass has taken, by bucket."""

    def add(self, parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> None:
        """Add this rank's part of a gradient to ``.grad``."""

    def mark_taken(self, slot: Slot, taker: Pass) -> None:
        """Leave a partial ``.grad`` to a pass."""

    def mark_reduced(self, slot: Slot) -> None:
        """Say that ``.grad`` of a parameter is no longer partial."""

    def learn(self, counts: Counts) -> None:
        """Note what a pass has brought."""


class Pass:
    """The gradients of one backward pass.

    Args:
        owner: hears what the pass brought when it ends.
        expected: a bucket is launched as soon as all that is expected for it has come; the rest at the end.
        number: of the backward pass in torch's count.

    Attributes:
        whole: parameter, layout and local gradient of those that become ``.grad`` at the end.
        summands: slot, bucket, placements and local gradient of those that are summed from the end on.
    """

    def __init__(self, owner: Owner, expected: Arrivals, number: int = -1):
        self.owner, self.expected, self.number = owner, expected, number
        self.num_missing = dict(expected.num_missing)
        self.num_launched = 0  # of the expected buckets
        self.whole: list[tuple[DTensor, object, Tensor]] = []
        self.summands: list[tuple[Slot, Bucket, tuple[Placement, ...], Tensor]] = []
        self.counts: Counts = {}
        self.waiting: dict[Bucket, dict[Slot, Tensor]] = {}
        self.launched: list[tuple[FlatReduction, list[Slot]]] = []
        self.replaced: set[Slot] = set()  # parameters whose old .grad is a part of the sum

    def add(self, slot: Slot, bucket: Bucket, local: Tensor) -> None:
        """Collect a summand, and launch the buckets that this completes."""
        members = self.waiting.setdefault(bucket, {})
        members[slot] = members[slot] + local if slot in members else local
        if bucket.waits:
            return
        pair = slot, bucket
        count = self.counts[pair] = self.counts.get(pair, 0) + 1
        if count <= self.expected.counts.get(pair, 0):
            self.num_missing[bucket] -= 1
            self._launch_complete()

    def _launch_complete(self) -> None:
        """Launch complete buckets, strictly in order, so that all ranks issue the same collectives."""
        order = self.expected.order
        while self.num_launched < len(order):
            bucket = order[self.num_launched]
            if self.num_missing[bucket] or bucket.waits:
                break
            self._launch(bucket)
            self.num_launched += 1

    def _launch(self, bucket: Bucket) -> None:
        members = self.waiting.pop(bucket, {})
        owner = self.owner
        for slot in owner.unreduced().get(bucket, ()):
            kept = _torch.local_of(slot.parameter.grad)
            members[slot] = kept + members[slot] if slot in members else kept
            owner.mark_taken(slot, self)
            self.replaced.add(slot)
        slots = sorted(members, key=lambda slot: -slot.position)
        summands = [members[slot] for slot in slots]
        if is_watched(owner.meter):
            with profiler_range("gradients", owner.meter):
                self.launched.append((FlatReduction(bucket, summands), slots))
        else:
            self.launched.append((FlatReduction(bucket, summands), slots))

    def end(self) -> None:
        """Hand on what has come, launch what is left, await all, and add the sums to ``.grad``."""
        if not self._end_at_once():
            with torch.no_grad():
                self._end_in_order()
        if self.counts != self.expected.counts:
            self.owner.learn(self.counts)

    def _end_at_once(self) -> bool:
        """End a pass that has nothing but gradients that waited, sums of one bucket at most; tell whether it is one.

        Most passes are. What it does stands in the way of the next step, so it takes tensors in columns, and the order
        of a bucket from the last time.
        """
        owner = self.owner
        if self.launched or self.waiting or owner.unreduced() or is_watched(owner.meter):
            return False
        launched = None
        if self.summands:
            slots, buckets, _, locals_ = zip(*self.summands, strict=True)
            if buckets.count(buckets[0]) < len(buckets) or len(set(slots)) < len(slots):
                return False
            order = buckets[0].order_of(slots)
            launched = FlatReduction(buckets[0], order(locals_)), order(slots)
        self._attach_whole()
        if launched is not None:
            self.summands.clear()
            reduction, slots = launched
            while not reduction.is_done:
                reduction.advance()
            _deliver_all([slot.parameter for slot in slots], reduction.results())
        return True

    def _end_in_order(self) -> None:
        self._attach_whole()
        waiting = self.waiting
        for slot, bucket, _, local in self.summands:
            members = waiting.setdefault(bucket, {})
            members[slot] = members[slot] + local if slot in members else local
        self.summands.clear()
        left = {*waiting, *self.owner.unreduced()}
        for bucket in sorted(left, key=lambda bucket: bucket.order):
            self._launch(bucket)
        if is_watched(self.owner.meter):
            with profiler_range("gradients end", self.owner.meter):
                self._await_all()
        else:
            self._await_all()
        for reduction, slots in self.launched:
            for slot, total in zip(slots, reduction.results(), strict=True):
                self._deliver(slot, total)

    def _attach_whole(self) -> None:
        """Hand on the gradients that are whole, and leave the list empty, which others know."""
        if self.whole:
            parameters, layouts, locals_ = zip(*self.whole, strict=True)
            self.whole.clear()
            _attach(self.owner, parameters, layouts, locals_)

    def _await_all(self) -> None:
        while running := [reduction for reduction, _ in self.launched if not reduction.is_done]:
            for reduction in running:
                reduction.advance()

    def _deliver(self, slot: Slot, total: Tensor) -> None:
        parameter = slot.parameter
        if slot in self.replaced:
            self.replaced.discard(slot)
            self.owner.mark_reduced(slot)
            parameter.grad = None
        _add_sum(parameter, total)


def _attach(owner: Owner, parameters: Sequence[DTensor], layouts: Sequence[object], locals_: Sequence[Tensor]) -> None:
    """Add local gradients in the placements of their parameters to ``.grad``."""
    grads = map(_torch.gradient_of, parameters)
    if any(map(is_not, grads, repeat(None))) or len(set(map(id, parameters))) < len(parameters):
        for parameter, local in zip(parameters, locals_, strict=True):
            owner.add(parameter, local, parameter.placements)
    else:
        _torch.set_gradients(parameters, map(_torch.wrap, locals_, layouts))


def _deliver_all(parameters: Sequence[DTensor], totals: Sequence[Tensor]) -> None:
    """Add sums of the ranks to ``.grad``."""
    grads, locals_ = map(_torch.gradient_of, parameters), map(_torch.local_of, parameters)
    if any(map(is_not, grads, repeat(None))) or any(map(ne, map(Tensor.stride, totals), map(Tensor.stride, locals_))):
        for parameter, total in zip(parameters, totals, strict=True):
            _add_sum(parameter, total)
    else:
        _torch.set_gradients(parameters, map(_torch.wrap, totals, map(_torch.layout_of, parameters)))


def _add_sum(parameter: DTensor, total: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = _torch.wrap_like(_own(total, _torch.local_of(parameter)), parameter)
    else:
        with torch.no_grad():
            accumulate(parameter, _torch.wrap_like(total, parameter))


def _own(piece: Tensor, like: Tensor) -> Tensor:
    """Return a reduced gradient in the memory format of a parameter."""
    return piece if piece.stride() == like.stride() else torch.empty_like(like, dtype=piece.dtype).copy_(piece)


def as_gradient(parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> DTensor:
    """Return ``local`` as a gradient of ``parameter``, differentiably."""
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def accumulate(parameter: DTensor, gradient: DTensor) -> None:
    """Add a gradient in the parameter's placements to ``.grad``, as autograd does: in place unless it is recorded."""
    old = parameter.grad
    if old is None:
        parameter.grad = gradient
    elif old.placements != gradient.placements or (torch.is_grad_enabled() and gradient.requires_grad):
        parameter.grad = old.redistribute(placements=parameter.placements) + gradient
    else:
        with torch.no_grad():
            _torch.local_of(old).add_(_torch.local_of(gradient))
        torch.autograd.graph.increment_version(old)
