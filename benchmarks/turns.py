"""Processor time of cases that take turns, each in a process of its own.

What runs before a case decides about a tenth of its time: the interpreter specializes its bytecode to the types that it
meets, memory comes from where the last case left holes. A training program has one way of being parallel, so each case
has a process of its own, forked from one that has run none; and machines change speed from minute to minute, so the
processes take turns on one core, one at a time, and a ratio is taken round by round:

    parent     make all   | turn of a | turn of b | turn of c |   turn of a | ...
    process a  ======          ====                                  ====
    process b  =======                     ====
    process c  =====                                   ====
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

__all__ = ["Made", "processor_time_in_turns"]

WARM = 0.3  # of a turn, untimed before it: caches have been used by others


@dataclass(frozen=True)
class Made:
    """A case in its process.

    Attributes:
        steps: what to time, by name.
        remark: what to tell about it, of a type that can be pickled.
    """

    steps: dict[str, Callable[[], object]]
    remark: object = None


def processor_time_in_turns(
    makers: dict[str, Callable[[], Made]], *, num_rounds: int, turn: float, num_warmup: int = 2
) -> tuple[dict[str, list[float]], dict[str, object]]:
    """Return the processor seconds of one call of every step, round by round, and the remarks of the makers by name.

    For cases that wait for nobody: there processor time is all there is, and other programs change it least.

    Args:
        makers: called in the forked processes, all at once.
        num_rounds: that are measured.
        turn: seconds for which a step is called in a round, at least once; the mean of these calls counts.
        num_warmup: rounds before, that fill caches.

    Raises:
        RuntimeError: with the traceback of what was raised in a process.
    """
    fork = multiprocessing.get_context("fork")
    workers: dict[str, tuple[Connection, multiprocessing.Process]] = {}
    seconds: dict[str, list[float]] = {}
    try:
        for name, make in makers.items():
            here, there = fork.Pipe()
            process = fork.Process(target=_serve, args=(there, make, turn), daemon=True)
            process.start()
            there.close()
            workers[name] = here, process
        made = {name: _answer(name, here) for name, (here, _) in workers.items()}
        _share_a_core([process.pid for _, process in workers.values()])
        for round_ in range(num_warmup + num_rounds):
            for name, (here, _) in workers.items():
                for step in made[name][0]:
                    here.send(step)
                    passed = _answer(name, here)
                    if round_ >= num_warmup:
                        seconds.setdefault(step, []).append(passed)
    finally:
        for here, process in workers.values():
            here.close()
            process.terminate()
            process.join()
    return seconds, {name: remark for name, (_, remark) in made.items()}


def _share_a_core(processes: list[int]) -> None:
    """Let all processes run on one core: cores of one machine differ by what else runs on them."""
    if hasattr(os, "sched_setaffinity"):
        core = max(os.sched_getaffinity(0))
        for process in processes:
            os.sched_setaffinity(process, {core})


def _answer(name: str, connection: Connection) -> object:
    try:
        answer = connection.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name} died") from None
    if isinstance(answer, _Failure):
        raise RuntimeError(f"{name} failed:\n{answer.text}")
    return answer


@dataclass(frozen=True)
class _Failure:
    text: str


def _serve(connection: Connection, make: Callable[[], Made], turn: float) -> None:
    """Make a case and time the steps that are asked for, until the parent ends this process."""
    try:
        made = make()
        connection.send((list(made.steps), made.remark))
        while True:
            step = made.steps[connection.recv()]
            _mean(step, WARM * turn)
            connection.send(_mean(step, turn))
    except (EOFError, BrokenPipeError):
        return
    except Exception:
        connection.send(_Failure(traceback.format_exc()))


def _mean(step: Callable[[], object], least: float) -> float:
    """Call `step` for at least so many processor seconds and return those of one call."""
    start, num_calls, passed = time.process_time(), 0, 0.0
    while not num_calls or passed < least:
        step()
        num_calls += 1
        passed = time.process_time() - start
    return passed / num_calls
