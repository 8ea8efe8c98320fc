"""DTensor's caches of sharding decisions: what their keys compare, and how to empty them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

from .patches import Op

__all__ = ["CacheKeyPatch", "forget_decisions"]


# Numbers are not in the key: they decide no shape and no dim, and each value, as a learning rate, would be an entry.
NOT_IN_KEY = ("Tensor", "number", "float", "Device", "Generator")
OF_MEMORY = frozenset({"device", "layout", "memory_format", "non_blocking", "pin_memory"})


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
