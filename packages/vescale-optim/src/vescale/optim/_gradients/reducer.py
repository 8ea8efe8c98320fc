"""When gradients are reduced: each bucket is launched as soon as it is complete, while backward continues.

The reducer is the gradient receiver of every trainable parameter (`vescale.dtensor.extension`). It adds each gradient
to its bucket. If that completes the bucket, it launches the bucket's collective. At the end of the backward pass it
launches the remaining buckets and waits for all, before ``backward()`` returns.

Note: what keeps collectives matched between ranks
    Buckets are launched strictly in the order of the plan, in whatever order they complete, and each exactly once per
    synchronizing backward. A parameter without a gradient on this rank (a branch not taken, an expert without tokens)
    contributes zeros. So ranks may take different paths through the model, but each must run the backward.

Note: what must not wait
    With ZeRO 3, a rank that waits for a bucket before the end of its backward may wait forever. Another rank that has
    not used a parameter of the bucket launches it only at the end of its own backward. Before that it gathers units,
    and the first rank must take part in those gathers. So with ZeRO 3 such a wait has a limit. After one wait has
    reached it, only collectives that have already ended are finished. Second collectives (hybrid sharding) are launched
    when their first has ended, in the order of buckets, in a process group of their own.

Note: unused on every rank
    One process leaves ``param.grad`` None, and an optimizer then skips the parameter: no weight decay, no momentum. To
    do the same, the ranks must agree on whether any of them had a gradient. This takes one more all-reduce, of one
    integer per parameter, at the end. It runs between the hosts: the host waits for no device, and can launch the
    optimizer's kernels while backward's run. With ``find_unused_parameters=False`` it is left out, and a missing
    gradient is an error.

Note: what else the ranks compare
    The same all-reduce carries what must be equal on all of them (`_ranks/checks.py`).

Note: several gradients of one parameter
    A bucket is complete when every parameter has its gradient. A DTensor parameter may get several in one backward: one
    from static mode of `vescale.dmodule`, which computes with a local parameter, and one from code that reads the
    DTensor itself. Such a parameter never counts as complete. So its bucket, and those after it, are launched at the
    end.

Note: gradients that come reduced
    A pipeline reduces gradients before the backward that brings them (`early.py`). That backward launches no bucket,
    unless a rank has other gradients, too, of a penalty on weights say: the all-reduce of used parameters tells all
    ranks. The means are added when these are reduced.

Note: nested backward
    Reentrant activation checkpointing runs a backward inside a node of another. If buckets are incomplete when the
    inner backward ends, the outer one completes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from vescale.dtensor import UnsupportedOperator
from vescale.dtensor.extension import (
    attach_gradient_receiver,
    exact_num_blocks,
    gets_several_gradients,
    has_gradient_hooks,
)

from .. import _torch
from .._ranks.axis import Axis
from .._ranks.checks import BackwardChecks
from .bucket import FlatBucket, FlatSlot
from .early import Delivery, EarlyReduction, StepUnits
from .partials import Agreement, sum_partials
from .reduction import Reduction

__all__ = ["Reducer"]

#: Buckets whose memory may wait for a collective while backward fills the next one.
MAX_IN_FLIGHT = 2

#: Limit, in seconds, of a wait for a bucket during backward where waiting without a limit could deadlock.
PATIENCE = 1.0


class _Round:
    """Progress of one synchronizing backward."""

    def __init__(self, buckets: Sequence[FlatBucket]):
        self.backwards: set[int] = set()
        self.missing = [len(bucket.slots) for bucket in buckets]
        self.deliveries: list[Delivery] = []
        self.arrived: set[FlatSlot] = set()  # parameters whose gradients are complete
        self.next_bucket = 0
        self.in_flight: deque[Reduction] = deque()  # in launch order
        self.gathering: deque[Reduction] = deque()  # second collective in flight; older than in_flight

    def finish(self) -> None:
        """Wait for all collectives that have been launched."""
        for reduction in self.in_flight:  # all of them before the first wait, so that their gathers overlap
            reduction.proceed()
        for reduction in [*self.gathering, *self.in_flight]:
            reduction.finish()
        self.gathering.clear()
        self.in_flight.clear()


def _blocks_around(_reducer: Reducer) -> int | None:
    return exact_num_blocks()


class Reducer:
    """Reduce the gradients of ``buckets`` over ``axis`` in every backward that runs while ``synchronizes`` is set.

    Args:
        buckets: In the order of their collectives.
        frozen: Parameters by name that had ``requires_grad=False``.
        axis: Data-parallel axis.
        overlap: Launch during backward; otherwise at its end.
        find_unused: Agree on parameters that no rank used.

    Attributes:
        begin_units: Holds the parameters of ZeRO 3 for a step of a pipeline.
        num_blocks: Of the ``vescale.dtensor.exact`` in which the last forward ran; None outside.
        blocks_of: Returns that of a forward that begins; it refuses what cannot run inside.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        frozen: dict[str, nn.Parameter],
        axis: Axis,
        *,
        overlap: bool,
        find_unused: bool,
    ):
        self.buckets = list(buckets)
        self.frozen = frozen
        self.axis = axis
        self.overlap = overlap
        self.find_unused = find_unused
        self.checks = BackwardChecks(axis)
        self._hosts = axis.on_host
        self.synchronizes = True
        self.begin_units: Callable[[Iterable[Tensor]], StepUnits] | None = None
        self.num_blocks: int | None = None
        self.blocks_of: Callable[[Reducer], int | None] = _blocks_around
        self.has_received = False  # since `take_received`
        self.has_reduced = False  # since the last step
        self._patience = PATIENCE
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._distributed = [slot for slot in self.slots if slot.form is not None and slot.form.dims]
        self._round: _Round | None = None
        for slot in self.slots:
            attach_gradient_receiver(slot.param, _SlotReceiver(self, slot))

    def receive(self, slot: FlatSlot, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Add a gradient to its bucket during backward.

        Raises:
            UnsupportedOperator: Forward and backward do not run in the same ``vescale.dtensor.exact``.
        """
        if self.axis.size > 1 and self.num_blocks != exact_num_blocks():
            raise UnsupportedOperator(
                f"the gradient of {slot.fqn!r}: expected forward and backward of DDP in one vescale.dtensor.exact, got "
                f"num_blocks={self.num_blocks} in forward and {exact_num_blocks()} in backward; put the step inside"
            )
        self.has_received = True
        self._join_round(slot)
        slot.receive(local, placements)
        if self._round is None or gets_several_gradients(slot.param):
            return
        self._round.arrived.add(slot)
        self._round.missing[slot.bucket.plan.index] -= 1
        if self.overlap:
            self._launch_complete()

    def begin(self, groups: Sequence[Iterable[Tensor]]) -> EarlyReduction | None:
        """Return what reduces the gradients of a step before its backward, or None where the backward reduces them.

        Args:
            groups: as for `EarlyReduction`.
        """
        self.num_blocks = self.blocks_of(self)
        if self.axis.size == 1 or not self.synchronizes or any(has_gradient_hooks(slot.param) for slot in self.slots):
            return None
        units = None if self.begin_units is None else self.begin_units(p for group in groups for p in group)
        return EarlyReduction(self.buckets, groups, overlap=self.overlap, deliver=self._deliver, units=units)

    def _deliver(self, delivery: Delivery) -> None:
        if not self.synchronizes:
            raise RuntimeError(
                "expected the backward() of a pipeline's step outside of no_sync(), as the step itself, which has "
                "reduced its gradients, got one inside; run both inside of no_sync() or none"
            )
        self.has_received = True
        self._round = self._round or _Round(self.buckets)
        self._round.deliveries.append(delivery)
        self._watch_end()

    def _join_round(self, slot: FlatSlot) -> None:
        if not self.synchronizes and self._round is None:
            return
        self._round = self._round or _Round(self.buckets)
        if slot in self._round.arrived:
            raise RuntimeError(
                f"{slot.fqn!r} got a second gradient before the reduction of the first had finished. Either an earlier "
                "backward() ended with an exception: call zero_grad() of the DDP module; or reentrant activation "
                "checkpointing uses the parameter twice or leaves others unused: pass use_reentrant=False"
            )
        self._watch_end()

    def _watch_end(self) -> None:
        """Call `_backward_ended` at the end of the running backward, once."""
        number = _torch.backward_number()
        if number not in self._round.backwards:
            self._round.backwards.add(number)
            _torch.on_backward_end(self._backward_ended)

    def _launch_complete(self) -> None:
        """Launch, in order, the buckets that are complete."""
        now = self._round
        while now.next_bucket < len(self.buckets) and now.missing[now.next_bucket] == 0:
            bucket = self.buckets[now.next_bucket]
            if not self._may_continue(bucket, bucket.agreement):
                return
            self._launch_next()

    def _launch_next(self) -> None:
        now = self._round
        bucket = self.buckets[now.next_bucket]
        now.next_bucket += 1
        now.in_flight.append(bucket.reduce())
        # With may_wait, which bucket proceeds when depends on the number of launches only: the same on all ranks.
        while bucket.needs_room and len(now.in_flight) > MAX_IN_FLIGHT and self._may_continue(bucket, now.in_flight[0]):
            oldest = now.in_flight.popleft()
            oldest.proceed()
            now.gathering.append(oldest)
            while now.gathering and not (now.gathering[0].is_spreading and len(now.gathering) <= MAX_IN_FLIGHT):
                if not self._may_continue(bucket, now.gathering[0]):
                    return
                now.gathering.popleft().finish()

    def _may_continue(self, bucket: FlatBucket, awaited: Reduction | Agreement) -> bool:
        """Return whether to wait for ``awaited`` before the end of backward, and continue with the next bucket."""
        if bucket.may_wait or awaited.ends_within(self._patience):
            return True
        self._patience = 0.0
        return False

    def _backward_ended(self) -> None:
        now = self._round
        if now is None or (_torch.backward_is_nested() and any(now.missing)):
            return
        if not now.deliveries:
            self._launch_rest()
        self.has_reduced = True
        facts = self.checks.facts()
        uses = self._uses(now.deliveries)
        others = [self._has_others(now)] if now.deliveries else []
        used = torch.tensor([*others, *uses, *self.checks.numbers(facts)], dtype=torch.int32)
        pending = None
        if self.find_unused or now.deliveries:
            pending = self._hosts.all_reduce(used, dist.ReduceOp.MAX, what="the parameters that were used")
        if now.deliveries:
            pending.wait()
            if used[0]:
                self._launch_rest()
        now.finish()
        if pending is not None and not now.deliveries:
            pending.wait()
        if now.next_bucket:
            sum_partials(self._distributed)
        if now.deliveries:
            self._take_means(now.deliveries)
        self._round = None
        numbers = used.tolist()[len(others) :]
        uses = numbers[: len(self.slots)]
        for slot, use in zip(self.slots, uses, strict=True):
            if use:
                slot.publish()
            if use > 1 and self.find_unused:
                slot.form.grant(use - 1)
        self.checks.finish(facts, numbers[len(uses) :])
        if not self.find_unused:
            self.checks.check_in_turn(facts)
        self._check_complete()

    def _take_means(self, deliveries: Sequence[Delivery]) -> None:
        """Add what has been reduced before: the sum over deliveries first, as autograd adds before it accumulates."""
        scaled = ([mean * factor for mean in means] for _, means, factor in deliveries)
        for bucket, (first, *more) in zip(self.buckets, zip(*scaled, strict=True), strict=True):
            bucket.take(sum(more, first))

    def _launch_rest(self) -> None:
        while self._round.next_bucket < len(self.buckets):
            self._launch_next()

    def _has_others(self, now: _Round) -> bool:
        """Return whether this rank has launched buckets, or has gradients that have not been reduced."""
        return bool(now.next_bucket) or any(slot.has_local for slot in self.slots)

    def _uses(self, deliveries: Sequence[Delivery]) -> list[int]:
        """Return 0 for each parameter that this rank has not used, otherwise 1 or more: see `Form.take_request`."""
        brought = set().union(*(delivery.used for delivery in deliveries))
        return [
            (1 if slot.form is None else 1 + slot.form.take_request())
            if slot.param.grad is not None or slot in brought
            else 0
            for slot in self.slots
        ]

    def _check_complete(self) -> None:
        """Raise errors of this backward, after its collectives, so that no other rank waits."""
        thawed = [fqn for fqn, param in self.frozen.items() if param.requires_grad]
        if thawed:
            raise RuntimeError(
                f"parameters were frozen when DDP was built and now require gradients, which it does not reduce: "
                f"{thawed}. Set requires_grad before wrapping the module"
            )
        missing = [slot.fqn for slot in self.slots if slot.param.grad is None]
        if missing and not self.find_unused:
            raise RuntimeError(
                f"parameters got no gradient on rank {dist.get_rank()} (axis {self.axis!r}): {missing}. "
                "Pass find_unused_parameters=True, or freeze them with requires_grad_(False) before wrapping"
            )

    def check_reduced(self) -> None:
        """Raise RuntimeError if there are gradients that have not been reduced."""
        if self._round is not None:
            raise RuntimeError(
                "the reduction of gradients has not finished: backward() ended with an exception, or reentrant "
                "activation checkpointing left parameters unused (pass use_reentrant=False)"
            )
        for slot in self.slots:
            if slot.unreduced:
                slot.check_reduced()

    def take_received(self) -> bool:
        """Return whether any gradient has come since the last call of this method."""
        before, self.has_received = self.has_received, False
        return before

    def reset(self) -> None:
        """Discard an unfinished reduction after waiting for its collectives in flight."""
        if self._round is not None:
            self._round.finish()
            self._round = None


class _SlotReceiver(NamedTuple):
    """The gradient receiver of one parameter."""

    reducer: Reducer
    slot: FlatSlot

    def receive(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Pass a gradient to the reducer."""
        self.reducer.receive(self.slot, local, placements)
