"""The number of processes is checked before anything starts, and a plan must be the same everywhere."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from vescale import Plan
from vescale._process_group import check_same_plan, ensure_process_group
from vescale_testing import ranks, run_ranks


def test_plain_python_process_is_a_world_of_one():
    def body():
        ensure_process_group(Plan())
        return dist.is_initialized(), dist.get_world_size()

    assert run_ranks(body, 1, backend=None) == [(True, 1)]


def test_group_made_here_is_closed_at_the_end():
    """And only then: a program that ends without closing it can abort."""
    code = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print('open' if dist.is_initialized() else 'closed'))\n"  # runs last
        "import vescale._process_group as group\n"
        "group.ensure_process_group(group.Plan())\n"
        "print('open' if dist.is_initialized() else 'closed')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["open", "closed"]


def test_plan_for_more_processes_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"world size 1 is not dp\*tp\*pp = 2\*1\*1 = 2: start 2 processes"):
        ensure_process_group(Plan(dp=2))
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"world size 6 is not dp\*tp\*pp = 2\*2\*2 = 8"):
        ensure_process_group(Plan(dp=2, tp=2, pp=2))
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_plan_without_cuda_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match=r"expected a GPU for device 'cuda', got torch\.cuda\.is_avail"):
        ensure_process_group(Plan(device="cuda"))


@ranks(3)
def test_group_that_is_there_is_used():
    group = dist.group.WORLD
    ensure_process_group(Plan(dp=3))
    assert dist.group.WORLD is group
    with pytest.raises(ValueError, match=r"world size 3 is not dp\*tp\*pp = 2\*1\*1 = 2"):
        ensure_process_group(Plan(dp=2))


@ranks(3)
def test_plans_that_differ_name_the_ranks():
    check_same_plan(Plan(dp=3))
    with pytest.raises(ValueError, match=r"expected the same plan on all ranks, got .* on ranks \[2\]") as error:
        check_same_plan(Plan(dp=3, zero=int(dist.get_rank() == 2)))
    assert "rank 2: Plan(dp=3, tp=1, pp=1, zero=1" in str(error.value)
