"""DTensor's sharding decisions: how to ask for them and change them, what their caches compare, how to empty those."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

from .._containers import map_leaves
from .patches import AttributePatch, Op, PatchGroup

__all__ = [
    "CacheKeyPatch",
    "PointwiseRulesPatch",
    "Sharding",
    "decide",
    "forget_decisions",
    "identity_of_meshes",
    "operands_as_given",
    "resharding",
    "shape_argument",
    "steps_between_layouts",
    "view_sharding",
]

Sharding = OutputSharding


# Numbers are not in the key: they decide no shape and no dim, and each value, as a learning rate, would be an entry.
NOT_IN_KEY = ("Tensor", "number", "float", "Device", "Generator")
OF_MEMORY = frozenset({"device", "layout", "non_blocking", "pin_memory"})


class CacheKeyPatch:
    """Make the cache of sharding decisions compare every argument that may decide a shape, a dtype or a dim.

    Stock compares the positional arguments from a registered position on, and registered keywords. For some operators
    that leaves out what decides the result's shape, so that topk(x, 2) after topk(x, 1) reports the shape of the first
    call, x.view(dtype) the dtype of the first call, and linalg.cross(x, y, dim=0) runs on shards of dim 0.
    """

    place = "the schemas of DTensor's sharding propagator"
    TABLES = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")  # the second is not in every version

    def __init__(self, operators: Callable[[], Iterable[Op]]):
        self.operators = operators
        self.stock: list[tuple[dict, Op, object]] = []  # table, operator, entry; None where there was none

    def install(self) -> None:
        """Replace the entries of the operators; an operator without an entry gets one, whatever kind of rule it has."""
        if self.stock:
            return
        propagator = DTensor._op_dispatcher.sharding_propagator
        tables = [getattr(propagator, name, {}) for name in self.TABLES]
        for op in self.operators():
            position, keywords = deciding_arguments(op)
            if position is None and not keywords:
                continue
            known = [table for table in tables if op in table]
            for table in known or tables[:1]:
                self.stock.append((table, op, table.get(op)))
                table[op] = _longer(table.get(op), position, keywords)

    def remove(self) -> None:
        """Put torch's entries back."""
        for table, op, entry in self.stock:
            if entry is None:
                del table[op]
            else:
                table[op] = entry
        self.stock.clear()

    def is_installed(self) -> bool:
        """Return whether the tables have our entries."""
        return bool(self.stock) and all(op in table and table[op] is not entry for table, op, entry in self.stock)


@functools.cache
def deciding_arguments(op: Op) -> tuple[int | None, tuple[str, ...]]:
    """Return the position of the first argument of ``op`` that may decide a shape, a dtype or a dim, and such keywords.

    Example:
        >>> deciding_arguments(torch.ops.aten.topk.default), deciding_arguments(torch.ops.aten.linalg_cross.default)
        ((1, ()), (None, ('dim',)))
    """
    arguments = op._schema.arguments
    deciding = [
        i
        for i, argument in enumerate(arguments)
        if argument.name not in OF_MEMORY and not any(kind in str(argument.type) for kind in NOT_IN_KEY)
    ]
    positions = [i for i in deciding if not arguments[i].kwarg_only]
    return min(positions, default=None), tuple(arguments[i].name for i in deciding if arguments[i].kwarg_only)


def _longer(entry: RuntimeSchemaInfo | None, position: int | None, keywords: Sequence[str]) -> RuntimeSchemaInfo:
    entry = entry or RuntimeSchemaInfo()
    first = entry.static_argnum if position is None else min(position, entry.static_argnum)
    names = list(dict.fromkeys([*(entry.static_kwargkey or ()), *keywords]))
    return dataclasses.replace(entry, static_argnum=first, static_kwargkey=names or None)


class PointwiseRulesPatch:
    """Give pointwise operators without a rule the one of torch's that says nothing else of an operator.

    Stock guesses from their definition, and where that is written by other than pointwise operators it finds that only
    full operands fit: x[..., 0] = 5 gathers x to fill a part of it.
    """

    place = "the rules of DTensor's sharding propagator"
    TABLES = ("op_strategy_funcs", "op_single_dim_strategy_funcs")  # the second is not in every version

    def __init__(self, operators: Callable[[], Collection[Op]]):
        self.operators = operators
        self.new: list[tuple[dict, Op]] = []

    def install(self) -> None:
        """Add the rule of each operator that has none."""
        if self.new:
            return
        propagator = DTensor._op_dispatcher.sharding_propagator
        tables = [getattr(propagator, name, {}) for name in self.TABLES]
        for op in self.operators():
            like = torch.ops.aten.atan2_.default if op._schema.is_mutable else torch.ops.aten.atan2.default
            if any(op in table for table in tables):
                continue
            for table in (table for table in tables if like in table):
                table[op] = table[like]
                self.new.append((table, op))

    def remove(self) -> None:
        """Take the rules away."""
        for table, op in self.new:
            del table[op]
        self.new.clear()

    def is_installed(self) -> bool:
        """Return whether the tables have our entries."""
        return bool(self.new) and all(op in table for table, op in self.new)


def identity_of_meshes() -> PatchGroup:
    """Return the patch after which caches tell meshes with other process groups apart. Such meshes stay equal.

    Stock answers a call on one mesh with a result on an older, equal one. Where ranks differ in what they have cached,
    some communicate in the groups of the older mesh, and all wait forever. Here the hash of a mesh is that of its
    groups, and layouts on meshes of other groups are not equal (torch's cache in C++ compares them alone).
    """

    def hash_of(stock: Callable) -> Callable:
        def of_groups(self: DeviceMesh) -> int:
            if not getattr(self, "_hash", None):
                self._hash = hash((stock(self), *map(id, _groups(self))))
            return self._hash

        return of_groups

    def equality(stock: Callable) -> Callable:
        def check_equals(self: DTensorSpec, other: object, skip_shapes: bool = False) -> bool:
            if not stock(self, other, skip_shapes):
                return False
            return self.mesh is other.mesh or hash(self.mesh) == hash(other.mesh)

        return check_equals

    patches = (
        AttributePatch((DeviceMesh,), "__hash__", hash_of),
        AttributePatch((DTensorSpec,), "_check_equals", equality),
    )
    return PatchGroup(", ".join(patch.place for patch in patches), patches)


def _groups(mesh: DeviceMesh) -> list:
    """Return the process groups of a mesh: none on a rank outside, and of a mesh that only describes a layout."""
    return [mesh.get_group(axis) for axis in range(len(getattr(mesh, "_dim_group_names", ())))]


# The kinds of placements that a planner has met in the targets of its searches; not in every version.
ADDED_BY_TARGETS = ("strided_shard_placements_in_target", "partial_reduce_ops_in_target")


def steps_between_layouts() -> AttributePatch:
    """Return the patch after which the next layouts of a redistribution, and their costs, are computed once.

    For every way to run an operator, stock searches the cheapest redistribution of each operand that merges sharded
    dims, and computes the same steps again in every search: 13,390 times in the first call of a tiny Gemma-2 over dp 2
    x tp 2, of which 806 are different (12 of 26 CPU-seconds).
    """

    def computed_once(stock: Callable) -> Callable:
        @functools.wraps(stock)
        def next_states(self: DTensorRedistributePlanner, placements: tuple, order: tuple) -> dict:
            known = vars(self).setdefault("_vescale_next_states", {})
            key = placements, order, *(frozenset(getattr(self, name, ())) for name in ADDED_BY_TARGETS)
            if key not in known:
                known[key] = stock(self, placements, order)
            return known[key]

        return next_states

    return AttributePatch((DTensorRedistributePlanner,), "get_next_state", computed_once)


def operands_as_given() -> AttributePatch:
    """Return the patch after which an operator that can run on its operands as they are laid out is decided at once.

    Stock prices all ways to run the operator, which are a power of those on one axis of the mesh, and then takes the
    last one that moves nothing, if there is one. Only ways that fit the operands on some axis can be that one.
    """

    def tried_first(stock: Callable) -> Callable:
        @functools.wraps(stock)
        def expand(mesh: DeviceMesh, schema: OpSchema, ways: list, *, input_index: int = 1, **how: object) -> object:
            given = [each.strategies[0].output_spec.placements for each in schema.args_strategy]
            fitting = [way for way in ways if tuple(way[input_index:]) in set(zip(*given, strict=False))]
            if fitting and len(fitting) < len(ways) and not schema.kwargs_strategy:
                with contextlib.suppress(RuntimeError):  # in place, and none of these keeps the layout
                    found = stock(mesh, schema, fitting, input_index=input_index, **how)
                    if any(_moves_nothing(way, given) for way in found.strategies):
                        return found
            return stock(mesh, schema, ways, input_index=input_index, **how)

        return expand

    return AttributePatch((utils,), "expand_to_full_mesh_op_strategy", tried_first)


def _moves_nothing(way: OpSpec, given: Sequence[tuple[Placement, ...]]) -> bool:
    """Return whether a way to run an operator takes its operands as they are laid out."""
    needed = [spec.placements for spec in way.input_specs or ()]
    return needed == given and not any(itertools.chain.from_iterable(way.redistribute_cost or ()))


def forget_decisions() -> None:
    """Empty DTensor's caches of sharding decisions, which depend on the rules in force."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    cached_meta = getattr(type(propagator), "_propagate_tensor_meta_cached", None)  # private, not in every version
    if hasattr(cached_meta, "cache_clear"):
        cached_meta.cache_clear()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        clear_native()


# ------------------------------------------------------------------------------------------------- decisions


def decide(schema: OpSchema, layout: Callable[[DTensorSpec], DTensorSpec]) -> OutputSharding:
    """Return stock's decision for operands whose specs ``layout`` changes."""
    args, kwargs = (map_leaves(layout, given, DTensorSpec) for given in (schema.args_schema, schema.kwargs_schema))
    changed = OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)
    return DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(changed)


def resharding(
    decision: OutputSharding, schema: OpSchema, needed: tuple, output: object, *, is_moved: bool
) -> OutputSharding:
    """Return a decision with other arguments and results.

    Args:
        decision: the decision.
        schema: of the call.
        needed: the arguments with which the operator runs: specs of operands, and what is no tensor.
        output: specs of the results.
        is_moved: whether operands are redistributed.
    """
    takes_values = decision.use_val_from_redistribute_schema
    if not (is_moved or takes_values):
        return OutputSharding(output)
    changed = OpSchema(schema.op, needed, schema.kwargs_schema)
    return OutputSharding(output, changed, needs_redistribute=True, use_val_from_redistribute_schema=takes_values)


def shape_argument(op: Op) -> int | None:
    """Return the position of the argument that is the shape of the result, which is local where the operator runs."""
    position = DTensor._op_dispatcher.sharding_propagator.op_to_shape_and_stride_idx.get(op)
    return position if isinstance(position, int) else None


def view_sharding(
    schema: OpSchema, placements: Sequence[Placement], shape: Sequence[int], local_shape: Sequence[int]
) -> OutputSharding:
    """Return the decision to view a tensor as one of ``shape``, of which this rank has ``local_shape``."""
    spec = schema.args_schema[0]
    meta = DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta(schema)
    meta = TensorMeta(torch.Size(shape), meta.stride, meta.dtype)
    changed = OpSchema(schema.op, (spec, tuple(local_shape), *schema.args_schema[2:]), schema.kwargs_schema)
    output = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)
    return OutputSharding(output, changed, needs_redistribute=True, use_val_from_redistribute_schema=True)
