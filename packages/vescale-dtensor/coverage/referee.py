"""Persistent ranks that run programs, and the verdict on each program.

The referee forks the ranks once and sends them one program after another. Each rank replies with its shards of all
results, or with the error and the line that raised it; nothing is compared by collectives, so a program that leaves the
process group out of step cannot disturb the comparison. If a rank ends, sleeps while another has replied, or started
other collectives, the referee ends all ranks and forks new ones for the next program::

    right     every result equals that of one device
    refused   all ranks raised one of our refusals, after the same collectives
    obscure   all ranks raised the same other error
    wrong     a result differs, or replicas of it do
    hang      ranks wait, or raise different errors, or have started different numbers of collectives
    died      a rank's process ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import _torch
import torch
from combos import parse
from pieces import Mismatch, cut, part
from program import RTOL, LineFailed, Program, run, same_results, weight
from records import decoded, described, encoded, head, unpacked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from world import cpu_time, enter_world, last_lines

__all__ = ["BAD", "KINDS", "Referee", "Verdict"]

KINDS = ("right", "refused", "obscure", "wrong", "hang", "died")
BAD = KINDS[2:]

LOOK_S = 0.25  # between two looks at the processes
STUCK_S = 3.0  # a rank sleeps while another one has replied
STUCK_AFTER_ERROR_S = 0.8  # the other one has raised
HUNG_S = 10.0  # all ranks sleep
LIMIT_S = 120.0  # for one program, whatever the ranks do


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a program: one of `KINDS`, the line (or ``gradient``), and the difference or the error."""

    kind: str
    where: str = ""
    text: str = ""

    @property
    def is_bad(self) -> bool:
        """Return whether the program is a finding."""
        return self.kind in BAD


class Referee:
    """Ranks of one mesh shape, forked when the first program comes, and again after they were lost."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh, self.num_ranks = mesh, torch.Size(mesh).numel()
        self._pids: list[int] = []
        self._pipes: list[Connection] = []

    def judge(self, program: Program, expected: dict) -> Verdict:
        """Run a program on the ranks and compare it with the results of one device."""
        if not self._pids:
            self._fork()
        for pipe in self._pipes:
            pipe.send(program)
        replies, verdict = self._replies()
        verdict = verdict or _verdict(program, replies, expected)
        if verdict.kind in ("hang", "died"):
            self.end()
        return verdict

    def end(self) -> None:
        """Kill the ranks and reap them."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()
        if self._pids:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._pids, self._pipes = [], []

    def _replies(self) -> tuple[list[dict | None], Verdict | None]:
        """Return the replies of all ranks, or the verdict that they cannot be had."""
        replies: list[dict | None] = [None] * self.num_ranks
        still: dict[int, tuple] = {}
        started = time.monotonic()
        while None in replies:
            waiting = [rank for rank, reply in enumerate(replies) if reply is None]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=LOOK_S)
            for rank in waiting:
                if self._pipes[rank] in ready:
                    try:
                        replies[rank] = self._pipes[rank].recv()
                    except (EOFError, OSError):
                        time.sleep(0.1)
                        return replies, Verdict("died", "", f"rank {rank}: {last_lines(self._folder, rank)}")
            if not ready and (found := self._stuck(replies, still, started)):
                return replies, found
        return replies, None

    def _stuck(self, replies: list[dict | None], still: dict, started: float) -> Verdict | None:
        now = time.monotonic()
        behind = [rank for rank, reply in enumerate(replies) if reply is None]
        for rank in behind:
            seen = cpu_time(self._pids[rank])
            if still.get(rank, (None,))[0] != seen:
                still[rank] = seen, now
        longest = min(now - still[rank][1] for rank in behind)
        errors = [reply["error"] for reply in replies if reply and reply["error"]]
        patience = HUNG_S if len(behind) == len(replies) else STUCK_AFTER_ERROR_S if errors else STUCK_S
        if longest < patience and now - started < LIMIT_S:
            return None
        where, name, text, _ = errors[0] if errors else ("", "", "", None)
        others = f"others raised {name}: {text}" if errors else "others had finished"
        return Verdict("hang", where, f"ranks {behind} wait; {others if len(behind) < len(replies) else 'all of them'}")

    def _fork(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hunt-"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # forking with threads: torch's are idle
            for rank in range(self.num_ranks):
                ours, theirs = Pipe()
                pid = os.fork()
                if pid == 0:
                    for pipe in (*self._pipes, ours):
                        pipe.close()
                    _rank_main(rank, self.mesh, self._folder, theirs)
                theirs.close()
                self._pids.append(pid)
                self._pipes.append(ours)


# ------------------------------------------------------------------------------------------------- the verdict


def _verdict(program: Program, replies: list[dict], expected: dict) -> Verdict:
    errors = [reply["error"] for reply in replies]
    started = {reply["collectives"] for reply in replies}
    if len({error and error[:2] for error in errors}) > 1 or len(started) > 1:
        found = next(error for error in (*errors, ("", "", "", True)) if error)
        each = "; ".join(f"rank {r}: {e[1] + ': ' + e[2][:160] if e else 'no error'}" for r, e in enumerate(errors))
        return Verdict("hang", found[0], f"the ranks differ, after {sorted(started)} collectives: {each}")
    if errors[0]:
        where, name, text, is_ours = errors[0]
        return Verdict("refused" if is_ours else "obscure", where, f"{name}: {text}")
    results = [reply["results"] for reply in replies]
    kinds = {repr([(name, head(entry)) for name, entry in result.items()]) for result in results}
    if len(kinds) > 1:
        return Verdict("hang", "", "the ranks returned different kinds: " + " | ".join(kinds)[:700])
    name = ""
    try:
        actual = {}
        for name in results[0]:
            entries = [unpacked(result[name]) for result in results]
            actual[name] = decoded(entries, program.mesh) if entries[0] is not None else None
        name = ""
        same_results(actual, expected, RTOL[program.precision(expected)])
    except Mismatch as finding:
        return Verdict("wrong", "", f"{name + ': ' if name else ''}{finding}")
    return Verdict("right")


# ------------------------------------------------------------------------------------------------- a rank


def _rank_main(rank: int, mesh_shape: tuple[int, ...], folder: Path, pipe: Connection) -> None:
    try:
        enter_world(rank, torch.Size(mesh_shape).numel(), folder)
        mesh = init_device_mesh("cpu", mesh_shape)
        gc.freeze()  # the collection after each program then looks at what programs leave
        while True:
            program = pipe.recv()
            pipe.send(_reply(program, mesh))
            gc.collect()
    except EOFError:
        pass
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _reply(program: Program, mesh) -> dict:
    """Return this rank's shards of all results, or the error, and how many collectives the program started."""
    before = _torch.collectives_started(mesh)
    error, results = None, {}
    try:
        found = run(program, _sharded_inputs(program, mesh), _move, lambda n, out: _weight(n, out, mesh))
    except LineFailed as failed:
        error = (failed.where, *described(failed.__cause__))
    collectives = _torch.collectives_started(mesh) - before
    if error is None:
        with torch.no_grad():
            results = {name: None if leaf is None else encoded(leaf) for name, leaf in found.items()}
    return {"error": error, "collectives": collectives, "results": results}


def _sharded_inputs(program: Program, mesh) -> list[DTensor]:
    made = []
    for number, each in enumerate(program.inputs):
        whole, placements = each.value(number), parse(each.placements)
        local = part(whole, mesh.shape, mesh.get_coordinate(), placements, seed=number + 17)
        tensor = _torch.make(local, whole.shape, whole.stride(), mesh, placements)
        made.append(tensor.requires_grad_(each.requires_grad and program.order > 0))
    return made


def _move(tensor: DTensor, placements: list) -> DTensor:
    return tensor.redistribute(placements=placements).clone()


def _weight(number: int, out: torch.Tensor, mesh) -> torch.Tensor:
    """Return the weight of a result, sharded as the result is for every second one, else replicated."""
    whole = weight(number, out)
    if not isinstance(out, DTensor):
        return whole
    placements = [Replicate() if p.is_partial() or number % 2 else p for p in out.placements]
    local = cut(whole, mesh.shape, mesh.get_coordinate(), placements).clone()
    return _torch.make(local, whole.shape, whole.stride(), mesh, placements)
