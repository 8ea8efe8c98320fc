"""Worlds of four forked ranks, and the driver that runs and monitors them.

The driver imports torch and plans all cases before it forks, so a new world costs a fraction of a second. It gives each
world one operator after another and reads the first rank's verdicts from a pipe. If a rank ends, or sleeps in an
operator while another rank waits for it, the driver ends the world: the case has died or diverged. A new world
continues with the next case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import _torch
import torch
import torch.distributed as dist
from board import Board
from judge import Rank, Verdict
from plan import Plan
from torch.distributed.device_mesh import init_device_mesh

__all__ = ["Found", "cpu_time", "enter_world", "last_lines", "sweep"]

NUM_RANKS = 4
STUCK_S = 1.5  # a rank that sleeps in an operator while another one waits for it
STUCK_AFTER_ERROR_S = 0.4  # the other one has raised
HUNG_S = 8.0  # all ranks sleep in an operator
LOOK_S = 0.2  # between two checks of the processes
MAX_LOST = 4  # worlds that one operator may cost; its other cases are then left out


@dataclasses.dataclass(frozen=True)
class Found:
    """A verdict and the case it belongs to."""

    plan: Plan
    case: int
    verdict: Verdict


def sweep(plans: list[Plan], *, workers: int, stock: bool) -> Iterator[Found]:
    """Run all cases of all plans on ``workers`` worlds and yield the verdicts in order of arrival."""
    waiting = [(index, 0) for index, plan in enumerate(plans) if plan.cases]
    worlds = [World(plans, stock=stock) for _ in range(max(1, min(workers, len(waiting))))]
    try:
        while True:
            for world in worlds:
                if world.idle and waiting:
                    world.give(*waiting.pop(0))
            busy = [world for world in worlds if not world.idle]
            if not busy:
                return
            select.select([world.pipe for world in busy], [], [], 0.05)
            for world in busy:
                yield from world.look()
    finally:
        for world in worlds:
            world.end()


class World:
    """Four ranks on one board; forked when there is something to run, and again after they were lost."""

    def __init__(self, plans: list[Plan], *, stock: bool) -> None:
        self._plans, self._stock = plans, stock
        self._pids: list[int] = []
        self._lost: dict[int, int] = {}
        self.idle = True
        self.pipe = -1

    def give(self, operator: int, case: int) -> None:
        """Let the ranks run an operator's cases from ``case`` on."""
        self._operator, self._next = operator, case
        self.idle = case >= len(self._plans[operator].cases)
        if self.idle:
            return
        if not self._pids:
            self._fork()
        self._number += 1
        self._still: dict[int, tuple] = {}
        self._board.order(self._number, operator, case)

    def look(self) -> Iterator[Found]:
        """Yield the new verdicts, and the verdict on a case in which a rank died or is stuck."""
        ended = self._ended() or self._stuck()
        diverged = yield from self._read()  # after the check of the ranks: they sent these before they ended
        if self.idle or not (ended or diverged):
            return
        case = self._next
        self.end()
        if not diverged:
            yield Found(self._plans[self._operator], case, ended)
            case += 1
        self._lost[self._operator] = lost = self._lost.get(self._operator, 0) + 1
        yield from self._go_on(case, leave_out=lost >= MAX_LOST)

    def end(self) -> None:
        """Kill the ranks and reap them."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self._pids:
            os.close(self.pipe)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._pids = []

    def _go_on(self, case: int, *, leave_out: bool) -> Iterator[Found]:
        cases = self._plans[self._operator].cases
        if leave_out:
            left = Verdict("left out", f"{MAX_LOST} worlds were lost to this operator")
            yield from (Found(self._plans[self._operator], i, left) for i in range(case, len(cases)))
            case = len(cases)
        self.give(self._operator, case)

    def _read(self):
        """Yield the verdicts that the first rank has sent; return whether the ranks diverged and wait to be ended."""
        while not self.idle and select.select([self.pipe], [], [], 0)[0]:
            data = os.read(self.pipe, 1 << 16)
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message is None:
                    self.idle = True
                    continue
                verdict = Verdict(**message["verdict"])
                yield Found(self._plans[self._operator], message["case"], verdict)
                self._next = message["case"] + 1
                if verdict.kind == "diverged":
                    return True
        return False

    def _ended(self) -> Verdict | None:
        for rank, pid in enumerate(self._pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._pids.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                text = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                return Verdict("died", f"rank {rank} ended with {text}: {last_lines(self._folder, rank)}")
        return None

    def _stuck(self) -> Verdict | None:
        """Return a verdict if a rank sleeps while another is ahead of it, or if all ranks sleep."""
        now = time.monotonic()
        if now < self._looked + LOOK_S:
            return None
        self._looked = now
        ticks = [self._board.where(rank) for rank in range(NUM_RANKS)]
        still = []
        for rank, pid in enumerate(self._pids):
            seen = (ticks[rank], cpu_time(pid))
            if self._still.get(rank, (None,))[0] != seen:
                self._still[rank] = (seen, now)
            still.append(now - self._still[rank][1])
        first = max(tick for tick, _ in ticks)
        behind = [rank for rank, (tick, _) in enumerate(ticks) if tick < first]
        if not behind:
            return Verdict("diverged", "all ranks hang in the operator") if min(still) > HUNG_S else None
        longest = min(still[rank] for rank in behind)
        if longest < STUCK_AFTER_ERROR_S:
            return None  # the others may go on, and write to the board while it is read
        ahead = [self._board.read(rank, first) for rank, (tick, _) in enumerate(ticks) if tick == first]
        errors = [record["error"] for record in ahead if isinstance(record, dict) and record.get("error")]
        if longest < (STUCK_AFTER_ERROR_S if errors else STUCK_S):
            return None
        others = f"others raised {errors[0][0]}: {errors[0][1][:200]}" if errors else "others had finished"
        return Verdict("diverged", f"ranks {behind} hang in the operator; {others}")

    def _fork(self) -> None:
        self._board = Board(NUM_RANKS)
        self._folder = Path(tempfile.mkdtemp(prefix="sweep-"))
        self.pipe, writing = os.pipe()
        self._rest, self._number, self._still, self._looked = b"", 0, {}, 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking with threads: torch's are idle
            for rank in range(NUM_RANKS):
                pid = os.fork()
                if pid == 0:
                    _rank_main(rank, self._board, self._plans, self._folder, writing, self._stock)
                self._pids.append(pid)
        os.close(writing)


def cpu_time(pid: int) -> tuple:
    """Return a value that changes while a process works: its CPU time, and the clock if a thread is runnable."""
    try:
        threads = [_fields(path / "stat") for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return (time.monotonic(),)  # a thread has just ended
    used = sorted((number, user, system) for number, _, user, system in threads)
    asleep = all(state == "S" for _, state, _, _ in threads)  # else a busy machine keeps it waiting
    return tuple(used) if asleep else (time.monotonic(),)


def _fields(path: Path) -> tuple[str, str, str, str]:
    """Return a thread's number, state, and processor time in user and system mode (proc(5))."""
    number, _, rest = path.read_text().partition(" ")
    fields = rest.rpartition(")")[2].split()
    return number, fields[0], fields[11], fields[12]


def last_lines(folder: Path, rank: int) -> str:
    path = folder / f"output.{rank}"
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    _, fault, stack = text.rpartition("Fatal Python error")  # the call that died comes first
    return " / ".join((fault + stack).splitlines()[:8] if fault else text.splitlines()[-6:])[:1000]


# ------------------------------------------------------------------------------------------------- a rank


def _rank_main(rank: int, board: Board, plans: list[Plan], folder: Path, pipe: int, stock: bool) -> None:
    status = 1
    try:
        _work(rank, board, plans, folder, pipe, stock)
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def enter_world(rank: int, num_ranks: int, folder: Path) -> None:
    """Let a forked process write to a file of its own and join the process group of the world."""
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next(n for _, n in socket.if_nameindex() if n.startswith("lo")))
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=300))


def _work(rank: int, board: Board, plans: list[Plan], folder: Path, pipe: int, stock: bool) -> None:
    enter_world(rank, NUM_RANKS, folder)
    meshes = {1: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2))}
    _torch.count_gathers()
    worker = Rank(rank, board, meshes, stock=stock)
    number = 0
    while True:
        number, operator, start = board.next_order(number)
        plan = plans[operator]
        worker.forget()
        for index in range(start, len(plan.cases)):
            board.enter(rank, index)
            verdict = worker.run(plan, plan.cases[index])
            if rank == 0:
                message = {"case": index, "verdict": dataclasses.asdict(verdict)}
                os.write(pipe, json.dumps(message).encode() + b"\n")
            if verdict is not None and verdict.kind == "diverged":
                time.sleep(60)  # the process group is out of step: the driver ends this world
        if rank == 0:
            os.write(pipe, b"null\n")
