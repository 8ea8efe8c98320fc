"""What an experts module sees while its forward runs on local tensors: its own experts and nothing else.

Parameters become local tensors, ``num_experts`` the number of local experts, and experts that are submodules of other
ranks are not there. Everything is put back when the forward ends, however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement

from .. import _torch
from ._axes import Axes
from ._entry import ExpertLayout

__all__ = ["expert_of", "gradient_placements", "local_shard", "local_state"]

# Hugging Face's grouped kernels leave rows of absent experts uninitialised and mask them only under this flag.
EXPERT_PARALLEL_FLAG = "_is_expert_parallel"

Placements = tuple[Placement, ...]


def gradient_placements(layout: ExpertLayout, axes: Axes) -> dict[str, Placements]:
    """Return the placements in which the region leaves the gradients of its parameters.

    Those of the parameter, but a partial sum on the axes over which the experts are replicated and the tokens are not.
    """
    return {
        leaf: tuple(Partial() if axis in axes.data else p for axis, p in enumerate(placements))
        for leaf, placements in layout.parameters.items()
    }


@contextlib.contextmanager
def local_state(
    module: nn.Module, layout: ExpertLayout, *, block: int, num_local: int, axes: Axes, first: bool, absent: bool
) -> Iterator[dict[str, Tensor]]:
    """Show ``module`` its local experts while its forward runs.

    Args:
        module: the experts.
        layout: of the plan.
        block: which block of experts is this rank's.
        num_local: experts in it.
        axes: what the mesh axes do in this call.
        first: whether this rank is the first of the axes that cut inner dims.
        absent: whether indices may mean an expert of another rank.

    Yields:
        The local shards of all parameters by name; those of absent experts are empty.
    """
    grads, local = gradient_placements(layout, axes), {}
    with contextlib.ExitStack() as undo:
        for owner, part in module.named_modules():
            table, _ = _torch.tensor_tables(part)
            shown = {}
            for key, parameter in table.items():
                if parameter is not None:
                    leaf = f"{owner}.{key}" if owner else key
                    shown[key] = local_shard(parameter, grads[leaf], visible=first or leaf not in layout.once)
                    local[leaf] = shown[key]
            undo.callback(table.update, dict(table))
            table.update(shown)
        if layout.kind == "modules":
            _keep_children(module, range(block * num_local, (block + 1) * num_local), undo)
        _show(module, "num_experts", num_local, undo)
        if absent:
            _show(module, EXPERT_PARALLEL_FLAG, True, undo)
        yield local


def expert_of(leaf: str) -> str:
    """Return the name of the expert that a parameter of a list of experts belongs to."""
    return leaf.partition(".")[0]


def _keep_children(module: nn.Module, kept: range, undo: contextlib.ExitStack) -> None:
    """Let a container hold only the children at the positions ``kept``; a list numbers them from 0."""
    children = _torch.module_table(module)
    whole = dict(children)

    def restore() -> None:
        children.clear()
        children.update(whole)

    undo.callback(restore)
    names = list(whole)
    children.clear()
    listed = isinstance(module, nn.ModuleList)
    children.update({str(i) if listed else names[p]: whole[names[p]] for i, p in enumerate(kept)})


def _show(module: nn.Module, name: str, value: object, undo: contextlib.ExitStack) -> None:
    if name in vars(module):
        undo.callback(vars(module).__setitem__, name, vars(module)[name])
        vars(module)[name] = value


def local_shard(parameter: Tensor, grad_placements: Placements, *, visible: bool = True) -> Tensor:
    """Return this rank's shard of a parameter; its gradient is zero, not missing, where nothing used it.

    Args:
        parameter: a DTensor, or a local shard already; its gradient comes back as the one or the other.
        grad_placements: of the gradient, if it is a DTensor.
        visible: False shows zeros instead; the gradient is that of the values nevertheless. For what is added once over
            the axes that cut inner dims: its gradient is that of the output, equal on all of them.
    """
    return _LocalShard.apply(parameter, grad_placements, visible)


class _LocalShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: Tensor, grad_placements: Placements, visible: bool) -> Tensor:
        ctx.global_tensor = None
        local = parameter
        if isinstance(parameter, DTensor):
            ctx.global_tensor = parameter.device_mesh, grad_placements, parameter.shape, parameter.stride()
            local = parameter.to_local()
        return local.view_as(local) if visible else torch.zeros_like(local)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.global_tensor is None:
            return grad, None, None
        mesh, placements, shape, stride = ctx.global_tensor
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride), None, None
