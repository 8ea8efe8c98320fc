"""Memory shared by the ranks of a world and their driver: the progress and the results of each rank.

Ranks compare results through it, not through collectives. So an operator that leaves the process group out of step
cannot disturb the comparison, and the driver can observe every wait. Each rank owns a slot::

    tick | case | length of record 0 | length of record 1 | ... record 0 | record 1

`tick` counts the rank's records. The parity of the tick selects the half for the record. A rank is never more than one
record ahead of another, so it never overwrites a record that is being read. If the tick of a rank stays behind, the
rank is stuck in an operator; the driver detects that.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time

__all__ = ["Board", "Lost"]

HEAD = struct.Struct("=qqqq")  # tick, case, two lengths
HALF = 4 << 20
SLOT = 4096 + 2 * HALF
ORDER = struct.Struct("=qqq")  # order number, operator, first case


class Lost(Exception):  # noqa: N818 - ends a rank, is no error
    """The driver has ended."""


class Board:
    """Shared memory for ``num_ranks`` ranks; made by the driver before it forks them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._memory = mmap.mmap(-1, num_ranks * SLOT + 4096)  # pages are only backed once they are written
        self._orders = num_ranks * SLOT
        self._driver = os.getpid()

    def where(self, rank: int) -> tuple[int, int]:
        """Return ``(tick, case)`` of a rank."""
        return HEAD.unpack_from(self._memory, rank * SLOT)[:2]

    def enter(self, rank: int, case: int) -> None:
        """Record that a rank begins a case."""
        struct.pack_into("=q", self._memory, rank * SLOT + 8, case)

    def publish(self, rank: int, record: object) -> int:
        """Write a rank's record and wait for those of the others; return their common number, for `read`."""
        tick = self.where(rank)[0] + 1
        data, half = pickle.dumps(record), tick % 2
        if len(data) > HALF:
            data = pickle.dumps(
                {"error": ("TooLarge", "the result does not fit into the board", True), "collectives": -1}
            )
        start = rank * SLOT + 4096 + half * HALF
        self._memory[start : start + len(data)] = data
        struct.pack_into("=q", self._memory, rank * SLOT + 16 + 8 * half, len(data))
        struct.pack_into("=q", self._memory, rank * SLOT, tick)
        self._wait(lambda: all(self.where(other)[0] >= tick for other in range(self.num_ranks)))
        return tick

    def read(self, rank: int, tick: int) -> object:
        """Return a rank's record number ``tick``, one of its last two."""
        half = tick % 2
        start = rank * SLOT + 4096 + half * HALF
        length = HEAD.unpack_from(self._memory, rank * SLOT)[2 + half]
        return pickle.loads(self._memory[start : start + length])

    def order(self, number: int, operator: int, case: int) -> None:
        """As the driver: order the ranks to run an operator's cases from ``case`` on."""
        struct.pack_into("=qq", self._memory, self._orders + 8, operator, case)
        struct.pack_into("=q", self._memory, self._orders, number)

    def next_order(self, last: int) -> tuple[int, int, int]:
        """As a rank: wait for an order after ``last``; return its number, the operator and the first case."""
        self._wait(lambda: ORDER.unpack_from(self._memory, self._orders)[0] > last)
        return ORDER.unpack_from(self._memory, self._orders)

    def _wait(self, done) -> None:
        spins = 0
        while not done():
            spins += 1
            time.sleep(0 if spins < 3 else 0.0002 if spins < 2000 else 0.002)
            if spins % 5000 == 0 and os.getppid() != self._driver:
                raise Lost
