"""Gradients of local leaves become those of the DTensor parameters that the leaves stand in for.

Static mode computes with plain leaves. Autograd accumulates into them, and a hook of each takes the gradient away::

    backward           leaf.grad   leaf.grad   ...   end of the pass
    a hook of each     collected   collected   ...   whole ones        ->  parameter.grad, all in a row
                                                     summands of ranks ->  their bucket, reduced, parameter.grad

A hook runs between the kernels of backward, with cold caches, so it does next to nothing; what is left takes a third of
the time when it is done for all parameters in a row. These gradients do not wait for the end of the pass:

- summands of buckets that leave earlier, to overlap with backward (all but the last one);
- gradients that are added to those of an earlier pass: they are freed at once;
- gradients with a history (``create_graph``), and summands inside of ``no_sync``.

Autograd also calls the hooks of a leaf that got nothing: the gradient of a function's argument may be None.

What a pass that failed has collected is dropped when the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from .backward_pass import Pass
from .flat import Bucket, Slot

__all__ = ["Arriving", "Delivery", "Receiver", "hooks_of"]

Hook = Callable[[Tensor], None]


class Receiver(Protocol):
    """What takes the gradients of parameters, a :class:`GradientSync`.

    Attributes:
        synchronises: whether sums are reduced at the end of a pass.
    """

    synchronises: bool

    def add(self, parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> None:
        """Add this rank's part of a gradient to ``.grad``."""

    def pass_of(self, number: int) -> Pass:
        """Return what a running backward pass has collected."""


class Delivery(NamedTuple):
    """How the gradients of one local leaf come.

    Attributes:
        slot: of the parameter.
        parameter: the DTensor.
        placements: what a local gradient is to the whole one.
        bucket: where it is summed, if it is.
        fits: whether it has the placements of the parameter.
    """

    slot: Slot
    parameter: DTensor
    placements: tuple[Placement, ...]
    bucket: Bucket | None
    fits: bool


class Arriving:
    """Where the hooks of local leaves leave gradients while a backward pass runs.

    Attributes:
        number: of the pass, in torch's count.
        whole: takes (parameter, layout, local gradient).
        summands: takes (slot, bucket, placements, local gradient).
    """

    __slots__ = ("number", "receiver", "summands", "whole")

    def __init__(self, receiver: Receiver):
        self.receiver, self.number = receiver, -1
        self.whole: list[tuple] | _AtOnce = []
        self.summands: list[tuple] | _AtOnce = []

    def begin(self, number: int, parameter: DTensor) -> None:
        """Collect for another pass; ``parameter`` is the first that gets a gradient in it."""
        receiver, has_history = self.receiver, torch.is_grad_enabled()
        running = receiver.pass_of(number)
        self.number = number
        accumulates = parameter.grad is not None
        self.whole = _AtOnce(receiver) if has_history or accumulates else running.whole
        self.summands = _AtOnce(receiver) if has_history or not receiver.synchronises else running.summands


class _AtOnce:
    """In place of the lists: hands every gradient on as it comes."""

    def __init__(self, receiver: Receiver):
        self.receiver = receiver

    def append(self, arrival: tuple) -> None:
        if len(arrival) == 3:
            parameter, _, local = arrival
            self.receiver.add(parameter, local, parameter.placements)
        else:
            slot, _, placements, local = arrival
            self.receiver.add(slot.parameter, local, placements)


def hooks_of(arriving: Arriving, deliveries: Sequence[Delivery]) -> list[Hook]:
    """Return the post-accumulate hooks of leaves. All ranks must call this alike: it decides what waits.

    The summands of the bucket that leaves last wait for the end of a pass, which is when the last of them has come.
    """
    buckets = [delivery.bucket for delivery in deliveries if delivery.bucket is not None]
    last = max(buckets, key=lambda bucket: bucket.order, default=None)
    if last is not None:
        last.waits = True
    return [_hook(arriving, delivery) for delivery in deliveries]


def _hook(arriving: Arriving, delivery: Delivery) -> Hook:
    slot, parameter, placements, bucket, fits = delivery
    number, begin = _torch.backward_number, arriving.begin
    layout = _torch.layout_of(parameter)

    def take_whole(leaf: Tensor) -> None:
        local = leaf.grad
        if local is None:
            return
        if arriving.number != number():
            begin(number(), parameter)
        arriving.whole.append((parameter, layout, local))
        leaf.grad = None

    def take_summand(leaf: Tensor) -> None:
        local = leaf.grad
        if local is None:
            return
        if arriving.number != number():
            begin(number(), parameter)
        arriving.summands.append((slot, bucket, placements, local))
        leaf.grad = None

    def take_at_once(leaf: Tensor) -> None:
        local, receiver = leaf.grad, arriving.receiver
        if local is None:
            return
        leaf.grad = None
        if bucket is None or local.requires_grad or not receiver.synchronises:
            receiver.add(parameter, local, placements)
        else:
            receiver.pass_of(number()).add(slot, bucket, local)

    if fits:
        return take_whole
    return take_summand if bucket is not None and bucket.waits else take_at_once
