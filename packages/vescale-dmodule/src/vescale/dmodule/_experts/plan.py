"""Check the expert entries of a plan and turn them into placements of every parameter.

Three kinds of modules hold experts::

    stacked   forward(hidden_states, top_k_index, top_k_weights) over tensors (num_experts, ...)
    modules   the same forward over submodules, one per expert: a ModuleList with a forward of its own
    list      an nn.ModuleList or nn.ModuleDict whose items the model calls one by one: experts[i](x)

The entry is ``{axis: Shard(0)}`` for all three. Stacked tensors are cut in their expert dim, so one or several axes may
hold ``Shard(0)``: on several, experts are folded over them. Each submodule is on one rank, as ragged shards of
which one rank holds everything.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale.dtensor import RaggedShard
from vescale.dtensor.extension import checked

from .._plan.placements import MeshAxes, normalize, on_shape
from ..errors import PlanError
from .allocate import ExpertAllocator, StaticAllocator
from .axes import is_cut
from .dispatch import AllToAll, TokenDispatcher

__all__ = ["ExpertLayout", "Experts", "plan_experts"]

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
# Signature of models whose forward does not skip indices that mean "no expert".
OTHER_ARGUMENTS = (("hidden_states", "router_indices", "routing_weights"),)

Placements = tuple[Placement, ...]


@checked
@dataclass(frozen=True)
class Experts:
    """An entry of the "expert" section with options.

    Attributes:
        placements: ``Shard(0)``, the expert dim, on one or several axes; on the others experts are replicated.
        parameters: for expert tensor parallelism, placements of the parameters that are cut in an inner dim too, by a
            regex of their names inside the module. Axes that it does not name are as in ``placements``.
        once: regexes of the parameters that are added after the sum over such an axis, such as the bias of the last
            projection, and must be added once. Other parameters that the axis does not cut would be refused.
        arguments: names of the forward's arguments for hidden states, indices and weights, if they are others than
            ``hidden_states, top_k_index, top_k_weights``.
        skips_absent: whether the forward gets all tokens and skips the index ``num_experts``, which stands for experts
            of other ranks; else it gets only its tokens, and the host waits for their number. By default True where
            waiting is a cost, if the arguments have the names above: models with these names skip it.
        partial_output: leave the sum over ranks with the same tokens to the next boundary. The output is a partial sum,
            and operators until there must keep it one, as a reshape does. A boundary that shards the output then takes
            a reduce-scatter in place of an all-reduce.
        allocator: which rank holds which expert; changes take effect in :func:`rebalance_experts`.
        dispatcher: exchanges tokens.

    Example:
        >>> Experts({"ep": Shard(0)}, parameters={"down_proj": {"etp": Shard(2)}}).parameters
        {'down_proj': {'etp': Shard(dim=2)}}
    """

    placements: Mapping[str, Placement] | Sequence[Placement]
    parameters: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    once: Sequence[str] = ()
    arguments: tuple[str, str, str] | None = None
    skips_absent: bool | None = None
    partial_output: bool = False
    allocator: ExpertAllocator = field(default_factory=StaticAllocator)
    dispatcher: TokenDispatcher = field(default_factory=AllToAll)


@dataclass(frozen=True)
class ExpertLayout:
    """An entry matched with its module: pure data, the same on every rank.

    Attributes:
        kind: "stacked", "modules" or "list".
        num_experts: on all ranks together.
        expert_axes: mesh axes that cut the expert dim, in their order.
        inner_axes: mesh axes that cut inner dims.
        parameters: placements of every parameter, by name inside the module.
        once: names of the parameters that only the first rank of the inner axes adds.
        arguments: names of the forward's arguments; empty for "list".
        skips_absent: see :class:`Experts`.
        partial_output: see :class:`Experts`.
        allocator: strategy.
        dispatcher: strategy.
    """

    kind: str
    num_experts: int
    expert_axes: tuple[int, ...]
    inner_axes: tuple[int, ...]
    parameters: dict[str, Placements]
    once: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ARGUMENTS
    skips_absent: bool | None = None
    partial_output: bool = False
    allocator: ExpertAllocator = field(default_factory=StaticAllocator)
    dispatcher: TokenDispatcher = field(default_factory=AllToAll)

    def __str__(self) -> str:
        # The text is compared between ranks: a repr that is not made of values holds an address.
        strategies = [
            repr(strategy) if is_dataclass(strategy) else type(strategy).__name__
            for strategy in (self.allocator, self.dispatcher)
        ]
        cut = f"experts on axes {self.expert_axes}, inner dims on {self.inner_axes}, once {sorted(self.once)}"
        options = f"skips absent {self.skips_absent}, partial output {self.partial_output}"
        return f"{self.kind} of {self.num_experts}, {cut}, {options}, {', '.join(strategies)}, {self.parameters}"


def plan_experts(name: str, module: nn.Module, entry: object, mesh: MeshAxes) -> ExpertLayout:
    """Match an entry of the "expert" section with its module.

    Raises:
        PlanError: placements that cut no expert dim or another one, experts that do not divide, tensors without an
            expert dim, another signature, inner dims that are cut in a parameter and not in another.
    """
    where = f"expert {name!r}"
    entry = entry if isinstance(entry, Experts) else Experts(entry)
    placements = normalize(entry.placements, mesh, where)
    expert_axes = _expert_axes(where, placements, only_inner=bool(entry.parameters))
    kind = _kind(module)
    num_experts = _count(where, module, kind)
    num_ranks = math.prod(mesh.size(axis) for axis in expert_axes)
    if num_experts % num_ranks:
        raise PlanError(
            f"{where}: {num_experts} experts do not divide over {num_ranks} ranks of the axis; "
            f"use a degree that divides {num_experts}"
        )
    arguments = () if kind == "list" else _arguments(where, module, entry.arguments)
    if kind == "stacked":
        _check_stacked(where, module, num_experts)
    else:
        _check_modules(where, module, kind, entry, expert_axes)
    parameters = {leaf: placements for leaf, _ in module.named_parameters()}
    if kind != "stacked":
        parameters = _on_owners(module, placements, expert_axes[0], mesh)
    inner_axes = _place_inner(where, module, kind, entry, mesh, parameters)
    return ExpertLayout(
        kind=kind,
        num_experts=num_experts,
        expert_axes=expert_axes,
        inner_axes=inner_axes,
        parameters=parameters,
        once=_once(where, entry, parameters, inner_axes),
        arguments=arguments,
        skips_absent=False if entry.skips_absent is None and arguments != ARGUMENTS else entry.skips_absent,
        partial_output=entry.partial_output,
        allocator=entry.allocator,
        dispatcher=entry.dispatcher,
    )


# ------------------------------------------------------------------------------------------------- kinds


def _expert_axes(where: str, placements: Placements, *, only_inner: bool) -> tuple[int, ...]:
    axes = tuple(axis for axis, placement in enumerate(placements) if placement == Shard(0))
    if (not axes and not only_inner) or placements.count(Replicate()) != len(placements) - len(axes):
        raise PlanError(
            f"{where}: one or several axes must hold Shard(0), the expert dim, the others Replicate(); got {placements}"
        )
    return axes


def _kind(module: nn.Module) -> str:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return "stacked"
    return "list" if type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward) else "modules"


def _count(where: str, module: nn.Module, kind: str) -> int:
    if kind != "stacked":
        return len(module)
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int):
        kind = type(module).__name__
        raise PlanError(f"{where}: {kind} has no integer attribute num_experts, so it is no stack of experts")
    return num_experts


def _arguments(where: str, module: nn.Module, given: tuple[str, str, str] | None) -> tuple[str, ...]:
    taken = inspect.signature(module.forward).parameters
    known = [tuple(given)] if given else [ARGUMENTS, *OTHER_ARGUMENTS]
    for arguments in known:
        if all(argument in taken for argument in arguments):
            return arguments
    raise PlanError(f"{where}: forward takes {list(taken)}, expected {list(known[0])}")


def _check_stacked(where: str, module: nn.Module, num_experts: int) -> None:
    for key, tensor in module.named_parameters():
        if "." in key:
            raise PlanError(f"{where}: parameter {key!r} is in a submodule; expected stacked expert tensors")
        if tensor.ndim == 0 or tensor.shape[0] != num_experts:
            raise PlanError(
                f"{where}: parameter {key!r} of shape {tuple(tensor.shape)} has no leading dim of {num_experts}"
            )
    for key, buffer in module.named_buffers():
        if buffer.ndim and buffer.shape[0] == num_experts:
            raise PlanError(f"{where}: buffer {key!r} holds a value per expert, which is not supported")


# ------------------------------------------------------------------------------------------------- experts as modules


def _check_modules(where: str, module: nn.Module, kind: str, entry: Experts, expert_axes: tuple[int, ...]) -> None:
    if len(expert_axes) != 1:
        raise PlanError(
            f"{where}: experts that are submodules go over one axis; Shard(0) is on {len(expert_axes)} axes"
        )
    if not isinstance(entry.allocator, StaticAllocator):
        raise PlanError(
            f"{where}: {type(entry.allocator).__name__} moves stacked experts; submodules stay where they are"
        )
    if kind == "list" and (entry.parameters or entry.once):
        raise PlanError(f"{where}: expert tensor parallelism needs a forward over {list(ARGUMENTS)}, not a plain list")
    for key, tensor in module.named_parameters():
        if "." not in key:
            raise PlanError(f"{where}: parameter {key!r} belongs to no expert; make all experts submodules")
        if tensor.ndim == 0:
            raise PlanError(f"{where}: parameter {key!r} has no dim; expected 1 dim or more")
    for key, _ in module.named_buffers():
        raise PlanError(
            f"{where}: buffer {key!r} is in an expert, which is not supported for experts that are submodules"
        )


def _on_owners(module: nn.Module, placements: Placements, axis: int, mesh: MeshAxes) -> dict[str, Placements]:
    """Return placements of the parameters of experts that are submodules: all of one expert on one rank of ``axis``."""
    num_ranks, found = mesh.size(axis), {}
    per_rank = len(module) // num_ranks
    for position, (key, expert) in enumerate(module.named_children()):
        owner = position // per_rank
        units = tuple(int(rank == owner) for rank in range(num_ranks))
        ragged = tuple(RaggedShard((0,), units) if a == axis else p for a, p in enumerate(placements))
        found.update({f"{key}.{leaf}": ragged for leaf, _ in expert.named_parameters()})
    return found


# ------------------------------------------------------------------------------------------------- inner dims


def _place_inner(
    where: str, module: nn.Module, kind: str, entry: Experts, mesh: MeshAxes, parameters: dict[str, Placements]
) -> tuple[int, ...]:
    """Write the inner placements into ``parameters`` and return the axes that they use."""
    names, inner = mesh.mesh_dim_names or (), set()
    shapes = {leaf: tensor.shape for leaf, tensor in module.named_parameters()}
    for key, changes in entry.parameters.items():
        matched = [leaf for leaf in parameters if re.fullmatch(key, leaf)]
        if not matched:
            raise PlanError(f"{where}: key {key!r} matches no parameter; they are {sorted(parameters)}")
        normalize(changes, mesh, f"{where} {key!r}")
        for leaf, (axis, placement) in itertools.product(matched, changes.items()):
            number = names.index(axis)
            before = parameters[leaf]
            if placement == before[number]:
                continue
            expert_dim = kind == "stacked" and getattr(placement, "dim", 0) == 0
            if before[number] != Replicate() or not is_cut(placement) or expert_dim:
                raise PlanError(
                    f"{where}: parameter {leaf!r} has {placement!r} on axis {axis!r}, which holds {before[number]!r}; "
                    "an inner dim is sharded, on an axis that does not hold experts"
                )
            cut = (*before[:number], placement, *before[number + 1 :])
            parameters[leaf] = on_shape(cut, shapes[leaf], f"{where} parameter {leaf!r}")
            inner.add(number)
    return tuple(sorted(inner))


def _once(where: str, entry: Experts, parameters: dict[str, Placements], inner_axes: tuple[int, ...]) -> frozenset[str]:
    """Return the parameters that are added once; those that are in no way adapted to the inner axes are refused."""
    once = {leaf for leaf in parameters for key in entry.once if re.fullmatch(key, leaf)}
    for leaf, placements in parameters.items():
        missing = [axis for axis in inner_axes if placements[axis] == Replicate()]
        if missing and leaf not in once:
            raise PlanError(
                f"{where}: parameter {leaf!r} is not cut on the axis that cuts inner dims of others, so its part of "
                "the output would be added several times; shard it in `parameters` or name it in `once`"
            )
    return frozenset(once)
