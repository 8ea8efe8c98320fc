"""DTensor's caches of sharding decisions: what their keys compare, and how to empty them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

from .patches import Op

__all__ = ["CacheKeyPatch", "forget_decisions"]


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
