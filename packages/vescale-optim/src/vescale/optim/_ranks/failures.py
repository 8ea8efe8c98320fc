"""Errors for a collective that cannot end: which collective, on which rank, and which ranks are gone.

A backend reports that a connection was closed, but not to which rank. So the rank that sees a failure first writes it
to the store of the process group, to which every process has a separate connection, and the others answer there:

    rank 0                          rank 1                           rank 2
    waits for bucket 1              waits for bucket 1               ends
    (its neighbor is alive)         connection closed: "failed"
    sees "failed" in the store      waits for answers
    answers                         has rank 0's, and none of 2
    error: no answer from rank 2    error: no answer from rank 2

While a rank waits for a collective on the CPU, it checks the store every `POLL`; a wait that ends earlier never does. A
rank that is neither in such a wait nor gone (it computes) answers at its next wait, or is named after `PATIENCE` as one
that gave no answer. The message names both cases.
"""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta

import torch.distributed as dist

from .. import _torch

__all__ = ["PATIENCE", "POLL", "Failures"]

#: How long a rank waits for a collective before it checks whether another rank has seen a failure.
POLL = timedelta(seconds=1)

#: Seconds for the ranks to answer after one of them has seen a failure.
PATIENCE = 10.0

#: Errors of a store whose host is gone.
_STORE_ERRORS = (RuntimeError, OSError)


class Failures:
    """The failures that the ranks of one axis have seen.

    Args:
        ranks: Global ranks of the axis.
        rank: This rank.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int):
        self.ranks = ranks
        self.rank = rank
        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        self._store = dist.PrefixStore(f"vescale.optim/failures/{name}", _torch.default_store())

    def seen(self) -> bool:
        """Return whether another rank has seen a failure."""
        try:
            return self._store.check(["failed"])
        except _STORE_ERRORS:
            return True  # the host of the store is gone: `describe` reports it

    def describe(self, what: str, cause: str) -> str:
        """Record that ``what`` failed on this rank, collect the records of the others, and return the error message."""
        head = f"{what} failed on rank {self.rank}"
        try:
            answers = self._exchange(f"{what}: {cause}" if cause else f"was waiting in {what}")
        except _STORE_ERRORS:
            gone = "the store cannot be reached either: the process that hosts it (torchrun, or rank 0) is gone"
            return "\n".join(filter(None, [f"{head}; {gone}", cause]))
        silent = [rank for rank in self.ranks if rank not in answers]
        if silent:
            finding = f"no answer from rank {', '.join(map(str, silent))}: ended, or hangs elsewhere"
        else:
            finding = "every rank of the axis is there, so none has ended"
        return "\n".join([f"{head}; {finding}", *(f"  rank {rank}: {answers[rank]}" for rank in sorted(answers))])

    def _exchange(self, mine: str) -> dict[int, str]:
        self._store.set(f"rank {self.rank}", mine)
        self._store.set("failed", "")
        answers: dict[int, str] = {}
        end = time.monotonic() + PATIENCE
        while True:
            for rank in self.ranks:
                if rank not in answers and self._store.check([f"rank {rank}"]):
                    answers[rank] = self._store.get(f"rank {rank}").decode()
            if len(answers) == len(self.ranks) or time.monotonic() > end:
                return answers
            time.sleep(0.02)
