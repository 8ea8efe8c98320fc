"""The backward of one micro-batch on one stage, and the delivery of the step's gradients.

A stage's part of a micro-batch is a piece of the autograd graph. Its roots are the values that it sent (and the loss,
on the last stage); its inputs are the values that it received and the stage's parameters. ``run_backward`` receives the
gradients of the roots from later stages, runs ``torch.autograd.grad``, and sends the gradients of the inputs to earlier
stages. Parameter gradients are summed in the order of micro-batches, as a gradient-accumulation loop sums them.

A value that several stages received gets its gradients in the order of the consumers, last first: the order in which
one process would add them.

The sums reach the parameters when the user calls ``loss.backward()``: see ``connect``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._program import CallKey, CrossingKey, Program
from ._torch import graph_task_id, tensor_hooks
from ._transport import BACKWARD, Transport
from ._values import (
    PipelineError,
    TensorMeta,
    Value,
    from_local_part,
    gradient_meta,
    laid_out_as_gradient,
)


@dataclass
class Sent:
    """A value that this stage sent and that needs a gradient back."""

    crossing: CrossingKey
    tensor: torch.Tensor
    meta: TensorMeta

    @property
    def peer(self) -> int:
        """The stage that sends the gradient."""
        return self.crossing[1]


@dataclass
class Received:
    """A value that this stage received and owes a gradient for."""

    crossing: CrossingKey
    edge: GradientEdge
    meta: TensorMeta
    peer: int
    mesh: DeviceMesh | None


@dataclass
class Boundary:
    """The values that crossed this stage's border in one micro-batch, latest consumer first when read."""

    sent: list[Sent] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)

    def add_sent(self, tensor: torch.Tensor, value: Value, key: CallKey) -> None:
        """Keep a sent value until its backward."""
        self.sent.insert(0, Sent((value.id, key.home), tensor, value.meta))

    def add_received(self, edge: GradientEdge, value: Value, key: CallKey, mesh: DeviceMesh | None) -> None:
        """Keep the place where a received value's gradient appears."""
        self.received.insert(0, Received((value.id, key.home), edge, value.meta, value.home, mesh))


class _Receive(torch.autograd.Function):
    """Makes a received tensor the output of a graph node, so that code may write to it in place as in one process."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        del anchor
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        del ctx, gradient
        return None, None


def attach(tensor: torch.Tensor) -> tuple[torch.Tensor, GradientEdge]:
    """Return a received tensor that requires a gradient, and the edge where the gradient can be taken."""
    with torch.enable_grad():
        tensor = _Receive.apply(torch.zeros((), requires_grad=True), tensor)
    return tensor, get_gradient_edge(tensor)


class GradientSum:
    """The sum of parameter gradients over micro-batches. Parameters that no micro-batch used have none."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.totals: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._owned = [False] * len(self.parameters)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one micro-batch's gradients, in the order of the parameters."""
        for i, gradient in enumerate(gradients):
            total = self.totals[i]
            if gradient is None:
                continue
            if total is None:
                self.totals[i] = gradient
            elif self._owned[i]:
                total.add_(gradient)
            else:  # autograd may hand out one tensor for two parameters: the first sum makes our own
                self.totals[i] = total + gradient
                self._owned[i] = True


def run_backward(
    boundary: Boundary,
    loss: torch.Tensor | None,
    total: GradientSum,
    *,
    transport: Transport,
    program: Program,
) -> None:
    """Run the backward of one micro-batch on this stage and add its parameter gradients to ``total``.

    Args:
        boundary: what the forward sent and received.
        loss: the micro-batch's part of the step's loss, on the last stage; None elsewhere.
        total: where parameter gradients are added.
    """
    roots, root_gradients = ([], []) if loss is None else ([loss], [torch.ones_like(loss)])
    if not program.backward_known:
        _learn_dead_gradients(boundary, transport, program)
    for sent in boundary.sent:
        if sent.crossing not in program.dead:
            roots.append(sent.tensor)
            root_gradients.append(_receive_gradient(sent, transport))
    inputs: Any = [received.edge for received in boundary.received] + list(total.parameters)
    gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if roots and inputs:
        gradients = torch.autograd.grad(roots, inputs, root_gradients, allow_unused=True)
    count = len(boundary.received)
    if not program.backward_known:
        _announce_dead_gradients(boundary, gradients[:count], transport, program)
        program.backward_known = True
    for received, gradient in zip(boundary.received, gradients[:count], strict=True):
        _send_gradient(received, gradient, transport, program)
    total.add(gradients[count:])


# --- gradients of crossing values ---


def _peers(crossings: Sequence[Sent] | Sequence[Received]) -> list[int]:
    return sorted({crossing.peer for crossing in crossings})


def _learn_dead_gradients(boundary: Boundary, transport: Transport, program: Program) -> None:
    """In the first backward, later stages tell which of the values that they received get no gradient."""
    for peer in _peers(boundary.sent):
        crossings = [sent.crossing for sent in boundary.sent if sent.peer == peer]
        flags = transport.receive_flags(len(crossings), peer)
        program.dead.update(crossing for crossing, dead in zip(crossings, flags, strict=True) if dead)


def _announce_dead_gradients(
    boundary: Boundary, gradients: Sequence[torch.Tensor | None], transport: Transport, program: Program
) -> None:
    dead = {r.crossing for r, gradient in zip(boundary.received, gradients, strict=True) if gradient is None}
    program.dead |= dead
    for peer in _peers(boundary.received):
        transport.send_flags([r.crossing in dead for r in boundary.received if r.peer == peer], peer)


def _receive_gradient(sent: Sent, transport: Transport) -> torch.Tensor:
    meta = gradient_meta(sent.meta)
    device = sent.tensor.device
    local = transport.receive(*meta.local_layout, meta.dtype, device=device, source=sent.peer, direction=BACKWARD)
    return from_local_part(local, meta, sent.tensor.device_mesh if isinstance(sent.tensor, DTensor) else None)


def _send_gradient(received: Received, gradient: torch.Tensor | None, transport: Transport, program: Program) -> None:
    if received.crossing in program.dead:
        if gradient is not None:
            raise PipelineError(
                "a value that got no gradient in the first micro-batch gets one now, which the earlier stage does not "
                "expect: whether a value is used for the loss may not depend on the data"
            )
        return
    meta = gradient_meta(received.meta)
    if gradient is None:
        shape, _ = meta.local_layout
        local = torch.zeros(shape, dtype=meta.dtype, device=transport.device_of(meta.device_type))
    else:
        local = laid_out_as_gradient(gradient, received.meta)
    transport.send(local, received.peer, BACKWARD)


# --- delivery ---


class _Deliver(torch.autograd.Function):
    """Hands ``grad_output * sum`` to the parameters when the step's loss is differentiated."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gate: HookGate, anchor: torch.Tensor, totals: list, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del anchor, parameters
        ctx.gate = gate
        ctx.save_for_backward(*totals)  # so that a second backward fails, or works with retain_graph, as always
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        ctx.gate.delivering = graph_task_id()
        totals = ctx.saved_tensors
        return None, None, None, None, *(None if total is None else total * gradient for total in totals)


def connect(loss: torch.Tensor, total: GradientSum, gate: HookGate) -> torch.Tensor:
    """Return the step's loss, connected to this stage's parameters by one node of the autograd graph.

    ``backward`` then reaches the parameters as always: accumulation, post-accumulate hooks and loss scaling included.
    """
    return _Deliver.apply(loss, gate, torch.zeros((), requires_grad=True), total.totals, *total.parameters)


class HookGate:
    """Keeps hooks on parameters (``Parameter.register_hook``) from running a second time at delivery.

    They run in every micro-batch's backward, as in a gradient-accumulation loop. The delivery passes the finished sum
    through the same place, where they must not act again.
    """

    def __init__(self) -> None:
        self.delivering = -1

    def guard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Wrap the hooks that the parameters have now; their handles stay valid."""
        for parameter in parameters:
            hooks = tensor_hooks(parameter) or {}
            for key, hook in hooks.items():
                if not isinstance(hook, _GuardedHook):
                    hooks[key] = _GuardedHook(hook, self)


class _GuardedHook:
    """A tensor hook that does nothing in the backward pass that delivers."""

    def __init__(self, hook: Any, gate: HookGate) -> None:
        self._hook = hook
        self._gate = gate

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if graph_task_id() == self._gate.delivering else self._hook(gradient)
