"""Reduction of gradients before the backward that brings them to the parameters: of a pipeline's stages.

A pipeline computes the gradients of all micro-batches in its schedule. The user's ``loss.backward()`` then scales their
sums and adds them to the parameters. The sums of a stage are complete after its last backward, while other stages still
work. So they are reduced then, and the backward takes the means:

    schedule           sums of a stage --> flat buckets --> mean over the ranks   (ZeRO 1 to 3: of this rank's shard)
    loss.backward()    ``param.grad`` += gradient of the loss x mean              on this rank alone

The gradient of the loss multiplies the mean, not the sums. For 1 and powers of two that is the same, bit for bit.

Note: what the buckets hold meanwhile
    A bucket takes the sums only while the schedule runs. A gradient that it has from before, reduced or not, is set
    aside until the end, and so is ``param.grad``. Means have memory of their own, until the backward has taken them: so
    there may be several steps before a backward, or a step whose loss is thrown away.

Note: what keeps collectives matched between ranks
    Buckets are launched in an order that all ranks derive from the schedule, each once. As in `reducer.py`, a parameter
    without a gradient on this rank contributes zeros. A schedule never waits for a bucket, except for the agreement of
    `partials.py` when a bucket is reduced for the first time. All data-parallel ranks run the same schedule, so that a
    wait cannot close a circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _torch
from .bucket import FlatBucket, FlatSlot
from .partials import Form, sum_partials
from .reduction import Reduction

__all__ = ["Delivery", "EarlyReduction"]


class StepUnits(Protocol):
    """The parameters of ZeRO 3 during one step; see `units_of_step.UnitsOfStep`."""

    def done(self, parameter: Tensor) -> None: ...
    def compare(self) -> None: ...
    def close(self) -> None: ...


class Delivery(NamedTuple):
    """What a backward takes of a step.

    Attributes:
        used: the parameters that have a gradient on this rank.
        means: one per bucket.
        factor: the gradient of the step's loss.
    """

    used: set[FlatSlot]
    means: Sequence[Tensor]
    factor: Tensor


class EarlyReduction:
    """The gradients of one step of a pipeline, which are reduced while it runs.

    Args:
        buckets: of the parameters.
        groups: parameters that get their sums together, in the order in which groups are complete. A parameter of the
            buckets that is in no group gets no gradient.
        overlap: whether to reduce before `finish`.
        deliver: takes what a backward brings.
        units: the parameters of ZeRO 3.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        groups: Sequence[Iterable[Tensor]],
        *,
        overlap: bool,
        deliver: Callable[[Delivery], None],
        units: StepUnits | None,
    ):
        self._overlap, self._deliver, self._units = overlap, deliver, units
        self._slots = {slot.param: slot for bucket in buckets for slot in bucket.slots}
        self._used: set[FlatSlot] = set()
        at = {parameter: number for number, group in enumerate(groups) for parameter in group}
        self._missing = {bucket: sum(slot.param in at for slot in bucket.slots) for bucket in buckets}
        last = {bucket: max(at.get(slot.param, -1) for slot in bucket.slots) for bucket in buckets}
        self._waiting = deque(sorted(buckets, key=last.__getitem__))
        self._in_flight: deque[Reduction] = deque()  # in launch order
        self._sums = {bucket: _Sum(bucket) for bucket in buckets}
        self._before = [_Before(bucket) for bucket in buckets]

    @torch.no_grad()
    def add(self, sums: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Take the sums of some parameters, each once, and start the reductions of the buckets that are complete.

        Args:
            sums: each parameter, and its sum over micro-batches on this rank, or None without a gradient. The sum of a
                DTensor may be partial.
        """
        for parameter, gradient in sums:
            slot = self._slots[parameter]
            if gradient is not None:
                slot.receive(_torch.local_tensor(gradient), getattr(gradient, "placements", ()))
                self._used.add(slot)
            self._missing[slot.bucket] -= 1
            if self._units is not None:
                self._units.done(parameter)
        self._finish_ended()
        while self._overlap and self._waiting and not self._missing[self._waiting[0]]:
            self._launch_next()

    def _finish_ended(self) -> None:
        """Free buckets whose reduction has ended; launch second collectives (hybrid sharding). Wait for none."""
        while self._in_flight and self._in_flight[0].ends_within(0):
            self._in_flight[0].proceed()
            if not self._in_flight[0].ends_within(0):
                return
            self._in_flight.popleft().finish()

    def _launch_next(self) -> None:
        bucket = self._waiting.popleft()
        self._in_flight.append(bucket.reduce(self._sums[bucket]))

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Return the means, one per bucket: of this rank's shard, or (ZeRO 0) of all."""
        while self._waiting:
            self._launch_next()
        for reduction in self._in_flight:  # all of them before the first wait, so that their gathers overlap
            reduction.proceed()
        while self._in_flight:
            self._in_flight.popleft().finish()
        sum_partials([part for each in self._sums.values() for part in each.parts()])
        if self._units is not None:
            self._units.compare()
        self.close()
        return [each.mean for each in self._sums.values()]

    def close(self) -> None:
        """Give the buckets back what they had before the step; free parameters of ZeRO 3."""
        while self._before:
            self._before.pop().restore()
        if self._units is not None:
            self._units.close()
            self._units = None

    def deliver(self, means: Sequence[Tensor], factor: Tensor) -> None:
        """Add the means, times a factor, to the gradients of the parameters when the running backward ends."""
        self._deliver(Delivery(self._used, means, factor.detach()))


class _Sum:
    """What a bucket is in the reduction of a step: its mean is kept apart; see `reduction.ReducibleBucket`."""

    accumulates = False
    grad_shard = None  # the backend writes the sum into new memory
    mean: Tensor

    def __init__(self, bucket: FlatBucket):
        self.label, self.axes, self.grads = bucket.label, bucket.axes, bucket.grads
        self.ordered, self.wire_dtype = bucket.ordered, bucket.wire_dtype
        self._bucket = bucket

    def store(self, mean: Tensor) -> None:
        """Keep the mean."""
        is_view = mean.untyped_storage().nbytes() != mean.nbytes or mean.data_ptr() == self.grads.data_ptr()
        self.mean = mean.clone() if is_view else mean
        self._bucket.release()

    def parts(self) -> list[_Part]:
        """Return the parts of the mean that belong to DTensors."""
        places = zip(self._bucket.slots, self._bucket.cut(self.mean), strict=True)
        return [_Part(self, slot.form, part) for slot, part in places if slot.form is not None and slot.form.dims]


class _Part:
    """A parameter's part of a mean; see `partials.PartialSlot`."""

    partial_dims = ()

    def __init__(self, bucket: _Sum, form: Form, kept_part: Tensor):
        self.bucket, self.form, self.kept_part = bucket, form, kept_part


class _Before:
    """What a bucket and its parameters have before a step: gradients of other steps, which stay as they are."""

    def __init__(self, bucket: FlatBucket):
        self._bucket = bucket
        self._grads = bucket.grads.clone() if any(slot.lies_in_grads for slot in bucket.slots) else None
        self._states = [slot.take_out() for slot in bucket.slots]

    @torch.no_grad()
    def restore(self) -> None:
        if self._grads is not None:
            self._bucket.allocate()
            self._bucket.grads.copy_(self._grads)
        for slot, state in zip(self._bucket.slots, self._states, strict=True):
            slot.put_back(state)
