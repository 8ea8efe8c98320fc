"""What an experts module sees while its forward runs on local tensors: its own experts and nothing else.

Parameters become local tensors, ``num_experts`` the number of local experts, and experts that are submodules of other
ranks are not there. Everything is put back when the forward ends, however it ends. Nothing is copied: a local tensor
shares the memory of the parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement

from .. import _torch
from .axes import Axes
from .plan import ExpertLayout

__all__ = ["expert_of", "gradient_placements", "local_shards", "show_local", "show_parameters"]

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


def expert_of(leaf: str) -> str:
    """Return the name of the expert that a parameter of a list of experts belongs to."""
    return leaf.partition(".")[0]


# ------------------------------------------------------------------------------------------------- showing


def show_local(
    module: nn.Module,
    layout: ExpertLayout,
    undo: contextlib.ExitStack,
    *,
    block: range,
    gradients: Mapping[str, Placements],
    silent: frozenset[str],
    absent: bool,
) -> dict[str, Tensor]:
    """Show ``module`` its local experts until ``undo`` is closed.

    Args:
        module: the experts.
        layout: of the plan.
        undo: puts everything back.
        block: this rank's experts.
        gradients: placements of the parameters' gradients, by name.
        silent: names of the parameters that another rank adds.
        absent: whether indices may mean an expert of another rank.

    Returns:
        The local shards of all parameters by name; those of absent experts are empty.
    """
    local: dict[str, Tensor] = {}
    for parts in _experts(module, layout):
        local |= show_parameters(parts, gradients, undo, silent=silent)
    if layout.kind == "modules":
        _keep_children(module, block, undo)
    _show(module, "num_experts", len(block), undo)
    if absent:
        _show(module, EXPERT_PARALLEL_FLAG, True, undo)
    return local


def _experts(module: nn.Module, layout: ExpertLayout) -> Iterable[Iterable[tuple[str, nn.Module]]]:
    """Return what has gradients together: a stack, or each of several submodules; as names and modules of its parts."""
    if layout.kind == "stacked":
        return [[("", module)]]
    return (expert.named_modules(prefix=name) for name, expert in module.named_children())


def show_parameters(
    parts: Iterable[tuple[str, nn.Module]],
    gradients: Mapping[str, Placements],
    undo: contextlib.ExitStack,
    *,
    silent: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """Put local shards in the place of the parameters of some modules until ``undo`` is closed; return them by name.

    If one of them gets a gradient, all do.
    """
    places: dict[str, tuple[dict, str]] = {}
    for owner, part in parts:
        table, _ = _torch.tensor_tables(part)
        undo.callback(table.update, dict(table))
        places.update({f"{owner}.{k}" if owner else k: (table, k) for k, p in table.items() if p is not None})
    whole = [table[key] for table, key in places.values()]
    layouts = [gradients.get(leaf) for leaf in places]
    shown = dict(zip(places, local_shards(whole, layouts, [leaf in silent for leaf in places]), strict=True))
    for leaf, (table, key) in places.items():
        table[key] = shown[leaf]
    return shown


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


# ------------------------------------------------------------------------------------------------- shards


def local_shards(
    parameters: Sequence[Tensor],
    gradients: Sequence[Placements | None],
    silent: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Return this rank's shards of parameters; where one has a gradient, those that nothing used have zeros.

    Args:
        parameters: DTensors, or local shards already; the gradient of each comes back as the one or the other.
        gradients: placements of the gradients of those that are DTensors.
        silent: which of them show negative zeros instead (``x + -0.0`` is ``x`` for every ``x``); the gradient is that
            of the values nevertheless. For what is added once over the axes that cut inner dims: its gradient is that
            of the output, equal on all of them.
    """
    silent = silent or [False] * len(parameters)
    shown = [_shown(*pair) for pair in zip(parameters, silent, strict=True)]
    trained = [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []
    if trained:
        chosen = [parameters[i] for i in trained]
        outputs = _LocalShards.apply([shown[i] for i in trained], [gradients[i] for i in trained], *chosen)
        for i, output in zip(trained, outputs, strict=True):
            shown[i] = output
    return shown


def _shown(parameter: Tensor, silent: bool) -> Tensor:
    local = _torch.local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
    return torch.full_like(local, -0.0) if silent else local


class _LocalShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shown: list[Tensor], gradients: list[Placements | None], *parameters: Tensor) -> tuple:
        pairs = zip(parameters, gradients, strict=True)
        ctx.layouts = [
            (p.device_mesh, placements, p.shape, p.stride()) if isinstance(p, DTensor) else None
            for p, placements in pairs
        ]
        return tuple(local.view_as(local) for local in shown)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_whole(*pair) for pair in zip(grads, ctx.layouts, strict=True))


def _whole(grad: Tensor, layout: tuple | None) -> Tensor:
    if layout is None:
        return grad
    mesh, placements, shape, stride = layout
    return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)
