"""The tape: every operator that a constructor ran, in program order, with the tensors it reads, writes and creates.

Three kinds of records refer to each other by their index in a list::

    calls     0: empty -> v0      1: detach(v0) -> v1      2: normal_(v1)      3: select(v1) -> v2      4: zero_(v2)
    values    v0 v1 v2: shape, strides and dtype (a meta tensor), the real device, and their storage
    storages  s0 = {v0, v1, v2}: the unit of liveness; a read or a write of a value concerns its full storage

A **value** is one tensor of the program. Views and `t_()` make new values of the same **storage**; other in-place
operators make no new value. A call's arguments contain `Ref(index of a value)` for deferred tensors, and snapshots of
real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._torch.recording import Op, storage_key
from .ops import OVERWRITES

__all__ = ["Call", "Ref", "SetState", "Tape", "Value", "covers_storage"]


@dataclass(frozen=True)
class Ref:
    """Stands for a deferred tensor in the arguments of a call."""

    value: int


@dataclass(frozen=True)
class Value:
    """A tensor of the program.

    Attributes:
        meta: meta tensor of the same geometry and dtype.
        device: the device that the deferred tensor reports.
        storage: index of its storage.
        origin: index of the call that made it.
    """

    meta: Tensor
    device: torch.device
    storage: int
    origin: int


@dataclass(frozen=True)
class Call:
    """One operator of the program.

    Attributes:
        op: ATen overload.
        args: positional arguments with `Ref`s.
        kwargs: keyword arguments with `Ref`s.
        reads: values whose contents the operator uses.
        writes: existing values whose contents it changes.
        outputs: values it made, by their index among the flattened results.
        is_view: whether the outputs share the storage of an argument.
        draws: index of the generator that it consumes, or None.
        default_dtype: `torch.get_default_dtype()` at the time of the call.
    """

    op: Op
    args: tuple
    kwargs: dict
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    outputs: dict[int, int]
    is_view: bool
    draws: int | None
    default_dtype: torch.dtype


@dataclass(frozen=True)
class SetState:
    """The program set a generator, to a new state or to the state after an earlier call."""

    generator: int
    state: Tensor | int


@dataclass
class Tape:
    """The record of one `deferred_init`.

    Attributes:
        entries: calls and generator events in program order.
        values: all values.
        roots: for each storage the value that was created with it.
    """

    entries: list[Call | SetState] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    _storage_of: dict[int, int] = field(default_factory=dict)

    def add_value(self, meta: Tensor, device: torch.device) -> int:
        """Add a value that the next call will make, and its storage if that is new; return its index."""
        key = storage_key(meta)
        if key not in self._storage_of:
            self._storage_of[key] = len(self.roots)
            self.roots.append(len(self.values))
        self.values.append(Value(meta, device, self._storage_of[key], len(self.entries)))
        return len(self.values) - 1

    def storages(self, values: Sequence[int]) -> set[int]:
        """Return the storages of the given values."""
        return {self.values[value].storage for value in values}

    def created(self, call: Call) -> set[int]:
        """Return the storages that a call created."""
        return set() if call.is_view else self.storages(tuple(call.outputs.values()))

    def calls(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Call]]:
        """Yield `(index, call)` for the calls of a part of the tape, in program order."""
        for index in range(start, len(self.entries) if stop is None else stop):
            entry = self.entries[index]
            if isinstance(entry, Call):
                yield index, entry

    def overwrites(self, call: Call, value: int) -> bool:
        """Return whether a call replaces the full contents of the storage under `value` without reading them."""
        return call.op in OVERWRITES and covers_storage(self.values[value].meta)


def covers_storage(meta: Tensor) -> bool:
    """Return whether the elements of a tensor are exactly those of its storage, each once, in any order."""
    if meta.numel() * meta.element_size() != meta.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(meta.stride(), meta.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
