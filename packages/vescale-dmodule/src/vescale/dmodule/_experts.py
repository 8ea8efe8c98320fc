"""Experts as a local region: each rank runs the module's own forward on its own experts.

Works for modules with the signature ``forward(hidden_states, top_k_index, top_k_weights)`` over stacked expert tensors
``(num_experts, ...)``, the one that Hugging Face's mixture-of-experts models share. Every rank sees all tokens of its
batch and computes those routed to its experts; the sum over ranks is the output of one device:

    index:   experts of other ranks become the sentinel ``num_local_experts``, which the forward skips
    weights: zero at the sentinel
    output:  Partial, reduced to Replicate
    gradients of hidden states and weights: partial sums, reduced where they leave the region

Inside the region the module sees local tensors and its local ``num_experts``; random operators there are refused, because
nothing says where the tokens of an expert lie in a global tensor.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale.dtensor import random

from ._boundary import as_dtensor
from .errors import PlanError

__all__ = ["install_experts"]

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")

# Hugging Face's grouped kernels leave rows at the sentinel uninitialised and mask them only under this flag.
EXPERT_PARALLEL_FLAG = "_is_expert_parallel"


@dataclass
class _Region:
    """Hooks around one experts module; ``open`` holds what must be undone when its forward ends."""

    mesh: DeviceMesh
    axis: int
    signature: inspect.Signature
    open: list[contextlib.ExitStack] = field(default_factory=list)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        bound = self.signature.bind(*args, **kwargs)
        first, count = self._local_experts(module)
        hidden_states, index, weights = (bound.arguments[name] for name in ARGUMENTS)
        index = _plain(index, self.mesh)
        elsewhere = (index < first) | (index >= first + count)
        bound.arguments["hidden_states"] = self._local_input(hidden_states)
        bound.arguments["top_k_index"] = (index - first).masked_fill(elsewhere, count)
        bound.arguments["top_k_weights"] = self._local_input(weights).masked_fill(elsewhere, 0)
        stack = contextlib.ExitStack()
        stack.enter_context(_local_state(module, count))
        stack.enter_context(
            random.forbidden("experts run on local tensors; move the random operator out of the experts")
        )
        self.open.append(stack)
        return bound.args, bound.kwargs

    def leave(self, _module: nn.Module, _args: tuple, output: Tensor | None) -> Tensor | None:
        if self.open:
            self.open.pop().close()
        if output is None:  # the forward raised
            return None
        partial = [Partial() if axis == self.axis else Replicate() for axis in range(self.mesh.ndim)]
        summed = DTensor.from_local(output, self.mesh, partial, run_check=False)
        return summed.redistribute(placements=[Replicate()] * self.mesh.ndim)

    def _local_experts(self, module: nn.Module) -> tuple[int, int]:
        count = module.num_experts // self.mesh.size(self.axis)
        return self.mesh.get_local_rank(self.axis) * count, count

    def _local_input(self, value: Tensor) -> Tensor:
        tensor = value if isinstance(value, DTensor) else as_dtensor(value, self.mesh)
        return _ToRegion.apply(tensor.redistribute(placements=[Replicate()] * self.mesh.ndim), self.axis)


class _ToRegion(torch.autograd.Function):
    """Replicated DTensor -> local tensor; the gradients of all ranks of the axis are summed on the way back."""

    @staticmethod
    def forward(ctx, tensor: DTensor, axis: int) -> Tensor:
        ctx.mesh, ctx.axis = tensor.device_mesh, axis
        return tensor.to_local()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        partial = [Partial() if axis == ctx.axis else Replicate() for axis in range(ctx.mesh.ndim)]
        summed = DTensor.from_local(grad, ctx.mesh, partial, run_check=False)
        return summed.redistribute(placements=[Replicate()] * ctx.mesh.ndim), None


@contextlib.contextmanager
def _local_state(module: nn.Module, num_local_experts: int):
    """Show ``module`` its local parameters and its local number of experts while its forward runs."""
    parameters = dict(module._parameters)
    attributes = {"num_experts": num_local_experts}
    if hasattr(module, EXPERT_PARALLEL_FLAG):
        attributes[EXPERT_PARALLEL_FLAG] = True
    saved = {name: getattr(module, name) for name in attributes}
    module._parameters.update({name: parameter.to_local() for name, parameter in parameters.items()})
    vars(module).update(attributes)
    try:
        yield
    finally:
        module._parameters.update(parameters)
        vars(module).update(saved)


def _plain(index: Tensor, mesh: DeviceMesh) -> Tensor:
    return index.redistribute(placements=[Replicate()] * mesh.ndim).to_local() if isinstance(index, DTensor) else index


def install_experts(module: nn.Module, name: str, placements: tuple[Placement, ...], mesh: DeviceMesh) -> None:
    """Run ``module`` on this rank's experts, on the axis whose placement is ``Shard(0)``.

    Raises:
        PlanError: the forward does not have the experts signature, or parameters sit in submodules.
    """
    signature = inspect.signature(module.forward)
    if any(argument not in signature.parameters for argument in ARGUMENTS):
        raise PlanError(f"expert {name!r}: forward takes {list(signature.parameters)}, expected {list(ARGUMENTS)}")
    nested = [key for key, _ in module.named_parameters() if "." in key]
    if nested:
        raise PlanError(
            f"expert {name!r}: parameter {nested[0]!r} is in a submodule; stacked expert tensors are expected"
        )
    region = _Region(mesh, placements.index(Shard(0)), signature)
    module.register_forward_pre_hook(region.enter, with_kwargs=True)
    module.register_forward_hook(region.leave, always_call=True)
