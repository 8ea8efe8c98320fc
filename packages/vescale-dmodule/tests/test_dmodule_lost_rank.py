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
from vescale.dtensor import Replicate, Shard, disabled
from vescale.dtensor.extension import Failures
from vescale_testing import RankFailure, halved, ranks, run_ranks

PLAN = {
    "parameter": {r"blocks\.\d\.up\.weight": [Shard(0)], r"blocks\.\d\.down\.weight": [Shard(1)]},
    "forward": {"input": [[Replicate()]], r"blocks\.\d\.output": [[Replicate()]]},
}


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


class Block(nn.Module):
    """A feed-forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class Blocks(nn.Module):
    """Two blocks, between which a rank ends its process in a call of forward, or of backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leaves = ""

    def forward(self, x):
        hidden = self.blocks[0](x)
        if self.leaves == "forward":
            os._exit(7)
        if self.leaves == "backward":
            hidden.register_hook(lambda _: os._exit(7))
        return self.blocks[1](hidden)


def train(mode, lost, when):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Blocks(), mesh["tp"], PLAN, mode=mode)
    x = torch.ones(4, 8, requires_grad=True)
    model(x).sum().backward()
    if dist.get_rank() == lost:
        model.leaves = when
    model(x).sum().backward()


def errors_of(program, world_size, *arguments, lost):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank {lost}: left with exit status 7") as failure:
        run_ranks(program, world_size, *arguments, timeout=60)
    assert time.monotonic() - began < 60  # gloo alone waits half an hour
    assert set(failure.value.exceptions) == set(range(world_size)) - {lost}, failure.value
    return {rank: str(error) for rank, error in failure.value.exceptions.items()}


@halved
@pytest.mark.parametrize("mode", ["eager", "static", "compile"])
@pytest.mark.parametrize(("world_size", "lost", "when"), [(2, 1, "forward"), (4, 2, "forward"), (3, 0, "backward")])
@pytest.mark.usefixtures("graphs")
def test_the_others_name_the_lost_rank(mode, world_size, lost, when):
    for rank, message in errors_of(train, world_size, mode, lost, when, lost=lost).items():
        expected = (
            rf"the (all-reduce|all-gather|reduce-scatter|comparison of ranks) over axis 'tp' failed on rank {rank}; "
            rf"no answer from rank {lost}: ended, or hangs elsewhere\n"
        )
        assert re.match(expected, message), message


def train_without(mode, lost, when):
    with disabled("process"):
        train(mode, lost, when)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_stock_collectives_name_no_rank(when):
    for message in errors_of(train_without, 2, "eager", 1, when, lost=1).values():
        assert "gloo" in message, message
        assert "rank 1" not in message


@ranks(2)
def test_a_slow_rank_is_waited_for():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Blocks(), mesh["tp"], PLAN, mode="static")
    model(torch.ones(4, 8))
    if dist.get_rank() == 1:
        time.sleep(0.5)
    assert torch.isfinite(model(torch.ones(4, 8))).all()
