"""The life of one forked rank: set up, run the body, report, wait to be released.

The parent forks the rank in the middle of a test, so the child inherits fixtures, closures and an imported torch. First
it makes itself independent of the parent: its own output file, one thread, its own seed, no inherited signal handlers.
It never returns into the parent's stack; it ends in `os._exit`.

    parent   fork ─────────────────── recv report ─ ... all reports ─ close pipe ─ join
    rank          set up  body  send report ──────────── wait for end of file ── exit

A rank keeps its process group open until the pipe is closed, so that a slower rank never loses a peer and no barrier is
needed. After a failure the parent closes the pipes early: sockets close, and the collectives of the other ranks raise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import pytest
import torch
import torch.distributed as dist

from vescale_testing.shapes import cache_shapes

Kind = Literal["returned", "raised", "skipped", "xfailed", "died", "killed"]


@dataclass(frozen=True)
class Report:
    """How one rank ended.

    Attributes:
        kind: The kind of the end.
        summary: One line: the exception, the reason to skip, the signal that ended the process.
        text: The traceback or the stacks, or an empty string.
        value: The body's return value or exception.
        shapes: The shapes that this rank has computed, for the ranks of later tests.
    """

    kind: Kind
    summary: str = ""
    text: str = ""
    value: Any = None
    shapes: dict = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Seat:
    """One rank's number and world size, and the files in `folder` shared with the parent."""

    rank: int
    world_size: int
    folder: Path
    timeout: float
    backend: str | None

    @property
    def output(self) -> Path:
        """File that receives the rank's stdout and stderr."""
        return self.folder / f"output.{self.rank}"

    @property
    def stacks(self) -> Path:
        """File that receives the rank's Python stacks, on SIGUSR1 and on a fatal signal."""
        return self.folder / f"stacks.{self.rank}"


def rank_main(seat: Seat, pipe: Connection, inherited: list[Connection], body: Callable[[], Any]) -> NoReturn:
    """Run `body` as one rank, send its `Report` through `pipe`, wait until the parent closes the pipe, and exit."""
    for connection in inherited:  # else a sibling would hold the parent's end open, and end of file would never come
        connection.close()
    _detach(seat)
    shapes = cache_shapes()
    report = replace(_run(seat, body), shapes=shapes)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(_pickled(report))
    _wait_for_end_of_file(pipe)
    os._exit(0)  # no atexit handlers, no pytest teardown: those belong to the parent


def _detach(seat: Seat) -> None:
    """Redirect output, prepare stack dumps, and limit the rank's life even if the parent is killed."""
    gc.freeze()  # a collection would write to, and so copy, every page of objects that the parent has made
    output = os.open(seat.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # pytest has replaced sys.stdout by objects that write into the parent's capture files.
    sys.stdout, sys.stderr = (_open_line_buffered(descriptor) for descriptor in (1, 2))

    stacks = open(seat.stacks, "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seat.timeout) + 10)  # the parent kills earlier, if it lives


def _open_line_buffered(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)


def _run(seat: Seat, body: Callable[[], Any]) -> Report:
    try:
        _join_world(seat)
        return Report("returned", value=body())
    except pytest.skip.Exception as outcome:
        return Report("skipped", str(outcome))
    except pytest.xfail.Exception as outcome:
        return Report("xfailed", str(outcome))
    except BaseException as error:  # also SystemExit and pytest.fail, which are results of the rank too
        return Report("raised", _summarize(error), _format(error), error)


def _join_world(seat: Seat) -> None:
    """Give the rank one thread, seed 0, torchrun's variables and, unless `backend` is None, a process group."""
    torch.set_num_threads(1)  # the parent's OpenMP workers do not survive a fork: a second thread would wait for them
    torch.manual_seed(0)
    random.seed(0)
    os.environ.update(RANK=str(seat.rank), LOCAL_RANK=str(seat.rank), WORLD_SIZE=str(seat.world_size))
    if seat.backend is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())  # gloo would resolve the host name, which needs a network
    dist.init_process_group(
        seat.backend,
        store=dist.FileStore(str(seat.folder / "store"), seat.world_size),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=2 * seat.timeout + 60),  # the parent, which prints all stacks, is to be first
    )


def _loopback() -> str:
    """Return the name of the loopback interface (`lo` on Linux, `lo0` on macOS)."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _summarize(error: BaseException) -> str:
    """Return the exception's type and the first line of its message."""
    return traceback.format_exception_only(error)[-1].partition("\n")[0]


def _format(error: BaseException) -> str:
    """Format `error` with its traceback, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _pickled(report: Report) -> bytes:
    """Pickle `report`; an exception that cannot be pickled is left out, any other value is an error of its own."""
    try:
        # Plain pickle copies tensors by value; multiprocessing's own would send a handle that dies with this process.
        data = pickle.dumps(report)
        if report.kind == "raised":
            pickle.loads(data)  # an exception with required arguments pickles, and fails only when it is read
        return data
    except Exception as error:
        if report.kind == "raised":
            return pickle.dumps(replace(report, value=None))
        return pickle.dumps(Report("raised", f"the returned value cannot be pickled: {error!r}"))


def _wait_for_end_of_file(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
