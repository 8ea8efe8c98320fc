"""Run a function on several real processes that end, always, with one report.

`@ranks(n)` runs the body of a test in `n` forked processes with torch.distributed initialized.
`run_ranks` does the same for any function and returns what each rank returned.

    @ranks(2)
    def test_sum():
        x = torch.tensor([dist.get_rank()])
        dist.all_reduce(x)
        assert x.item() == 1

Guarantees:

- The call always returns within its time-out plus a few seconds.
- No process stays behind.
- An error names every rank that failed, with its traceback. A rank that had to be killed is shown with the stack of
  each of its threads.

Ranks are forked, so fixtures, parameters and closures need not be picklable. Only returned values must be.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from vescale_testing import shapes
from vescale_testing._rank import Report, Seat, rank_main
from vescale_testing._torch import preload

#: Seconds that the other ranks get, after the first failure, to report their own before their peers' sockets close.
COURTESY = 0.5

#: Seconds that they then get to end, most often by an error in a collective, before they are killed.
GRACE = 3.0

#: Seconds that a rank gets to write its stacks before it is killed.
STACK_PATIENCE = 1.0

#: Time-out of calls that name none; the plugin's `--ranks-timeout` changes it for the tests that it runs.
default_timeout: ContextVar[float] = ContextVar("default_timeout", default=60.0)


class RankFailure(pytest.fail.Exception, AssertionError):  # type: ignore[name-defined] # noqa: N818 - a failed assertion, as pytest's Failed is
    """At least one rank failed.

    It is a failed assertion for any caller; being pytest's own failure, too, it is shown without the frames in between.

    Attributes:
        exceptions: The exception of each rank, by rank, if it can be pickled.
    """

    def __init__(self, message: str, exceptions: dict[int, BaseException] | None = None):
        super().__init__(message, pytrace=False)  # type: ignore[call-arg]
        self.exceptions = exceptions or {}


def ranks(world_size: int, *, timeout: float | None = None, backend: str | None = "gloo") -> Callable:
    """Run the body of a test function on `world_size` forked ranks.

    Fixtures and parameters are created once, in the parent, and seen by every rank. Every rank starts from torch seed 0
    and has one thread. The test is skipped (or xfails) if every rank's body calls `pytest.skip` (or `pytest.xfail`).

    Args:
        world_size: Number of processes.
        timeout: Seconds until the ranks are killed and their stacks reported; by default `--ranks-timeout`, or 60.
        backend: torch.distributed backend, or None for processes without a process group.

    Raises:
        RankFailure: From the decorated function, with a section for each rank that failed, died or hung.

    Example:
        >>> import torch.distributed as dist
        >>> @ranks(2)
        ... def test_world():
        ...     assert dist.get_world_size() == 2
        >>> test_world()
    """
    _check_world_size(world_size)

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)  # pytest reads fixture names through __wrapped__
        def on_every_rank(*args: Any, **kwargs: Any) -> None:
            _launch(functools.partial(test, *args, **kwargs), world_size, timeout, backend)

        on_every_rank.world_size = world_size  # type: ignore[attr-defined]
        return on_every_rank

    return decorate


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list:
    """Call `fn(*args, **kwargs)` on `world_size` forked ranks and return the list of their return values, by rank.

    `timeout` and `backend` are as in `ranks`. Returned values are pickled; tensors are copied. A world of one process
    is a clean place for a reference run, too: the caller's threads, seed and globals stay as they are.

    Raises:
        RankFailure: If a rank failed, died or hung.

    Example:
        >>> import torch.distributed as dist
        >>> run_ranks(lambda: dist.get_rank() * 10, 3)
        [0, 10, 20]
    """
    _check_world_size(world_size)
    return _launch(functools.partial(fn, *args, **kwargs), world_size, timeout, backend)


def _check_world_size(world_size: int) -> None:
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"expected a positive integer as the number of ranks, got {world_size!r}; write @ranks(2)")


@dataclass(frozen=True)
class _Child:
    seat: Seat
    process: BaseProcess
    pipe: Connection


def _launch(body: Callable[[], Any], world_size: int, timeout: float | None, backend: str | None) -> list:
    timeout = default_timeout.get() if timeout is None else timeout
    preload()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        children: list[_Child] = []
        try:
            for rank in range(world_size):
                _fork(Seat(rank, world_size, Path(folder), timeout, backend), body, children)
            reports = _collect(children, timeout)
        except BaseException:  # an interrupt: reports of the ranks are dropped
            for child in children:
                child.process.kill()
            raise
        finally:
            _end(children)
            _print_output(children)
    return _judge(reports)


def _fork(seat: Seat, body: Callable[[], Any], children: list[_Child]) -> None:
    """Fork one rank and append it to `children`."""
    ours, theirs = multiprocessing.Pipe()
    inherited = [ours, *(child.pipe for child in children)]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=rank_main, args=(seat, theirs, inherited, body), daemon=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        process.start()
    theirs.close()  # so that the rank's death is an end of file for us
    children.append(_Child(seat, process, ours))


def _collect(children: list[_Child], timeout: float) -> dict[int, Report]:
    """Wait for a report of every rank and return them in order of arrival; kill the ranks that take too long."""
    reports: dict[int, Report] = {}
    waiting = {child.pipe: child for child in children}
    end, late = time.monotonic() + timeout, f"did not end within {timeout:g} s"
    first = _receive_until(end, waiting, reports, stop_at_failure=True)
    if first is not None and waiting:
        _receive_until(min(end, time.monotonic() + COURTESY), waiting, reports)
        for child in children:
            if child.pipe not in waiting:
                child.pipe.close()
        if time.monotonic() + GRACE < end:
            end, late = time.monotonic() + GRACE, f"did not end within {GRACE:g} s after rank {first} had failed"
        _receive_until(end, waiting, reports)
    return reports | _kill(list(waiting.values()), late)


def _receive_until(
    end: float, waiting: dict[Connection, _Child], reports: dict[int, Report], *, stop_at_failure: bool = False
) -> int | None:
    """Move ranks from `waiting` to `reports` until the time `end`; return the first rank of these that failed."""
    first = None
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, end - time.monotonic()))):
        for pipe in ready:
            child = waiting.pop(cast(Connection, pipe))
            report = reports[child.seat.rank] = _receive(child)
            if report.kind != "returned" and first is None:
                first = child.seat.rank
        if stop_at_failure and first is not None:
            break
    return first


def _receive(child: _Child) -> Report:
    try:
        report: Report = pickle.loads(child.pipe.recv_bytes())
        shapes.known.update(report.shapes)
        return report
    except (EOFError, OSError):
        child.process.join(timeout=GRACE)
        return Report("died", _exit_text(child.process.exitcode), _read(child.seat.stacks))


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"left with exit status {code} before its body had ended"


def _kill(children: list[_Child], late: str) -> dict[int, Report]:
    """Request the stacks of every child, then kill it; `late` is the reason."""
    for child in children:
        if child.process.is_alive() and child.process.pid is not None:
            os.kill(child.process.pid, signal.SIGUSR1)
    patience = time.monotonic() + STACK_PATIENCE
    stacks = {child.seat.rank: _settled(child.seat.stacks, patience) for child in children}
    for child in children:
        child.process.kill()
    return {rank: Report("killed", late, text) for rank, text in stacks.items()}


def _settled(path: Path, deadline: float) -> str:
    """Return the content of `path` once it exists and no longer grows."""
    text, previous = _read(path), None
    while (not text or text != previous) and time.monotonic() < deadline:
        time.sleep(0.02)
        text, previous = _read(path), text
    return text


def _end(children: list[_Child]) -> None:
    """Release the ranks that wait, kill those that do not leave, and reap all."""
    for child in children:
        child.pipe.close()
    deadline = time.monotonic() + GRACE
    for child in children:
        child.process.join(timeout=max(0.0, deadline - time.monotonic()))
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        child.process.close()


def _print_output(children: list[_Child]) -> None:
    for child in children:
        for line in _read(child.seat.output).splitlines():
            print(f"[rank {child.seat.rank}] {line}")


def _judge(reports: dict[int, Report]) -> list:
    """Return the ranks' values, skip or xfail if all ranks did, or raise RankFailure."""
    kinds = {report.kind for report in reports.values()}
    if kinds == {"returned"}:
        return [reports[rank].value for rank in sorted(reports)]
    failed = [rank for rank, report in reports.items() if report.kind != "returned"]
    # A process that dies closes its sockets before its pipe: its peers may report their lost connection earlier.
    first = next((rank for rank in failed if reports[rank].kind == "died"), failed[0])
    if kinds == {"skipped"}:
        pytest.skip(reports[first].summary)
    if kinds == {"xfailed"}:
        pytest.xfail(reports[first].summary)
    exceptions = {rank: r.value for rank, r in sorted(reports.items()) if isinstance(r.value, BaseException)}
    raise RankFailure(_describe(reports, first), exceptions)


def _describe(reports: dict[int, Report], first: int) -> str:
    """Write the first failure in one line, then a section per rank, that of the first failure before the others."""
    failed = [rank for rank, report in reports.items() if report.kind != "returned"]
    cause = reports[first].summary or reports[first].kind
    lines = [f"rank {first}: {cause} ({len(failed)} of {len(reports)} ranks failed)"]
    seen: dict[Report, int] = {}
    for rank in sorted(reports, key=lambda rank: (rank != first, rank)):
        report = replace(reports[rank], value=None)
        same = seen.setdefault(report, rank)
        if report.kind != "returned" and same != rank:
            lines.append(f"[rank {rank}] the same as rank {same}")
            continue
        lines.append(f"[rank {rank}] {_headline(report)}")
        lines.append(textwrap.indent(_without_harness(report.text), "    "))
    return "\n".join(line for line in lines if line)


def _headline(report: Report) -> str:
    match report.kind:
        case "returned":
            return "finished"
        case "raised" if report.text:
            return "raised"
        case "raised" | "died":
            return report.summary
        case "killed":
            return f"{report.summary} and was killed " + ("here:" if report.text else "(it gave no stack)")
        case kind:
            reason = report.summary or "no reason given"
            return f"{kind} ({reason}), but another rank did not: let all ranks take the same decision"


def _without_harness(stack: str) -> str:
    """Drop from each thread's stack, most recent call first, the frames from `rank_main` outwards."""
    lines, inside = [], False
    for line in stack.splitlines():
        inside = inside and line.startswith("  File ")
        inside = inside or line.endswith((" in _run", " in rank_main"))
        if not inside:
            lines.append(line)
    return "\n".join(lines).strip("\n")


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
