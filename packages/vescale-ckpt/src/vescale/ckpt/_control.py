"""Rounds: every rank works, rank 0 decides, and every rank gets its share of the decision or the same error.

    rank 0   work --+--> decide --+--> share
    rank 1   work --+             +--> share          two small collectives per round,
    rank 2   work --+             +--> share          on a CPU backend, each with its sizes before

Results and shares are dataclasses, sent as JSON and read by their types: no rank runs what another one sends.

A save and a load consist of a few rounds. An exception in a round (in the work of any rank, or in the decision) becomes
one ``CheckpointError`` with one text on every rank, so no rank blocks in the next collective. "rank" is the rank in the
process group.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._errors import CheckpointError, format_ranks
from ._lost_ranks import Failures
from ._torch import default_store
from ._typed_json import JsonReader

_LAST_COLLECTIVE_SECONDS = 0.1
_NAP_SECONDS = 0.2

#: The global ranks of a process group of this package, and what it is for.
OwnGroup = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class _Failure:
    """The text of an exception, sent between ranks."""

    failure: str


@dataclass(frozen=True)
class Control:
    """The ranks of a save or a load.

    Attributes:
        group: a process group with a CPU backend; None for one process.
        rank: this rank in the group.
        size: number of ranks.
        failures: waits for collectives, and names lost ranks; None for one process.
        ranks: global ranks of the group.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    failures: Failures | None = None
    ranks: tuple[int, ...] = (0,)

    def run_round(
        self,
        work: Callable[[], Any],
        decide: Callable[[list[Any]], Sequence[Any]],
        *,
        result: Any = None,
        share: Any = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run one round and return this rank's share.

        Args:
            work: runs on every rank.
            decide: runs on rank 0 with the results of all ranks; returns one share per rank.
            result: the type of what ``work`` returns, one that JSON is read to (``_typed_json.py``).
            share: the type of a share.
            on_failure: runs on rank 0 before the error is sent to the other ranks.

        Raises:
            CheckpointError: on all ranks, if ``work`` fails on any rank or ``decide`` fails.
            RuntimeError: on the other ranks, if a rank has ended; the text names it and the collective.
        """
        cause: Exception | None = None
        try:
            mine: Any = work()
        except Exception as error:
            cause, mine = error, _Failure(_text_of(error))
        read = self._gather(mine, result)
        shares: Sequence[Any] | None = None
        if self.rank == 0:
            try:
                shares = decide(_refuse_failures(read()))
            except Exception as error:
                cause = cause or error
                on_failure()
                shares = [_Failure(_text_of(error))] * self.size
        own = self._scatter(shares, share)
        if isinstance(own, _Failure):
            if isinstance(cause, CheckpointError) and str(cause) == own.failure:
                raise cause
            raise CheckpointError(own.failure) from cause
        return own

    def make_groups(self, wanted: Sequence[OwnGroup]) -> None:
        """Make the groups that ``own_group`` returns then; a collective of all ranks, each with those that it is in.

        Groups have an order, by their ranks, in which every rank asks for them. They are made in a thread, and rounds
        go on until all ranks have theirs, so that a rank that is lost meanwhile, or raises, is an error on all.
        """
        making = _Making(wanted)
        making.start()
        while not self.run_round(making.has_ended, lambda ended: [all(ended)] * self.size, result=bool, share=bool):
            pass

    def no_shares(self, _results: list[Any]) -> list[None]:
        """Return no shares, for rounds that only check that all ranks succeeded."""
        return [None] * self.size

    def _gather(self, item: Any, kind: Any) -> Callable[[], list[Any]]:
        """Gather a result of every rank on rank 0, and return what reads them there."""
        if self.size == 1:
            return lambda: [item]
        mine = _message(item)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        self.wait(dist.all_reduce(sizes, group=self.group, async_op=True), "the all-reduce of sizes")
        sent = _padded(mine, int(sizes.max()))
        rows = [torch.empty_like(sent) for _ in sizes] if self.rank == 0 else None
        self.wait(dist.gather(sent, rows, group=self.group, group_dst=0, async_op=True), "the gather of results")
        received = list(enumerate(zip(rows or [], sizes.tolist(), strict=False)))
        return lambda: [_read(_cut(row, size), kind, rank) for rank, (row, size) in received]

    def _scatter(self, items: Sequence[Any] | None, kind: Any) -> Any:
        if self.size == 1:
            assert items is not None
            return items[0]
        by_id = {id(item): item for item in items or ()}  # many ranks get the same
        messages = {key: _message(item) for key, item in by_id.items()}
        texts = [messages[id(item)] for item in items or ()]
        sizes = torch.tensor([len(text) for text in texts] or [0] * self.size, dtype=torch.int64)
        self.wait(dist.broadcast(sizes, group=self.group, group_src=0, async_op=True), "the broadcast of sizes")
        received = _padded(b"", int(sizes.max()))
        padded = functools.cache(lambda text: _padded(text, received.numel()))
        rows = [padded(text) for text in texts] or None
        work = dist.scatter(received, rows, group=self.group, group_src=0, async_op=True)
        self.wait(work, "the scatter of decisions")
        return _read(_cut(received, int(sizes[self.rank])), kind, 0)

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective of the group; see `Failures.wait`."""
        assert self.failures is not None, "a group of several ranks has one"
        self.failures.wait(work, f"{what} of a checkpoint")


@contextlib.contextmanager
def open_control(process_group: dist.ProcessGroup | None) -> Iterator[Control]:
    """Yield the ranks of ``process_group``, of the default group if None, or of this process without any group.

    A default group without a CPU backend (plain NCCL) needs device memory for collectives, so the first call makes a
    gloo group of all ranks, for which torch waits up to its time-out.

    Raises:
        ValueError: ``process_group`` has no CPU backend, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ValueError(
                "expected torch.distributed to be initialized for process_group, got no default group; leave out "
                "process_group"
            )
        yield Control(None, 0, 1)
        return
    _let_gloo_finish_at_exit()
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ValueError(
            f"expected a member of process_group, got rank {dist.get_rank()}; call save and load on its members only"
        )
    if _has_cpu_backend(process_group):
        yield control_of(process_group)
    elif process_group is not None:
        raise ValueError(
            f"expected a process_group with a CPU backend, got {dist.get_backend(process_group)!r}; pass a group of "
            'torch.distributed.new_group(backend="gloo"), or leave out process_group'
        )
    else:
        yield control_of(_make_group(tuple(range(dist.get_world_size())), "control"), name="control")


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """Sleep at exit so that gloo's worker threads finish before the interpreter shuts down.

    Note [the last collective]: a worker thread frees the tensors of a collective after the collective returns to the
    caller, and needs the GIL to do so. If the program ends right after a save or a load, the interpreter may already be
    shutting down; it then kills the thread, and the process aborts after its last line. A barrier does not help,
    because it ends in the same way. The sleep releases the GIL while the interpreter still runs. ``vescale.dtensor``
    has the same wait; this package does not import it.
    """
    atexit.register(time.sleep, _LAST_COLLECTIVE_SECONDS)


#: By the default group, with which they end: the groups of this package by their global ranks and use.
_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[OwnGroup, dist.ProcessGroup]]
_own_groups = weakref.WeakKeyDictionary()


def own_group(ranks: tuple[int, ...], use: str) -> dist.ProcessGroup | None:
    """Return the gloo group of this package for some global ranks and a use, if it has been made."""
    world = dist.group.WORLD
    assert world is not None, "there are ranks"
    return _own_groups.get(world, {}).get((ranks, use))


def _make_group(ranks: tuple[int, ...], use: str) -> dist.ProcessGroup:
    """Make a gloo group, a collective of its ranks; it lives as long as the default group."""
    world = dist.group.WORLD
    assert world is not None, "there are ranks"
    found = own_group(ranks, use)
    if found is None:
        found = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        _own_groups.setdefault(world, {})[ranks, use] = found
    return found


class _Making(threading.Thread):
    """Makes process groups, in order; torch waits half an hour for a rank that does not come."""

    def __init__(self, wanted: Sequence[OwnGroup]) -> None:
        super().__init__(name="vescale makes process groups", daemon=True)
        self._wanted = wanted
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            for ranks, use in self._wanted:
                _make_group(ranks, use)
        except Exception as error:
            self._error = error

    def has_ended(self) -> bool:
        """Wait a little, and return whether all are made.

        Raises:
            Exception: what torch has raised.
        """
        self.join(_NAP_SECONDS)
        if self._error is not None:
            raise self._error
        return not self.is_alive()


def control_of(group: dist.ProcessGroup | None, *, name: str = "") -> Control:
    """Return the ranks of a group with a CPU backend; groups of the same ranks have different names."""
    ranks = tuple(dist.get_process_group_ranks(group))
    failures = Failures(ranks, dist.get_rank(), default_store(), name=name)
    return Control(group, dist.get_rank(group), dist.get_world_size(group), failures, ranks)


def _message(item: Any) -> bytes:
    return json.dumps(tree_of(item)).encode()


def tree_of(item: Any) -> Any:
    """Return dataclasses, tuples and mappings as JSON knows them."""
    if dataclasses.is_dataclass(item):
        kind: Any = type(item)
        return {name: tree_of(getattr(item, name)) for name in _field_names(kind)}
    if isinstance(item, tuple | list):
        return list(map(tree_of, item))
    return {key: tree_of(value) for key, value in item.items()} if isinstance(item, Mapping) else item


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _read(text: bytes, kind: Any, rank: int) -> Any:
    where, fix = f"the message of rank {rank}", "use one version of vescale-ckpt on all ranks"
    reader = JsonReader(where, fix, CheckpointError)
    tree = reader.parse(text.decode())
    is_failure = isinstance(tree, dict) and list(tree) == ["failure"]
    return reader.read(tree, _Failure if is_failure else type(None) if kind is None else kind)


def _padded(text: bytes, size: int) -> torch.Tensor:
    tensor = torch.zeros(size, dtype=torch.uint8)
    if text:
        tensor[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensor


def _cut(row: torch.Tensor, size: int) -> bytes:
    return row[:size].numpy().tobytes()


def _has_cpu_backend(group: dist.ProcessGroup | None) -> bool:
    return any(entry.startswith("cpu:") for entry in str(dist.get_backend_config(group)).split(","))


def _refuse_failures(results: list[Any]) -> list[Any]:
    ranks_of: dict[str, list[int]] = {}
    for rank, result in enumerate(results):
        if isinstance(result, _Failure):
            ranks_of.setdefault(result.failure, []).append(rank)
    if ranks_of:
        if list(map(len, ranks_of.values())) == [len(results)]:
            raise CheckpointError(next(iter(ranks_of)))  # the same text on all ranks
        raise CheckpointError("\n".join(f"{format_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()))
    return results


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
