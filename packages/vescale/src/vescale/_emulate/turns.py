"""Ranks as threads of one process, of which one runs at a time: from one wait for another rank to the next.

    rank 0   ===== waits for the all-reduce                     ==== ...
    rank 1                                 ===== reduces; ====
    rank 2                                             (...)

The order is fixed, so a run repeats exactly, a debugger stops the whole world, and what a process has once can belong
to the rank that runs: random streams, the environment. If every rank waits, none of them can end its wait: that is an
error at once, which says what each rank waits for.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vescale.dtensor.extension import exchange_moves

__all__ = ["Rank", "Ranks", "current_rank", "is_rank"]


class _Here(threading.local):
    rank: Rank | None = None


_here = _Here()


def current_rank() -> Rank:
    """Return the rank that runs in this thread.

    Raises:
        RuntimeError: it is none, such as a thread that a rank has started.
    """
    if _here.rank is None:
        raise RuntimeError(
            f"expected a collective in the thread of an emulated rank, got one in the thread "
            f"{threading.current_thread().name!r}; emulate() cannot run what communicates in threads of its own, such "
            "as asynchronous saves: run it on processes"
        )
    return _here.rank


def is_rank() -> bool:
    """Return whether a rank runs in this thread."""
    return _here.rank is not None


class _EndedError(BaseException):
    """Ends a rank, after another one has failed."""


class Ranks:
    """The ranks of a world and whose turn it is.

    Args:
        size: number of ranks.
        new_world: makes the state of torch.distributed of a rank.
        use_world: makes torch.distributed use one, and returns the one before.
    """

    def __init__(self, size: int, new_world: Callable[[], object], use_world: Callable[[object], object]) -> None:
        self.size = size
        self.use_world = use_world
        self._ranks = [Rank(self, number, new_world()) for number in range(size)]
        self._done = threading.Semaphore(0)
        self._failure: BaseException | None = None

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what ``function(rank)`` returns on every rank.

        Raises:
            BaseException: the first error of a rank, with a note that names it.
            RuntimeError: all ranks wait for each other.
        """
        with _kept(self.use_world):
            for rank in self._ranks:
                rank.start(function)
            self._ranks[0].resume()
            self._done.acquire()
        if self._failure is not None:
            raise self._failure
        return [rank.result for rank in self._ranks]

    def leave(self, rank: Rank) -> None:
        """Let the next rank that can go on run, after ``rank``."""
        later = [self._ranks[(rank.number + step) % self.size] for step in range(1, self.size + 1)]
        for other in later:
            if not other.has_ended and other.can_go_on():
                other.resume()
                return
        waiting = [other for other in self._ranks if not other.has_ended]
        if not waiting:
            self._done.release()
            return
        lines = (
            f"  rank {other.number}: {'has ended' if other.has_ended else other.waits_for()}" for other in self._ranks
        )
        text = "emulate: expected a rank that can go on, got all of them waiting for others:\n" + "\n".join(lines)
        self.fail(RuntimeError(text))
        waiting[0].resume()

    def fail(self, error: BaseException) -> None:
        """End all ranks; the first error is that of the run."""
        if self._failure is None:
            self._failure = error

    @property
    def has_failed(self) -> bool:
        """Whether ranks are to end."""
        return self._failure is not None


class Rank:
    """One rank: its thread, what it waits for, and what a process has once.

    Attributes:
        number: its global rank.
        ranks: the world.
        result: what its function returned.
        waits_for: returns what it waits for, in words.
        world: its state of torch.distributed.
    """

    def __init__(self, ranks: Ranks, number: int, world: object) -> None:
        self.ranks, self.number, self.world = ranks, number, world
        self.result: Any = None
        self.waits_for: Callable[[], str] = str
        self.has_ended = False
        self._is_ready: Callable[[], bool] = lambda: True
        self._turn = threading.Semaphore(0)
        self._random: _Random | None = None
        self._moves: object = None  # while it has its turn, those of the process
        self._has_turn = False

    def start(self, function: Callable[[int], Any]) -> None:
        """Start the thread, which waits for its turn."""
        self._random = _Random.now()
        threading.Thread(target=self._run, args=(function,), name=f"rank {self.number}", daemon=True).start()

    def resume(self) -> None:
        """Give this rank the turn."""
        self._turn.release()

    def can_go_on(self) -> bool:
        """Return whether what it waits for is there, or ranks are to end."""
        return self.ranks.has_failed or self._is_ready()

    def wait(self, is_ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return when ``is_ready``; until then others run. ``what`` returns what it waits for."""
        if not is_ready():
            self._pass(is_ready, what)

    def pause(self) -> None:
        """Let others run before this rank asks again."""
        self._pass(lambda: True, str)

    def _pass(self, is_ready: Callable[[], bool], what: Callable[[], str]) -> None:
        self._is_ready, self.waits_for = is_ready, what
        self._random = _Random.now()
        self._give_up_turn()
        self.ranks.leave(self)
        self._take_turn()

    def _give_up_turn(self) -> None:
        if self._has_turn:
            self._moves, self._has_turn = exchange_moves(self._moves), False

    def _take_turn(self) -> None:
        self._turn.acquire()
        if self.ranks.has_failed:
            raise _EndedError
        assert self._random is not None
        self._random.restore()
        self._moves, self._has_turn = exchange_moves(self._moves), True
        self.ranks.use_world(self.world)
        os.environ.update(_environment(self.number, self.ranks.size))

    def _run(self, function: Callable[[int], Any]) -> None:
        _here.rank = self
        torch.set_num_threads(1)  # as torchrun does
        try:
            self._take_turn()
            with torch.autograd.set_multithreading_enabled(False):
                self.result = function(self.number)
        except _EndedError:
            pass
        except BaseException as error:
            error.add_note(f"on emulated rank {self.number}")
            self.ranks.fail(error)
        finally:
            self.has_ended = True
            self._give_up_turn()
            self.ranks.leave(self)


def _environment(rank: int, size: int) -> dict[str, str]:
    """Return what torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "emulated",
        "MASTER_PORT": "0",
    }


class _Random:
    """The states of the random streams that a process has once."""

    def __init__(self, torch_state: torch.Tensor, python_state: object, numpy_state: Any) -> None:
        self._torch, self._python, self._numpy = torch_state, python_state, numpy_state

    @classmethod
    def now(cls) -> _Random:
        """Return the present states."""
        numpy = sys.modules.get("numpy.random")
        return cls(torch.get_rng_state(), random.getstate(), numpy.get_state() if numpy else None)

    def restore(self) -> None:
        """Set the states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)  # type: ignore[arg-type]
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


@contextlib.contextmanager
def _kept(use_world: Callable[[object], object]) -> Iterator[None]:
    """Restore what ranks change in the process."""
    states, threads, hook, world = _Random.now(), torch.get_num_threads(), sys.excepthook, use_world(None)
    names = _environment(0, 1)
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        use_world(world)
        sys.excepthook = hook
        states.restore()
        torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
