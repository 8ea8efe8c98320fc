"""The number of processes is checked before anything starts, and a plan must be the same everywhere."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale import Plan, parallelize
from vescale_testing import ranks, run_ranks


def start(plan):
    return parallelize(plan, nn.Linear(1, 1), torch.optim.SGD, module_plan={})


def test_plain_python_process_is_a_world_of_one():
    def body():
        start(Plan())
        return dist.is_initialized(), dist.get_world_size()

    assert run_ranks(body, 1, backend=None) == [(True, 1)]


def test_group_made_here_is_closed_at_the_end():
    """And only then: a program that ends without closing it can abort."""
    code = (
        "import atexit, torch, torch.distributed as dist, vescale\n"
        "atexit.register(lambda: print('open' if dist.is_initialized() else 'closed'))\n"  # runs last
        "vescale.parallelize(vescale.Plan(), torch.nn.Linear(1, 1), torch.optim.SGD)\n"
        "print('open' if dist.is_initialized() else 'closed')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["open", "closed"]


def test_plan_for_more_processes_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"expected dp \* tp \* pp = 2 \* 1 \* 1 = 2 processes, got 1; start 2 "):
        start(Plan(dp=2))
    for name, value in {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"expected dp \* tp \* pp = 4 \* 2 \* 1 = 8 processes, got 6; start 8 "):
        start(Plan(dp=4, tp=2))
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_plan_without_cuda_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RuntimeError, match=r"expected a GPU for device 'cuda', got torch\.cuda\.is_avail"):
        start(Plan(device="cuda"))


@ranks(3)
def test_group_that_is_there_is_used():
    group = dist.group.WORLD
    start(Plan(dp=3))
    assert dist.group.WORLD is group
    with pytest.raises(ValueError, match=r"expected dp \* tp \* pp = 2 \* 1 \* 1 = 2 processes, got 3"):
        start(Plan(dp=2))


@ranks(3)
def test_plans_that_differ_name_the_ranks():
    match = r"expected the same plan on all ranks, got .* on ranks \[2\]; build it from equal arguments"
    with pytest.raises(ValueError, match=match) as error:
        start(Plan(dp=3, zero=int(dist.get_rank() == 2)))
    assert "rank 2: Plan(dp=3, tp=1, pp=1, ep=1, etp=1, cp=1, zero=1" in str(error.value)
    start(Plan(dp=3))
