"""The end of a program waits for late threads of gloo, and only where there are any."""

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale.dtensor.extension import wait_for_gloo_threads
from vescale_testing import ranks

# The order in which a program ends: ours comes before Python takes the lock away from other threads. Linux gives the
# name of a thread in a file, which the thread may write.
PROGRAM = """
import atexit, threading, time
from pathlib import Path
atexit.register(lambda: print("late thread", "ran" if done.is_set() else "never ran"))
import torch.distributed as dist
import vescale.dtensor
named, done, waiting = threading.Event(), threading.Event(), threading.Event()
def late():
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
    named.set()
    waiting.wait()
    done.set()
def sleep(_seconds):  # the moment for which the end of the program waits
    waiting.set()
    done.wait()
time.sleep = sleep
threading.Thread(target=late, daemon=True).start()
named.wait()
"""


@ranks(1)
def test_without_threads_nothing_waits(monkeypatch):
    dist.destroy_process_group()
    monkeypatch.setattr(time, "sleep", lambda _seconds: pytest.fail("waited"))
    assert not wait_for_gloo_threads()


@ranks(2)
def test_dtensors_leave_threads_behind():
    """What stock torch does; plain collectives leave none."""
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)]).redistribute(placements=[Replicate()])
    dist.destroy_process_group()
    began = time.monotonic()
    assert wait_for_gloo_threads()
    assert time.monotonic() - began >= 0.1


@ranks(2)
def test_plain_collectives_leave_none():
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    assert not wait_for_gloo_threads()


@pytest.mark.parametrize("name, end", [("gloo_loop", "ran"), ("other", "never ran")])
def test_it_is_done_when_a_program_ends(name, end):
    program = PROGRAM.replace("NAME", repr(name))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == f"late thread {end}\n", result.stderr
