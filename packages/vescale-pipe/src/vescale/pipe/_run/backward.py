"""The backward of one micro-batch on one stage, and the accumulation of the step's gradients.

Each stage holds one autograd graph per micro-batch. Its roots are the sent values, and the loss on the last stage. Its
inputs are the received values and the stage's parameters. ``run_backward`` receives the gradients of the roots from
later stages, runs ``torch.autograd.grad``, and sends the gradients of the inputs to earlier stages. Parameter gradients
are summed in the order of micro-batches, as in a gradient-accumulation loop.

A value with consumers on several stages adds its gradients in reverse order of the consumers, as in one process.

The sums reach the parameters in the user's ``loss.backward()``; see ``connect``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import graph_task_id, tensor_hooks
from .program import CallKey, CrossingKey, Program
from .transport import BACKWARD, Transport
from .values import PipelineError, TensorMeta, Value, from_local_part, gradient_meta, local_gradient


@dataclass
class Sent:
    """A sent value that requires a gradient."""

    crossing: CrossingKey
    tensor: torch.Tensor
    meta: TensorMeta

    @property
    def peer(self) -> int:
        """The stage that sends the gradient."""
        return self.crossing[1]


@dataclass
class Received:
    """A received value that requires a gradient, to send back to its home."""

    crossing: CrossingKey
    edge: GradientEdge
    meta: TensorMeta
    peer: int
    mesh: DeviceMesh | None


@dataclass
class Boundary:
    """The values that this stage sent and received in one micro-batch, latest consumer first."""

    sent: list[Sent] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)

    def add_sent(self, tensor: torch.Tensor, value: Value, key: CallKey) -> None:
        """Keep a sent value until its backward."""
        self.sent.insert(0, Sent((value.id, key.home), tensor, value.meta))

    def add_received(self, edge: GradientEdge, value: Value, key: CallKey, mesh: DeviceMesh | None) -> None:
        """Keep the graph edge of a received value's gradient until its backward."""
        self.received.insert(0, Received((value.id, key.home), edge, value.meta, value.home, mesh))


class _Receive(torch.autograd.Function):
    """Make a received tensor the output of a graph node, so it can be written in place as in one process."""

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
    """Return a received tensor that requires a gradient, and the graph edge of its gradient."""
    with torch.enable_grad():
        tensor = _Receive.apply(torch.zeros((), requires_grad=True), tensor)
    return tensor, get_gradient_edge(tensor)


class GradientSum:
    """The sum of parameter gradients over micro-batches; None for unused parameters."""

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
            else:  # autograd may return one tensor for two parameters: the first sum allocates a new one
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
        boundary: the values sent and received in the forward.
        loss: the micro-batch's loss divided by the number of micro-batches, on the last stage; None on all others.
        total: the accumulated parameter gradients.
        transport: this stage's communication.
        program: the recorded program.
    """
    roots, root_gradients = ([], []) if loss is None else ([loss], [torch.ones_like(loss)])
    if not program.backward_known:
        _receive_dead_gradients(boundary, transport, program)
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
        _send_dead_gradients(boundary, gradients[:count], transport, program)
        program.backward_known = True
    for received, gradient in zip(boundary.received, gradients[:count], strict=True):
        _send_gradient(received, gradient, transport, program)
    total.add(gradients[count:])


# --- gradients of crossing values ---


def _peers(crossings: Sequence[Sent] | Sequence[Received]) -> list[int]:
    return sorted({crossing.peer for crossing in crossings})


def _receive_dead_gradients(boundary: Boundary, transport: Transport, program: Program) -> None:
    """Receive from later stages, in the first backward, which sent values get no gradient."""
    for peer in _peers(boundary.sent):
        crossings = [sent.crossing for sent in boundary.sent if sent.peer == peer]
        flags = transport.receive_flags(len(crossings), peer)
        program.dead.update(crossing for crossing, dead in zip(crossings, flags, strict=True) if dead)


def _send_dead_gradients(
    boundary: Boundary, gradients: Sequence[torch.Tensor | None], transport: Transport, program: Program
) -> None:
    """Send to earlier stages, in the first backward, which received values get no gradient."""
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
                f"expected no gradient for the value {received.meta} of stage {received.peer}, as in the first "
                "micro-batch, got one; the use of a value for the loss may not depend on the data"
            )
        return
    meta = gradient_meta(received.meta)
    if gradient is None:
        shape, _ = meta.local_layout
        local = torch.zeros(shape, dtype=meta.dtype, device=transport.device_of(meta.device_type))
    else:
        local = local_gradient(gradient, received.meta)
    transport.send(local, received.peer, BACKWARD)


# --- accumulation into the parameters ---


class _Accumulate(torch.autograd.Function):
    """Pass ``grad_output * sum`` to the parameters when the step's loss is differentiated."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gate: HookGate, anchor: torch.Tensor, totals: list, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del anchor, parameters
        ctx.gate = gate
        ctx.save_for_backward(*totals)  # a second backward fails unless retain_graph is set, as in plain torch
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        ctx.gate.graph_task = graph_task_id()
        totals = ctx.saved_tensors
        return None, None, None, None, *(None if total is None else total * gradient for total in totals)


def connect(loss: torch.Tensor, total: GradientSum, gate: HookGate) -> torch.Tensor:
    """Return the step's loss, connected to this stage's parameters by one autograd node.

    ``backward`` then accumulates into the parameters as in plain torch, with post-accumulate hooks and loss scaling.
    """
    anchor = torch.zeros((), requires_grad=True)
    connected: torch.Tensor = _Accumulate.apply(loss, gate, anchor, total.totals, *total.parameters)
    return connected


class HookGate:
    """Keep tensor hooks of parameters (``Parameter.register_hook``) from running again in the user's backward.

    The hooks run in every micro-batch's backward, as in a gradient-accumulation loop. The user's ``loss.backward()``
    passes the finished sum through the same hooks, which must skip it.
    """

    def __init__(self) -> None:
        self.graph_task = -1

    def guard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Wrap the parameters' current hooks; their handles stay valid."""
        for parameter in parameters:
            hooks = tensor_hooks(parameter) or {}
            for key, hook in hooks.items():
                if not isinstance(hook, _GuardedHook):
                    hooks[key] = _GuardedHook(hook, self)


class _GuardedHook:
    """A tensor hook that skips the backward pass of ``_Accumulate``."""

    def __init__(self, hook: Any, gate: HookGate) -> None:
        self._hook = hook
        self._gate = gate

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if graph_task_id() == self._gate.graph_task else self._hook(gradient)
