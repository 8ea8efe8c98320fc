"""Memory as it is allocated and freed while a model runs on tensors without data, by kind.

`Ledger` counts storages: one begins to count when an operator returns a tensor in it, and ends when the last tensor
in it is gone, as with torch's allocators. Memory that was there before (parameters) does not count."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from .._torch import storage_key
from .result import KINDS, Bytes
from .split import Memory

Counts = tuple[int, ...]


@dataclass
class Ledger:
    """The live memories, and the moments at which they were many.

    Attributes:
        memories: memory by the key of its storage.
        counts: live bytes by kind.
        peaks: counts before each time that memory was freed after some was allocated, since the last `watch`.
    """

    memories: dict[int, Memory] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    peaks: list[Counts] = field(default_factory=list)
    _alive: dict[int, weakref.ref] = field(default_factory=dict)
    _rises: bool = False

    def of(self, tensor: Tensor) -> Memory | None:
        """Return what is known of a tensor's memory."""
        return self.memories.get(storage_key(tensor))

    def hold(self, tensor: Tensor, memory: Memory) -> None:
        """Enter memory that does not count, such as a parameter's."""
        self.memories[storage_key(tensor)] = memory

    def add(self, tensor: Tensor, memory: Memory) -> None:
        """Count new memory until its storage is gone."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        self.memories[key] = memory
        self._alive[key] = weakref.ref(storage, lambda _: self._remove(key, memory))
        self._count(memory.kind, memory.num_bytes)
        self._rises = True

    def change(self, memory: Memory, kind: str) -> None:
        """Count memory as of another kind from now on."""
        self._count(memory.kind, -memory.num_bytes)
        memory.kind = kind
        self._count(kind, memory.num_bytes)

    def watch(self, peaks: list[Counts]) -> None:
        """Put the moments from now on into a list."""
        self._note()
        self.peaks = peaks

    def _note(self) -> None:
        if self._rises:
            self.peaks.append(tuple(self.counts))
            self._rises = False

    def _count(self, kind: str, num_bytes: int) -> None:
        self.counts[KINDS.index(kind)] += num_bytes

    def _remove(self, key: int, memory: Memory) -> None:
        self._note()
        self._count(memory.kind, -memory.num_bytes)
        if self.memories.get(key) is memory:
            del self.memories[key], self._alive[key]


def bytes_of(counts: Counts, before: Counts | None = None) -> Bytes:
    """Return counts, less those of an earlier time, as bytes by kind."""
    return Bytes(*(now - then for now, then in _pairs(counts, before)))


def _pairs(counts: Counts, before: Counts | None) -> Iterator[tuple[int, int]]:
    return zip(counts, before or (0,) * len(counts), strict=True)
