"""The end of a program waits for late threads of gloo, and only where there are any."""

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import Replicate, Shard, _exit, distribute_tensor, init_device_mesh
from vescale_testing import ranks

# The order in which a program ends: ours comes before Python takes the lock away from other threads.
PROGRAM = """
import atexit, threading, time
atexit.register(lambda: print("late thread", "ran" if done.is_set() else "never ran"))
import torch.distributed as dist
from vescale.dtensor import _exit
_exit._has_gloo_threads = lambda: True
done, ending = threading.Event(), threading.Event()
threading.Thread(target=lambda: (ending.wait(), done.set()), daemon=True).start()
atexit.register(ending.set)
"""


@ranks(1)
def test_without_threads_nothing_waits(monkeypatch):
    dist.destroy_process_group()
    monkeypatch.setattr(_exit.time, "sleep", lambda _seconds: pytest.fail("waited"))
    assert not _exit.let_threads_finish()


@ranks(2)
def test_dtensors_leave_threads_behind():
    """What stock torch does; plain collectives leave none."""
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)]).redistribute(placements=[Replicate()])
    dist.destroy_process_group()
    began = time.monotonic()
    assert _exit.let_threads_finish()
    assert time.monotonic() - began >= _exit.SECONDS


@ranks(2)
def test_plain_collectives_leave_none():
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    assert not _exit.let_threads_finish()


def test_it_is_done_when_a_program_ends():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == "late thread ran\n", result.stderr
