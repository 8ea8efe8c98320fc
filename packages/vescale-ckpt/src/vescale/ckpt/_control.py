"""Rounds: every rank works, rank 0 decides, every rank gets its share of the decision or the same error.

    rank 0   work --+--> decide --+--> share
    rank 1   work --+             +--> share          two object collectives per round,
    rank 2   work --+             +--> share          on a CPU backend

A save and a load are a few such rounds. An exception anywhere in a round (in the work of any rank or in the decision)
becomes one ``CheckpointError`` with one text on every rank, so no rank is left waiting in the next collective. "rank"
is the rank in the process group.
"""

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ._errors import CheckpointError, format_ranks

_LAST_COLLECTIVE_SECONDS = 0.1


@dataclass(frozen=True)
class _Failure:
    """An exception as it travels between ranks."""

    text: str


@dataclass(frozen=True)
class Control:
    """The ranks that save or load together.

    Attributes:
        group: a process group with a CPU backend; None for one process.
        rank: this rank in the group.
        size: number of ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def run_round(
        self,
        work: Callable[[], Any],
        decide: Callable[[list[Any]], Sequence[Any]],
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run one round and return this rank's share.

        Args:
            work: run on every rank.
            decide: run on rank 0 with the results of all ranks; returns one share per rank.
            on_failure: run on rank 0 before any rank sees the error.

        Raises:
            CheckpointError: on all ranks, if ``work`` fails on any or ``decide`` fails.
        """
        cause: Exception | None = None
        try:
            result: Any = work()
        except Exception as error:
            cause, result = error, _Failure(_tell(error))
        results = self._gather(result)
        shares: Sequence[Any] | None = None
        if self.rank == 0:
            try:
                shares = decide(_refuse_failures(results))
            except Exception as error:
                cause = cause or error
                on_failure()
                shares = [_Failure(_tell(error))] * self.size
        share = self._scatter(shares)
        if isinstance(share, _Failure):
            if isinstance(cause, CheckpointError) and str(cause) == share.text:
                raise cause
            raise CheckpointError(share.text) from cause
        return share

    def no_shares(self, _results: list[Any]) -> list[None]:
        """Decide nothing: for rounds that only make sure that all ranks succeeded."""
        return [None] * self.size

    def _gather(self, item: Any) -> list[Any]:
        if self.size == 1:
            return [item]
        items: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(item, items, group=self.group, group_dst=0)
        return items or []

    def _scatter(self, items: Sequence[Any] | None) -> Any:
        if self.size == 1:
            assert items is not None
            return items[0]
        received = [None]
        dist.scatter_object_list(received, list(items) if items is not None else None, group=self.group, group_src=0)
        return received[0]


@contextlib.contextmanager
def open_control(process_group: dist.ProcessGroup | None) -> Iterator[Control]:
    """Yield the ranks of ``process_group``; of the default group if None; of this process if none is initialised.

    A default group without a CPU backend (plain NCCL) cannot carry objects without device memory, so a gloo group is
    made for the duration.

    Raises:
        ValueError: if ``process_group`` has no CPU backend or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ValueError("process_group given, but torch.distributed is not initialised; leave it out")
        yield Control(None, 0, 1)
        return
    _let_gloo_finish_at_exit()
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in process_group; only its members save and load with it")
    if _has_cpu_backend(process_group):
        yield _control_of(process_group)
    elif process_group is not None:
        raise ValueError(
            f"process_group has backend {dist.get_backend(process_group)!r}: save and load exchange small Python "
            'objects on the CPU; pass a group made by torch.distributed.new_group(backend="gloo"), or leave it out'
        )
    else:
        group = dist.new_group(backend="gloo")
        try:
            yield _control_of(group)
        finally:
            dist.destroy_process_group(group)


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """Give gloo's worker threads a moment before the interpreter shuts down.

    Note [the last collective]: a worker thread frees the tensors of a collective after it has told the caller that it
    is done, and needs Python's lock for that. If the program ends right after a save or a load, the interpreter may be
    shutting down by then; the thread is ended instead, and the process aborts after its last line. A barrier does not
    help, for it has such a last moment, too. Sleeping gives the lock away while the interpreter is still whole.
    """
    atexit.register(time.sleep, _LAST_COLLECTIVE_SECONDS)


def _control_of(group: dist.ProcessGroup | None) -> Control:
    return Control(group, dist.get_rank(group), dist.get_world_size(group))


def _has_cpu_backend(group: dist.ProcessGroup | None) -> bool:
    return any(entry.startswith("cpu:") for entry in str(dist.get_backend_config(group)).split(","))


def _refuse_failures(results: list[Any]) -> list[Any]:
    ranks_of: dict[str, list[int]] = {}
    for rank, result in enumerate(results):
        if isinstance(result, _Failure):
            ranks_of.setdefault(result.text, []).append(rank)
    if ranks_of:
        if list(map(len, ranks_of.values())) == [len(results)]:
            raise CheckpointError(next(iter(ranks_of)))  # all ranks alike
        raise CheckpointError("\n".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()))
    return results


def _tell(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
