"""Times of cases that take turns, each in a process of its own, or in as many as it has ranks.

What runs before a case changes its time by about a tenth: the interpreter specializes its bytecode to the types that it
meets, and memory is allocated in the holes that the last case left. A training program runs one case only, so each case
has its own process, forked from one that has run none. Machines change speed from minute to minute, so the processes
take turns on one core, one at a time, and ratios are taken within a round:

    parent     make all   | turn of a | turn of b | turn of c |   turn of a | ...
    process a  ======          ====                                  ====
    process b  =======                     ====
    process c  =====                                   ====

Cases of several ranks are worlds of their own within one, on all cores: `steps_in_turns`. Ranks wait for each other, so
their times are of the clock. In one process, what one case frees would spare another the page faults of new memory.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch.distributed as dist
from measure import time_in_turns, with_processor_time
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import init_device_mesh
from vescale_testing import run_ranks

__all__ = ["Made", "Steps", "processor_time_in_turns", "steps_in_turns"]

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

    For cases without waiting: processor time is then complete, and other programs change it least.

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


@dataclass(frozen=True)
class Steps:
    """What rank 0 of a case has seen.

    Attributes:
        losses: of the first steps, which are not timed.
        seconds: by the clock, round by round.
        processor: seconds of the processor, those of gloo's threads included.
    """

    losses: list[float]
    seconds: list[float]
    processor: list[float]


def steps_in_turns(
    makers: dict[str, Callable[[DeviceMesh], Callable[[], float]]],
    world: int,
    axis: str,
    *,
    num_rounds: int,
    num_checked: int = 3,
) -> dict[str, Steps]:
    """Train cases of several gloo ranks, each in processes of its own, in turns.

    Args:
        makers: called on each rank of a case with its mesh; what they return does a training step: the loss.
        world: ranks of a case.
        axis: name of the only axis of the mesh.
        num_rounds: that are measured, after one more.
        num_checked: first steps, of which losses are kept.
    """
    every = run_ranks(_steps_of_a_rank, world * len(makers), makers, world, axis, num_rounds, num_checked, timeout=1500)
    return dict(zip(makers, every[::world], strict=True))


def _steps_of_a_rank(makers: dict, world: int, axis: str, num_rounds: int, num_checked: int) -> Steps:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    mesh = init_device_mesh("cpu", (len(makers), world), mesh_dim_names=("case", axis))
    own = list(makers)[dist.get_rank() // world]
    step = makers[own](mesh[axis])
    losses = [step() for _ in range(num_checked)]
    processor: list[float] = []
    cases = {name: with_processor_time(step, processor) if name == own else lambda: None for name in makers}
    seconds = time_in_turns(cases, num_rounds=num_rounds, num_warmup=1)[own]
    return Steps(losses, seconds, processor[1:])
