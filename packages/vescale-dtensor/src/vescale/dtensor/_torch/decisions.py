"""DTensor's sharding decisions: how to ask for them and change them, what their caches compare, how to empty those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo

from .._containers import map_leaves
from .patches import Op

__all__ = [
    "CacheKeyPatch",
    "Sharding",
    "decide",
    "forget_decisions",
    "resharding",
    "shape_argument",
    "view_sharding",
]

Sharding = OutputSharding


class CacheKeyPatch:
    """Make the cache of sharding decisions compare more arguments of some operators.

    Args:
        first_arguments: for each operator, the position from which on its arguments become a part of the key. Operators
            that this torch lacks are None.
    """

    place = "static_argnum in the schemas of DTensor's sharding propagator"
    TABLES = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")  # the second is not in every version

    def __init__(self, first_arguments: Callable[[], Mapping[Op | None, int]]):
        self.first_arguments = first_arguments
        self.stock: list[tuple[dict, Op, object]] = []  # table, operator, entry; None where there was none

    def install(self) -> None:
        """Replace the entries of the operators; an operator without an entry gets one, whatever kind of rule it has."""
        if self.stock:
            return
        propagator = DTensor._op_dispatcher.sharding_propagator
        tables = [getattr(propagator, name, {}) for name in self.TABLES]
        for op, position in self.first_arguments().items():
            known = [table for table in tables if op in table]
            for table in known:
                entry = table[op]
                self.stock.append((table, op, entry))
                table[op] = dataclasses.replace(entry, static_argnum=min(position, entry.static_argnum))
            if not known and op is not None:
                self.stock.append((tables[0], op, None))
                tables[0][op] = RuntimeSchemaInfo(position)

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
