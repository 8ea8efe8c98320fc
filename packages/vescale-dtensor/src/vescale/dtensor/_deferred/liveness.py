"""Which calls of a tape are needed: a pure backward pass over the tape, on storages.

Algorithm. Walk from the end. A storage is **live** if a later call needs its contents. A call that writes or creates a
live storage is needed, and makes the storages it reads live. A call that overwrites a full storage without reading it
ends its life, so values that a later initializer overwrites are never computed::

    0 empty -> s0                                 structure only
    1 kaiming: uniform_(s0)      dead: 3 overwrites all of it; its draws are skipped in bounded pieces
    2 select(s0) -> view         structure only
    3 normal_(s0)                needed, ends the life of the earlier contents
    4 zero_(row of s0)           needed, s0 stays live
    <- s0 wanted

Structure (allocations and views) is never in the result: a replay makes it on demand, when a needed call uses it.

A draw cannot be skipped if its number of random words depends on its inputs, or if it has other inputs (multinomial,
poisson, dropout, …). It is always needed. `skippable_draw` returns the other draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .._random.stock.draw import PIECEWISE_OPS
from .._torch.recording import Op
from .ops import GEOMETRY_FACTORIES, RANDOM_FACTORIES, UNINITIALIZED
from .tape import Call, Tape

__all__ = ["Draw", "is_structure", "last_uses", "needed_calls", "skippable_draw"]


@dataclass(frozen=True)
class Draw:
    """An in-place draw on a contiguous tensor that can replace a random call."""

    op: Op
    numel: int
    dtype: torch.dtype
    device: torch.device
    args: tuple
    kwargs: dict
    generator: torch.Generator | None


def skippable_draw(tape: Tape, call: Call) -> Draw | None:
    """Return the piecewise draw that equals a random call, or None if the call itself must run."""
    kwargs = dict(call.kwargs)
    generator = kwargs.pop("generator", None)
    if call.op in PIECEWISE_OPS:
        value, op, args = tape.values[call.writes[0]], call.op, call.args[1:]
    elif call.op in RANDOM_FACTORIES:
        value, op, args, kwargs = tape.values[call.outputs[0]], RANDOM_FACTORIES[call.op], (), {}
        generator = next((a for a in call.args if isinstance(a, torch.Generator)), generator)
    else:
        return None
    if not value.meta.is_contiguous():
        return None
    return Draw(op, math.prod(value.meta.shape), value.meta.dtype, value.device, args, kwargs, generator)


def is_structure(call: Call) -> bool:
    """Return whether a call makes tensors without giving them contents: a view or an uninitialized allocation."""
    return call.is_view or call.op in UNINITIALIZED


def needed_calls(tape: Tape, storages: Iterable[int], *, roots: frozenset[int] = frozenset()) -> list[int]:
    """Return the calls that the contents of `storages` at the end of the tape depend on, in program order.

    Args:
        tape: the tape.
        storages: the requested storages.
        roots: calls that are always needed.
    """
    live = set(storages)
    earliest_root = min(roots, default=len(tape.entries))
    needed = []
    for index in range(len(tape.entries) - 1, -1, -1):
        if not live and index < earliest_root:
            break
        call = tape.entries[index]
        if not isinstance(call, Call) or is_structure(call):
            continue
        created = tape.created(call)
        if index not in roots and live.isdisjoint(created | tape.storages(call.writes)):
            continue
        needed.append(index)
        live -= created
        live -= {tape.values[value].storage for value in call.writes if _ends_life(tape, call, value)}
        live |= tape.storages(call.reads)
    return needed[::-1]


def _ends_life(tape: Tape, call: Call, value: int) -> bool:
    """Return whether the call makes the earlier contents of the storage under `value` irrelevant.

    Only for storages that a factory made: for other storages a replay must run their origin to get the real strides.
    """
    root = tape.entries[tape.values[tape.roots[tape.values[value].storage]].origin]
    is_plain = root.op in GEOMETRY_FACTORIES or root.op in RANDOM_FACTORIES
    return is_plain and tape.overwrites(call, value)


def last_uses(tape: Tape, needed: Iterable[int], wanted: Iterable[int]) -> dict[int, list[int]]:
    """Return for each call the storages that are not needed after it.

    Storages in `wanted` that no call touches are listed under -1: they are ready at once.
    """
    last = dict.fromkeys(wanted, -1)
    for index in sorted(needed):
        call = tape.entries[index]
        for storage in tape.storages((*call.reads, *call.writes)) | tape.created(call):
            last[storage] = index
    by_call: dict[int, list[int]] = {}
    for storage, index in last.items():
        by_call.setdefault(index, []).append(storage)
    return by_call
