"""Run experts that the model calls one by one: ``for e in range(n): out += self.experts[e](x[rows of e])``.

Each expert belongs to one rank of the axis. All ranks run the model's loop on the same tokens and call the same
experts; in a call the owner computes and the others receive its output::

    owner       x  ->  expert(x)      -> broadcast -> output
    others      x  ->  expert(x[:1])  -> receive   -> output

On the others the expert's own forward runs on one row, with parameters that take no memory. This gives the shape and
dtype of the output, and raises the same errors. All ranks get the owner's bits, so their control flow stays the same.
In backward the owner's gradient of ``x`` is broadcast.

Two broadcasts per call: for many experts give the block a forward over ``(hidden_states, top_k_index, top_k_weights)``,
which exchanges all tokens at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale.dtensor import random
from vescale.dtensor.extension import waits_of

from .. import _torch
from .._boundary.edges import depend_on
from .._boundary.local_region import refuse_exact
from .._boundary.values import map_tensors
from .._execution.patch import ModulePatch, Row
from ..errors import PlanError
from .axes import axes_of
from .local import from_local, gradient_placements, parameter_rows, to_local
from .plan import ExpertLayout
from .region import RANDOM

__all__ = ["install_list", "listed_gradients"]

GRADIENTS = "_vescale_listed_gradients"


def listed_gradients(module: nn.Module) -> dict[str, tuple[Placement, ...]]:
    """Return the placements of the gradients of a list's parameters, by name inside the list; empty if it is none."""
    return vars(module).get(GRADIENTS, {})


def install_list(module: nn.Module, layout: ExpertLayout, mesh: DeviceMesh) -> None:
    """Let each expert in ``module``, an nn.ModuleList or nn.ModuleDict, run on its own rank."""
    axis = layout.expert_axes[0]
    per_rank = layout.num_experts // mesh.size(axis)
    gradients = gradient_placements(layout, axes_of(layout.expert_axes, (), (Replicate(),) * mesh.ndim))
    vars(module)[GRADIENTS] = gradients
    for position, (key, expert) in enumerate(module.named_children()):
        shapes = {leaf: tuple(parameter.shape) for leaf, parameter in expert.named_parameters()}
        one = _OneExpert(mesh, axis, key, position // per_rank, shapes, gradients)
        expert.register_forward_pre_hook(one.enter, with_kwargs=True)
        expert.register_forward_hook(one.leave, always_call=True)


@dataclass(frozen=True)
class _Call:
    """A running forward: the cleanup at its end, the operands of its output, its input rows."""

    undo: contextlib.ExitStack
    operands: tuple[Tensor, ...]
    hidden: Tensor


class _OneExpert:
    """Hooks of one expert of a list. Copies of the module share it: one of them runs at a time.

    Args:
        mesh: the ranks.
        axis: the mesh axis that experts are spread over.
        key: name of the expert in the list.
        owner: coordinate on the axis of the rank that holds it.
        shapes: shapes of its parameters on one device, by name.
        gradients: placements of the gradients of all experts' parameters.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: int,
        key: str,
        owner: int,
        shapes: dict[str, tuple[int, ...]],
        gradients: dict[str, tuple[Placement, ...]],
    ):
        self.mesh, self.key, self.owner, self.shapes, self.gradients = mesh, key, owner, shapes, gradients
        self.here = mesh.get_local_rank(axis) == owner
        self.group = _torch.flat_group(mesh, (axis,))
        self._running: list[_Call] = []

    def __deepcopy__(self, memo: dict) -> _OneExpert:  # process groups have no copies
        return self

    def enter(self, expert: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook: bring the operands to the owner; the others keep one row of them."""
        refuse_exact(self.key)
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if hidden is None or hidden.ndim == 0:
            raise PlanError(f"expert {self.key!r} of a list: expected a tensor of rows among the arguments, got none")
        if isinstance(hidden, DTensor) and any(not p.is_replicate() for p in hidden.placements):
            raise PlanError(
                f"expert {self.key!r} of a list: expected replicated rows, because routing depends on data, got "
                f"placements {tuple(hidden.placements)}; bring the block's input to Replicate() by a boundary"
            )
        operands: list[Tensor] = []

        def bring(value: Tensor) -> Tensor:
            local = to_local(value, tuple(value.placements), self.mesh) if isinstance(value, DTensor) else value
            if local.ndim == 0 or len(local) != len(hidden):
                raise PlanError(
                    f"expert {self.key!r} of a list: expected tensors of {len(hidden)} rows, got shape "
                    f"{tuple(local.shape)}"
                )
            operands.append(_ToOwner.apply(local, self.here, self.source, self.group))
            return operands[-1]

        args, kwargs = map_tensors(bring, (args, kwargs))
        undo = contextlib.ExitStack()
        if any(isinstance(parameter, DTensor) for parameter in expert.parameters()):
            undo.enter_context(random.forbidden(RANDOM))  # static mode, with local parameters, forbids them itself
        rows = parameter_rows(expert.named_modules(prefix=self.key), self.gradients)
        operands += [shard for _, _, shard in rows.values()]
        undo.enter_context(ModulePatch(rows.values() if self.here else self._without_memory(rows)))
        self._running.append(_Call(undo, tuple(operands), hidden))
        return args, kwargs

    def leave(self, _expert: nn.Module, _args: tuple, output: Tensor | None) -> Tensor | None:
        """Forward hook, called always: give all ranks the owner's output."""
        if not self._running:
            return None
        call = self._running.pop()
        call.undo.close()
        if output is None:  # the forward raised
            return None
        rows = len(call.hidden) if self.here else min(1, len(call.hidden))
        if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != rows:
            raise PlanError(
                f"expert {self.key!r} of a list: expected an output of one tensor with {rows} rows, one per input row"
            )
        output = depend_on(output, *call.operands)
        output = _FromOwner.apply(output, len(call.hidden), self.here, self.source, self.group)
        if not isinstance(call.hidden, DTensor):
            return output
        replicated = (Replicate(),) * self.mesh.ndim
        return from_local(call.hidden, replicated, replicated, self.mesh)(output)

    @property
    def source(self) -> int:
        """The owner's rank in the world."""
        return dist.get_global_rank(self.group, self.owner)

    def _without_memory(self, rows: Mapping[str, Row]) -> Iterator[Row]:
        """Yield rows with zeros of the shapes of one device, which take no memory, in place of the empty shards."""
        for leaf, (table, key, shard) in rows.items():
            yield table, key, shard.new_zeros(()).expand(self.shapes[leaf.removeprefix(f"{self.key}.")])


class _ToOwner(torch.autograd.Function):
    """Rows on the owner, one row on the others; the gradient is the owner's on all of them."""

    @staticmethod
    def forward(ctx, rows: Tensor, here: bool, source: int, group: dist.ProcessGroup) -> Tensor:
        ctx.here, ctx.source, ctx.group, ctx.like = here, source, group, (rows.shape, rows.dtype)
        return rows.view_as(rows) if here else rows[:1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        shape, dtype = ctx.like
        grad = grad.contiguous() if ctx.here else grad.new_empty(shape, dtype=dtype)
        waits_of(ctx.group).run("broadcast", dist.broadcast, grad, ctx.source)
        return grad, None, None, None


class _FromOwner(torch.autograd.Function):
    """The owner's output on all ranks; its gradient, equal on all of them, goes to the owner."""

    @staticmethod
    def forward(ctx, output: Tensor, num_rows: int, here: bool, source: int, group: dist.ProcessGroup) -> Tensor:
        ctx.here, ctx.kept = here, len(output)
        out = output.contiguous() if here else output.new_empty((num_rows, *output.shape[1:]))
        waits_of(group).run("broadcast", dist.broadcast, out, source)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad if ctx.here else grad[: ctx.kept], None, None, None, None
