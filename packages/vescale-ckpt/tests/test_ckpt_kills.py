"""A rank that is killed at any moment of saves ends the others with its name, and a complete checkpoint stays."""

import itertools
import os
import random
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import load, read_manifest, save, verify
from vescale.ckpt._lost_ranks import Failures
from vescale_testing import RankFailure, run_ranks

RANKS = 3


def state(value: int) -> dict:
    return {"replicated": torch.full((200, 200), float(value)), "step": value}


def save_until_killed(path: Path, killed: int, seconds: float) -> None:
    """Save again and again, every second time in the background, until one rank is killed."""
    step = int(read_manifest(path).leaves["step"])
    dist.barrier()
    if dist.get_rank() == killed:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for value in itertools.count(step + 1):
        save(path, state(value), overwrite=True, async_=value % 2 == 0)


@pytest.mark.parametrize("num_kills", [3, pytest.param(100, marks=pytest.mark.thorough)])
def test_kills_at_random_moments(tmp_path, monkeypatch, num_kills):
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 1.0)
    path, moments, steps = tmp_path / "c", random.Random(7), []
    save(path, state(0))
    for number in range(num_kills):
        killed = number % RANKS
        with pytest.raises(RankFailure, match=f"rank {killed}") as failure:
            run_ranks(save_until_killed, RANKS, path, killed, moments.uniform(0, 0.3), timeout=60)
        for error in failure.value.exceptions.values():
            assert re.search(rf"no answer from rank (\d+, )*{killed}\b", str(error))
        verify(path)
        steps.append(int(read_manifest(path).leaves["step"]))
        loaded = state(-1)
        load(path, loaded)
        assert loaded["replicated"].eq(steps[-1]).all()
    assert steps == sorted(steps)
    assert steps[-1] > 0
