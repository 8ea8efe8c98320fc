"""Errors for a collective that cannot end: which collective, on which rank, and which ranks are gone.

A backend reports that a connection was closed, but not to which rank. So the rank that sees a failure first writes it
to the store of the process group, to which every process has a separate connection, and the others answer there:

    rank 0                          rank 1                           rank 2
    waits for bucket 1              waits for bucket 1               ends
    (its neighbor is alive)         connection closed: "failed"
    sees "failed" in the store      waits for answers
    answers                         has rank 0's, and none of 2
    error: no answer from rank 2    error: no answer from rank 2

While a rank waits for a collective on the CPU, it checks the store every `Failures.POLL`; a wait that ends earlier
never does. A rank that is neither in such a wait nor gone (it computes) answers at its next wait, or is named after
`Failures.PATIENCE` as one that gave no answer. The message names both cases.

A rank that raises such an error usually ends, too, and ranks that wait for it in other groups would name it alone. So
it leaves its error in the store as its last words, and they pass them on: the first rank that was lost is in the text
of all.

A rank that is about to do what all ranks must do together, and that others may not do now (a call with new shapes, a
step without a backward), first meets them in the store (`Failures.meet`). Ranks that wait for a collective find the
open meeting there, too. If it stays open for `Failures.PATIENCE`, they and the rank in the meeting wait for each other,
which is an error on all of them.

The packages that wait for collectives and do not import each other have a copy of this file. A test compares the
copies.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Failures", "first_line"]

#: Errors of a store whose host is gone.
_STORE_ERRORS = (RuntimeError, OSError)


#: Those whose ranks may meet. Process-wide: a rank may wait for a collective over other ranks than it should meet.
_meetings: weakref.WeakSet[Failures] = weakref.WeakSet()


class Failures:
    """The failures that the ranks of a mesh axis or group have seen.

    Args:
        ranks: Global ranks of the group.
        rank: This rank.
        store: The store by which the processes of the default process group found each other.
        name: Distinguishes groups of the same ranks, if one of them can be given up and another used after it.

    Attributes:
        POLL: How long a rank waits for a collective before it checks whether another rank has seen a failure.
        PATIENCE: Seconds for the ranks to answer after one of them has seen a failure, or to come to a meeting.
    """

    POLL = timedelta(seconds=1)
    PATIENCE = 10.0

    def __init__(self, ranks: Sequence[int], rank: int, store: dist.Store, *, name: str = ""):
        self.ranks = tuple(ranks)
        self.rank = rank
        key = hashlib.sha256(f"{self.ranks} {name}".encode()).hexdigest()[:16]
        self._store = dist.PrefixStore(f"vescale/failures/{key}", store)
        self._last_words = dist.PrefixStore("vescale/failures/last words", store)
        self._silent: set[int] = set()  # ranks that gave no answer once are not waited for again

    def wait(self, work: Any, what: str) -> None:
        """Wait for a work on the CPU, of the collective ``what``.

        Raises:
            RuntimeError: If the collective failed, here or on another rank; the text names the lost ranks.
        """
        try:
            others_failed = self._wait_and_listen(work)
        except _MeetingError as error:
            raise RuntimeError(error.failures.describe(what, "")) from None
        except RuntimeError as error:
            raise RuntimeError(self.describe(what, first_line(error))) from error
        if others_failed:
            raise RuntimeError(self.describe(what, ""))

    def _wait_and_listen(self, work: Any) -> bool:
        """Wait; return whether another rank has seen a failure in the meantime.

        Raises:
            RuntimeError: If other ranks wait for this one in a meeting, or the work has failed.
        """
        since: dict[tuple[Failures, int], float] = {}
        while True:
            began = time.monotonic()
            try:
                work.wait(self.POLL)
                return False
            except RuntimeError:
                # The time-out of this wait and a failure of the work raise the same error. A work that has failed
                # raises at once: now, or in the next iteration.
                if time.monotonic() - began < 0.9 * self.POLL.total_seconds():
                    raise
            if self.seen():
                return True
            # Not at once: this rank may come to the meeting when its collective has ended.
            open_ones = [(each, number) for each in _meetings if (number := each.meeting()) is not None]
            since = {one: since.get(one, began) for one in open_ones}
            for (each, _), opened in since.items():
                if self.rank in each.ranks and time.monotonic() - opened > self.PATIENCE:
                    raise _MeetingError(each)

    def can_meet(self) -> Failures:
        """Let the ranks meet from now on, and return this object."""
        _meetings.add(self)
        return self

    def meet(self, what: str) -> None:
        """Wait until all ranks are in this call, of whatever they are about to do together.

        It takes a few requests to the store, for any number of ranks. This rank must not have collectives in flight.

        Args:
            what: What this rank is about to do.

        Raises:
            RuntimeError: On all ranks, if a rank that waits for a collective does not come, or a rank is gone.
        """
        size = len(self.ranks)
        try:
            self._store.set("meeting", what)
            arrived = self._store.add("arrived", 1)
            ended = f"meeting {(arrived - 1) // size} has ended"
            if arrived % size == 0:
                self._store.delete_key("meeting")
                self._store.set(ended, "")
            nap = 0.001
            while not self._store.check([ended]):
                if self.seen():
                    raise RuntimeError(self.describe(what, ""))
                time.sleep(nap)
                nap = min(2 * nap, 0.1)
        except dist.DistError as error:
            raise RuntimeError(self.describe(what, first_line(error))) from error

    def meeting(self) -> int | None:
        """Return the number of the meeting in which ranks wait for others; None if there is none."""
        try:
            return self._store.add("arrived", 0) // len(self.ranks) if self._store.check(["meeting"]) else None
        except _STORE_ERRORS:
            return None  # of an earlier process group, or its host is gone, which `seen` reports

    def seen(self) -> bool:
        """Return whether another rank has seen a failure."""
        try:
            return bool(self._store.check(["failed"]))
        except _STORE_ERRORS:
            return True  # the host of the store is gone: `describe` reports it

    def report(self, what: str) -> None:
        """Record that this rank has failed, so that ranks that wait raise an error with this text; do not wait."""
        with contextlib.suppress(*_STORE_ERRORS):
            self._store.set(f"rank {self.rank}", what)
            self._store.set("failed", "")

    def describe(self, what: str, cause: str) -> str:
        """Record that ``what`` failed on this rank, collect the records of the others, and return the error message."""
        head = f"{what} failed on rank {self.rank}"
        try:
            answers = self._exchange(f"{what}: {cause}" if cause else f"was waiting in {what}")
            return self._conclude(head, answers)
        except _STORE_ERRORS:
            gone = "the store cannot be reached either: the process that hosts it (torchrun, or rank 0) is gone"
            return "\n".join(filter(None, [f"{head}; {gone}", cause]))

    def _conclude(self, head: str, answers: dict[int, str]) -> str:
        """Return the error message for the answers of other ranks, and leave the last words of this one."""
        silent = [rank for rank in self.ranks if rank not in answers]
        self._silent.update(silent)
        if silent:
            finding = f"no answer from rank {', '.join(map(str, silent))}: ended, or hangs elsewhere"
        else:
            finding = "every rank of the axis is there, so none has ended"
        earlier = [words for words in map(self._words_of, silent) if words]
        self._last_words.set(f"rank {self.rank}", "; before that, ".join([f"{head}; {finding}", *earlier]))
        lines = [f"  rank {rank}: {answers[rank]}" for rank in sorted(answers)]
        return "\n".join([f"{head}; {finding}", *lines, *(f"  before that, {words}" for words in earlier)])

    def _words_of(self, rank: int) -> str:
        """Return the error that a rank has raised, about any of its groups; empty if none."""
        key = f"rank {rank}"
        return self._last_words.get(key).decode() if self._last_words.check([key]) else ""

    def _exchange(self, mine: str) -> dict[int, str]:
        self._store.set(f"rank {self.rank}", mine)
        self._store.set("failed", "")
        answers: dict[int, str] = {}
        end = time.monotonic() + self.PATIENCE
        while True:
            # Before the answers: a rank leaves its last words after its answer, if it has one here.
            gone = self._silent.union(rank for rank in self.ranks if rank not in answers and self._words_of(rank))
            for rank in self.ranks:
                if rank not in answers and self._store.check([f"rank {rank}"]):
                    answers[rank] = self._store.get(f"rank {rank}").decode()
            if len(answers.keys() | gone) == len(self.ranks) or time.monotonic() > end:
                return answers
            time.sleep(0.02)


class _MeetingError(RuntimeError):
    """Other ranks wait for this one in a meeting."""

    def __init__(self, failures: Failures):
        super().__init__()
        self.failures = failures


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().partition("\n")[0]
