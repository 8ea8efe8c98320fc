"""Experts as a local region: each rank runs the module's own forward on its own experts.

Works for modules with the signature ``forward(hidden_states, top_k_index, top_k_weights)`` over stacked expert tensors
``(num_experts, ...)``, the one that Hugging Face's mixture-of-experts models share. Every rank sees all tokens of its
batch and computes those routed to its experts; the sum over ranks is the output of one device:

    index:   experts of other ranks become the sentinel ``num_local_experts``, which the forward skips
    weights: zero at the sentinel
    output:  Partial, reduced to Replicate
    gradients of hidden states and weights: partial sums, reduced where they leave the region

Inside the region the module sees local tensors and its local ``num_experts``; random operators there are refused,
because nothing says where the tokens of an expert lie in a global tensor.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale.dtensor import random

from . import _torch
from ._boundary import as_dtensor
from ._placements import MeshAxes
from .errors import PlanError

__all__ = ["check_experts", "install_experts"]

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")

# Hugging Face's grouped kernels leave rows at the sentinel uninitialised and mask them only under this flag.
EXPERT_PARALLEL_FLAG = "_is_expert_parallel"


# ------------------------------------------------------------------------------------------------- checks


def check_experts(name: str, module: nn.Module, placements: tuple[Placement, ...], mesh: MeshAxes) -> None:
    """Check that ``module`` is a stack of experts that divides over one axis of the mesh.

    Raises:
        PlanError: placements other than one ``Shard(0)``, experts that do not divide, tensors without an expert dim, or
            another signature.
    """
    if not _is_expert_axis(placements):
        raise PlanError(f"expert {name!r}: exactly one axis must hold Shard(0), the expert dim; got {placements}")
    num_experts, num_ranks = getattr(module, "num_experts", None), mesh.size(placements.index(Shard(0)))
    if not isinstance(num_experts, int):
        kind = type(module).__name__
        raise PlanError(f"expert {name!r}: {kind} has no integer attribute num_experts, so it is no stack of experts")
    if num_experts % num_ranks:
        raise PlanError(
            f"expert {name!r}: {num_experts} experts do not divide over {num_ranks} ranks of the axis; "
            f"use a degree that divides {num_experts}"
        )
    parameters = inspect.signature(module.forward).parameters
    if any(argument not in parameters for argument in ARGUMENTS):
        raise PlanError(f"expert {name!r}: forward takes {list(parameters)}, expected {list(ARGUMENTS)}")
    for key, tensor in module.named_parameters():
        if "." in key:
            raise PlanError(f"expert {name!r}: parameter {key!r} is in a submodule; expected stacked expert tensors")
        if tensor.ndim == 0 or tensor.shape[0] != num_experts:
            raise PlanError(
                f"expert {name!r}: parameter {key!r} of shape {tuple(tensor.shape)} has no leading dim of {num_experts}"
            )
    for key, buffer in module.named_buffers():
        if buffer.ndim and buffer.shape[0] == num_experts:
            raise PlanError(f"expert {name!r}: buffer {key!r} holds a value per expert, which is not supported")


def _is_expert_axis(placements: tuple[Placement, ...]) -> bool:
    return placements.count(Shard(0)) == 1 and placements.count(Replicate()) == len(placements) - 1


# ------------------------------------------------------------------------------------------------- execution


def install_experts(module: nn.Module, placements: tuple[Placement, ...], mesh: DeviceMesh) -> None:
    """Run ``module`` on this rank's experts, on the axis whose placement is ``Shard(0)``. It was checked before."""
    axis = placements.index(Shard(0))
    signature = inspect.signature(module.forward)
    # What must be undone when the forward ends. A module and its copies share it: one of them runs at a time.
    running: list[tuple[contextlib.ExitStack, tuple[Tensor, ...]]] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        bound = signature.bind(*args, **kwargs)
        count = module.num_experts // mesh.size(axis)
        first = mesh.get_local_rank(axis) * count
        hidden_states, index, weights = (bound.arguments[name] for name in ARGUMENTS)
        index = _replicated(index, mesh).to_local()
        elsewhere = (index < first) | (index >= first + count)
        bound.arguments["hidden_states"] = _ToRegion.apply(_replicated(hidden_states, mesh), axis)
        bound.arguments["top_k_index"] = (index - first).masked_fill(elsewhere, count)
        bound.arguments["top_k_weights"] = _ToRegion.apply(_replicated(weights, mesh), axis).masked_fill(elsewhere, 0)
        stack = contextlib.ExitStack()
        parameters = stack.enter_context(_local_state(module, count))
        stack.enter_context(random.forbidden("experts run on local tensors; move the random operator out of them"))
        running.append((stack, (bound.arguments["hidden_states"], bound.arguments["top_k_weights"], *parameters)))
        return bound.args, bound.kwargs

    def leave(_module: nn.Module, _args: tuple, output: Tensor | None) -> Tensor | None:
        stack, operands = running.pop() if running else (contextlib.ExitStack(), ())
        stack.close()
        # None: the forward raised
        return None if output is None else _summed(_Join.apply(output, *operands), mesh, axis)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


class _ToRegion(torch.autograd.Function):
    """Replicated DTensor -> local tensor; the gradients of all ranks of the axis are summed on the way back."""

    @staticmethod
    def forward(ctx, tensor: DTensor, axis: int) -> Tensor:
        ctx.mesh, ctx.axis = tensor.device_mesh, axis
        return tensor.to_local()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        return _summed(grad, ctx.mesh, ctx.axis), None


class _LocalShard(torch.autograd.Function):
    """A parameter's local shard; unlike with ``to_local``, its gradient is zero where nothing used it (``_Join``)."""

    @staticmethod
    def forward(ctx, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        return parameter.to_local()

    @staticmethod
    def backward(ctx, grad: Tensor) -> DTensor:
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False)


class _Join(torch.autograd.Function):
    """Identity of the output that depends on all inputs and parameters of the region, with no gradient.

    A rank whose experts got no token does not use them. Without this, the backward of its inputs would not run there,
    while the other ranks wait in its reduction; and its parameters would have no gradient, where on one device the
    tensor of all experts has one that is zero for these, and the optimizer updates them.
    """

    @staticmethod
    def forward(ctx, output: Tensor, *operands: Tensor) -> Tensor:
        ctx.num_operands = len(operands)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.num_operands)


def _summed(local: Tensor, mesh: DeviceMesh, axis: int) -> DTensor:
    """Return the sum over the ranks of ``axis`` as a replicated DTensor."""
    partial = [Partial() if a == axis else Replicate() for a in range(mesh.ndim)]
    return DTensor.from_local(local, mesh, partial, run_check=False).redistribute(placements=[Replicate()] * mesh.ndim)


def _replicated(value: Tensor, mesh: DeviceMesh) -> DTensor:
    tensor = value if isinstance(value, DTensor) else as_dtensor(value, mesh)
    return tensor.redistribute(placements=[Replicate()] * mesh.ndim)


@contextlib.contextmanager
def _local_state(module: nn.Module, num_local_experts: int) -> Iterator[tuple[Tensor, ...]]:
    """Show ``module`` its local parameters and its local number of experts while its forward runs."""
    parameters, _ = _torch.tensor_tables(module)
    attributes: dict[str, object] = {"num_experts": num_local_experts}
    if hasattr(module, EXPERT_PARALLEL_FLAG):
        attributes[EXPERT_PARALLEL_FLAG] = True
    whole, saved = dict(parameters), {name: getattr(module, name) for name in attributes}
    local = {name: _LocalShard.apply(p) for name, p in whole.items() if p is not None}
    parameters.update(local)
    vars(module).update(attributes)
    try:
        yield tuple(local.values())
    finally:
        parameters.update(whole)
        vars(module).update(saved)
