"""A rank that ends during a tensor-parallel step ends the others, soon, with an error that names it and the axis."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard
from vescale.dtensor.extension import Failures
from vescale_testing import RankFailure, ranks, run_ranks

PLAN = {
    "parameter": {r"up\.weight": [Shard(0)], r"down\.weight": [Shard(1)]},
    "forward": {"input": [[Replicate()]], "output": [[Replicate()]]},
}


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


class Block(nn.Module):
    """A feed-forward that ends its process in a call of forward, or of backward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.leaves = ""

    def forward(self, x):
        hidden = self.up(x)
        if self.leaves == "forward":
            os._exit(7)
        if self.leaves == "backward":
            hidden.register_hook(lambda _: os._exit(7))
        return self.down(hidden)


def train(mode, lost, when):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Block(), mesh["tp"], PLAN, mode=mode)
    x = torch.ones(4, 8, requires_grad=True)
    model(x).sum().backward()
    if dist.get_rank() == lost:
        model.leaves = when
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("world_size", "lost", "when"), [(2, 1, "forward"), (4, 2, "forward"), (3, 0, "backward"), (2, 0, "backward")]
)
def test_the_others_name_the_lost_rank(world_size, lost, when):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank {lost}: left with exit status 7") as failure:
        run_ranks(train, world_size, "static", lost, when, timeout=60)
    assert time.monotonic() - began < 60  # gloo alone waits half an hour
    assert set(failure.value.exceptions) == set(range(world_size)) - {lost}, failure.value
    for rank, error in failure.value.exceptions.items():
        expected = (
            rf"the (all-reduce|all-gather|reduce-scatter) over axis 'tp' failed on rank {rank}; "
            rf"no answer from rank {lost}: ended, or hangs elsewhere\n"
        )
        assert re.match(expected, str(error)), error


@ranks(2)
def test_a_slow_rank_is_waited_for():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Block(), mesh["tp"], PLAN, mode="static")
    model(torch.ones(4, 8))
    if dist.get_rank() == 1:
        time.sleep(0.5)
    assert torch.isfinite(model(torch.ones(4, 8))).all()
