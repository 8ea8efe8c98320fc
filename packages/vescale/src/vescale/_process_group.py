"""Make sure that torch.distributed is initialised as a plan needs it, before anything is communicated.

    process group is there already        used as it is, and left to who made it
    started by torchrun                   initialised from the environment, nccl for cuda and gloo for cpu
    started as a plain python process     a group of this one process, so that one script serves both

A group made here is closed when the program ends, see Note [the last collective].
"""

import atexit
import logging
import os
import time

import torch
import torch.distributed as dist

from vescale.plan import Plan

logger = logging.getLogger("vescale")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_LAST_COLLECTIVE_SECONDS = 0.1


def ensure_process_group(plan: Plan) -> None:
    """Check the number of processes against the plan, and initialise torch.distributed if nobody has.

    Raises:
        ValueError: the number of processes is not ``dp * tp * pp``; nothing has been initialised then.
        RuntimeError: the plan wants cuda and there is none.
    """
    launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    started = int(os.environ["WORLD_SIZE"]) if launched else 1
    world_size = dist.get_world_size() if dist.is_initialized() else started
    plan.check_world(world_size)
    if plan.device == "cuda":
        _select_gpu()
    if dist.is_initialized():
        return
    backend = BACKENDS[plan.device]
    logger.info("initialising torch.distributed: %s, %d processes", backend, world_size)
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_close_process_group)


def _close_process_group() -> None:
    """Destroy the group at the end of the program, and let gloo's threads finish.

    Note [the last collective]: gloo's worker thread frees the tensors of a collective after it has told the caller
    that it is done, and needs Python's lock for that. If the interpreter is shutting down by then, the thread is ended
    instead, and the process aborts after its last line: "terminate called without an active exception". Sleeping gives
    the lock away while the interpreter is still whole.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_LAST_COLLECTIVE_SECONDS)


def _select_gpu() -> None:
    """Select this process's device, unless the caller has selected another one than the first."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "the plan's device is 'cuda', but torch.cuda.is_available() is False; use Plan(device='cpu')"
        )
    if torch.cuda.current_device() == 0 and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def check_same_plan(plan: Plan) -> None:
    """Raise `ValueError` on every rank, naming the ranks, if the plans of the default group's ranks differ."""
    mine = repr(plan)
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    other = [rank for rank, text in enumerate(every) if text != every[0]]
    if other:
        raise ValueError(
            f"ranks {other} were given another plan than rank 0:\n"
            f"  rank 0: {every[0]}\n  rank {other[0]}: {every[other[0]]}"
        )
