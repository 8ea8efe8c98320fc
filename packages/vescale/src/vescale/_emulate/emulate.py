"""`emulate`: run a training function on all ranks of a plan, in one process."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from vescale.plan import Plan

from .._torch import RankWorld, groups_by_thread, use_world
from .group import EmulatedGroup, Meetings
from .store import EmulatedStore
from .turns import Ranks, is_rank

__all__ = ["emulate"]

#: Each rank is a thread, of which a process has some thousands at most.
MAX_RANKS = 4096


def emulate(plan: Plan | int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` on every rank of a plan, in this process, and return the results by rank.

    The ranks are threads, of which one runs at a time, from one wait for another rank to the next. So the run repeats
    exactly, and a debugger stops all ranks at once. Collectives add in the order of gloo's: results are bit for bit
    those of as many processes on CPUs. Random streams, the environment variables of torchrun and the process groups
    belong to the rank that runs. If all ranks wait for each other, or meet in different collectives, that is an error
    on the spot.

    Args:
        plan: whose ranks to run, on the CPU; or their number.
        function: a training function as it is started on each rank. It may call `vescale.parallelize`, or
            ``torch.distributed.init_process_group()``.
        args: for it; objects that are passed are shared by all ranks.

    Returns:
        What the function returned on rank 0, 1, ...

    Raises:
        TypeError: the function cannot be called, or the plan is neither a plan nor a number.
        ValueError: the plan is for another device than the CPU, or the number is not from 1 to 4096.
        RuntimeError: this process has a process group already; all ranks wait for each other, with what each waits for.
        BaseException: the first error of a rank, with a note that names the rank.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import vescale
        >>> def total():
        ...     dist.init_process_group("gloo")
        ...     value = torch.tensor([float(dist.get_rank())])
        ...     dist.all_reduce(value)
        ...     return value.item()
        >>> vescale.emulate(4, total)
        [6.0, 6.0, 6.0, 6.0]
    """
    size = _size_of(plan)
    if not callable(function):
        raise TypeError(
            f"emulate: expected a training function for function, got {type(function).__name__}; pass the function "
            "itself, and its arguments after it"
        )
    if is_rank():
        raise RuntimeError(
            "emulate: expected a call outside of emulated ranks, got one on a rank; call it once, around"
        )
    if dist.is_initialized():
        raise RuntimeError("emulate: expected a process without a process group, got one with it; destroy it before")
    EmulatedGroup.meetings = Meetings()
    with groups_by_thread(EmulatedGroup, EmulatedStore()):
        return Ranks(size, RankWorld, use_world).run(functools.partial(_on_a_rank, function, args))


def _size_of(plan: Plan | int) -> int:
    """Return the number of ranks of a plan that can be emulated."""
    if isinstance(plan, Plan):
        if plan.device != "cpu":
            raise ValueError(
                f"emulate: expected a plan for the device 'cpu', got {plan.device!r}; use "
                "dataclasses.replace(plan, device='cpu')"
            )
        return _possible(plan.world_size)
    if isinstance(plan, bool):
        raise TypeError(f"emulate: expected a Plan or a number of ranks for plan, got {plan!r}")
    try:
        size = operator.index(plan)
    except TypeError:
        raise TypeError(f"emulate: expected a Plan or a number of ranks for plan, got {plan!r}") from None
    return _possible(size)


def _possible(size: int) -> int:
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(
            f"emulate: expected a plan of 1 to {MAX_RANKS} ranks, got {size}; each is a thread of this process"
        )
    return size


def _on_a_rank(function: Callable[..., Any], args: tuple, number: int) -> Any:  # noqa: ARG001
    try:
        return function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
