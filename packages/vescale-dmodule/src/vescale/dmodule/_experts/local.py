"""The local tensors of an experts' region: its operands, and its experts.

Operands are unwrapped to this rank's tokens and the output is wrapped again, differentiably. While the forward runs, a
patch is in the module: parameters are local tensors, ``num_experts`` is the number of local experts, and submodules are
this rank's experts only. No value is copied: a local tensor shares the memory of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .. import _torch
from .._boundary.convert import as_dtensor
from .._boundary.edges import local_shards, unwrapped, wrapped
from .._execution.patch import Row
from .axes import Axes, is_cut
from .plan import ExpertLayout

__all__ = [
    "expert_of",
    "from_local",
    "gradient_placements",
    "layout_of_tokens",
    "local_rows",
    "parameter_rows",
    "to_local",
]

# Hugging Face's grouped kernels leave rows of absent experts uninitialized and mask them only under this flag.
EXPERT_PARALLEL_FLAG = "_is_expert_parallel"

Placements = tuple[Placement, ...]


# ------------------------------------------------------------------------------------------------- operands


def layout_of_tokens(hidden: Tensor, mesh: DeviceMesh) -> Placements:
    """Return the placements in which the region takes the tokens of ``hidden``, (..., hidden).

    Those of ``hidden``, but replicated on axes where the hidden dim is sharded or values are partial sums; there
    :func:`to_local` communicates. A plain tensor is equal on all ranks.
    """
    if not isinstance(hidden, DTensor):
        return (Replicate(),) * mesh.ndim
    last = hidden.ndim - 1
    return tuple(p if is_cut(p) and getattr(p, "dim", last) < last else Replicate() for p in hidden.placements)


def to_local(value: Tensor, tokens: Placements, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of ``value`` in the layout ``tokens``. Its gradient comes in that layout."""
    tensor = value if isinstance(value, DTensor) else as_dtensor(value, mesh)
    if tuple(tensor.placements) != tokens:
        tensor = tensor.redistribute(placements=tokens)
    return unwrapped(tensor, tokens)


def from_local(
    hidden: Tensor, placements: Placements, grad_placements: Placements, mesh: DeviceMesh
) -> Callable[[Tensor], DTensor]:
    """Return a function that makes a DTensor of an output, whose tokens are those of ``hidden``."""

    def wrap(output: Tensor) -> DTensor:
        shape = (*hidden.shape[:-1], output.shape[-1])
        return wrapped(output, mesh, placements, shape=shape, gradient=grad_placements)

    return wrap


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


# ------------------------------------------------------------------------------------------------- experts


def local_rows(
    module: nn.Module,
    layout: ExpertLayout,
    *,
    block: range,
    gradients: Mapping[str, Placements],
    silent: frozenset[str],
    absent: bool,
) -> tuple[list[Row], dict[str, Tensor]]:
    """Return the rows that put this rank's experts into ``module``, and the local shards of all parameters by name.

    The shards of the experts of other ranks are empty.

    Args:
        module: the experts.
        layout: from the plan.
        block: this rank's experts.
        gradients: placements of the parameters' gradients, by name.
        silent: names of the parameters that another rank adds.
        absent: whether indices may mean an expert of another rank.
    """
    parameters: dict[str, Row] = {}
    for parts in _experts(module, layout):
        parameters |= parameter_rows(parts, gradients, silent=silent)
    rows = list(parameters.values())
    if layout.kind == "modules":
        rows.append((vars(module), _torch.CHILDREN, _children(module, block)))
    changes = {"num_experts": len(block)} | ({EXPERT_PARALLEL_FLAG: True} if absent else {})
    rows += [(vars(module), name, value) for name, value in changes.items() if name in vars(module)]
    return rows, {leaf: shard for leaf, (_, _, shard) in parameters.items()}


def _experts(module: nn.Module, layout: ExpertLayout) -> Iterable[Iterable[tuple[str, nn.Module]]]:
    """Return the groups of modules that get gradients together: a stack, or each submodule; as names and modules."""
    if layout.kind == "stacked":
        return [[("", module)]]
    return (expert.named_modules(prefix=name) for name, expert in module.named_children())


def parameter_rows(
    parts: Iterable[tuple[str, nn.Module]],
    gradients: Mapping[str, Placements],
    *,
    silent: frozenset[str] = frozenset(),
) -> dict[str, Row]:
    """Return the rows that replace the parameters of some modules by local shards, by name of the parameter.

    If one of the shards gets a gradient, all do.
    """
    places: dict[str, tuple[dict, str]] = {}
    for owner, part in parts:
        table, _ = _torch.tensor_tables(part)
        places.update({f"{owner}.{k}" if owner else k: (table, k) for k, p in table.items() if p is not None})
    parameters = [table[key] for table, key in places.values()]
    layouts = [gradients.get(leaf) for leaf in places]
    shards = local_shards(parameters, layouts, [leaf in silent for leaf in places])
    return {leaf: (*place, shard) for (leaf, place), shard in zip(places.items(), shards, strict=True)}


def _children(module: nn.Module, kept: range) -> dict[str, nn.Module]:
    """Return the children of a container at the positions ``kept``; a list numbers them from 0."""
    children = list(vars(module)[_torch.CHILDREN].items())
    is_list = isinstance(module, nn.ModuleList)
    return {str(number) if is_list else children[at][0]: children[at][1] for number, at in enumerate(kept)}
