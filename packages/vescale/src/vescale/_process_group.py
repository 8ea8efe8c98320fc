"""Initialize torch.distributed for a plan, before any communication.

    existing process group                used unchanged, and not destroyed here
    started by torchrun                   initialized from the environment, nccl for cuda and gloo for cpu
    started as a plain python process     a group of this one process, so that one script runs in both ways

A group created here is destroyed at the end of the program.
"""

import atexit
import logging
import os

import torch
import torch.distributed as dist

from vescale.dtensor.extension import differing_texts, group_of_ranks, wait_for_gloo_threads
from vescale.plan import Plan

logger = logging.getLogger("vescale")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def ensure_process_group(plan: Plan) -> None:
    """Check the number of processes against the plan, and initialize torch.distributed if there is no process group.

    Raises:
        ValueError: the number of processes is not ``dp * tp * pp``; nothing is initialized.
        RuntimeError: the plan's device is cuda, which is not available.
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
    logger.info("initializing torch.distributed: %s, %d processes", backend, world_size)
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_close_process_group)


def _close_process_group() -> None:
    """Destroy the group at the end of the program, then wait for gloo's threads, so that they cannot abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    wait_for_gloo_threads()


def _select_gpu() -> None:
    """Select this process's device, unless the caller already selected another than the first."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "expected a GPU for device 'cuda', got torch.cuda.is_available() == False; use Plan(device='cpu')"
        )
    if torch.cuda.current_device() == 0 and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def check_same_plan(plan: Plan) -> None:
    """Raise `ValueError` on every rank, with the ranks in its text, if plans differ in the default group."""
    texts = differing_texts(repr(plan), group_of_ranks(range(dist.get_world_size())))
    other = [rank for rank, text in texts.items() if text != texts[0]]
    if other:
        raise ValueError(
            f"expected the same plan on all ranks, got another one than rank 0's on ranks {other}; build it from equal "
            "arguments:\n"
            f"  rank 0: {texts[0]}\n  rank {other[0]}: {texts[other[0]]}"
        )
