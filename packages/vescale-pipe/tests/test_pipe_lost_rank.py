"""A stage that ends during a step ends the others, soon, with an error that names it, the transfer and the step."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale.pipe._lost_ranks import Failures
from vescale_testing import RankFailure, ranks, run_ranks


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


class Block(nn.Module):
    """A linear layer that ends its process in a call of forward, or before its gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.leave_at, self.in_backward = nn.Linear(4, 4), 0, None, False

    def forward(self, x):
        self.calls += 1
        if self.calls == self.leave_at:
            if not self.in_backward:
                os._exit(7)
            x.register_hook(lambda _: os._exit(7))
        return self.linear(x)


def train(mesh_of, lost, in_backward):
    model = nn.Sequential(*(Block() for _ in range(dist.get_world_size())))
    if dist.get_rank() == lost:
        model[lost].leave_at, model[lost].in_backward = 6, in_backward  # the second micro-batch of the second step
    engine = PipelineEngine(model, mesh_of(), PipelinePlan("1f1b", 4), loss_fn=torch.mean)
    for _ in range(2):
        engine(torch.ones(8, 4)).backward()


@pytest.mark.parametrize(
    ("world_size", "lost", "in_backward"), [(2, 1, False), (2, 0, False), (4, 2, False), (3, 1, True)]
)
def test_the_other_stages_name_the_lost_rank(pipeline_mesh, world_size, lost, in_backward):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank {lost}: left with exit status 7") as failure:
        run_ranks(train, world_size, pipeline_mesh, lost, in_backward, timeout=60)
    assert time.monotonic() - began < 60  # gloo alone waits half an hour
    assert set(failure.value.exceptions) == set(range(world_size)) - {lost}, failure.value
    for rank, error in failure.value.exceptions.items():
        expected = (
            rf"(the receive of (values|gradients) from stage \d|a send to another stage|the broadcast of the loss) "
            rf"over axis 'pp' in step 2 failed on rank {rank}; no answer from rank {lost}: ended, or hangs elsewhere\n"
        )
        assert re.match(expected, str(error)), error


@ranks(2)
def test_a_slow_stage_is_waited_for(pipeline_mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2), loss_fn=torch.mean)
    engine(torch.ones(4, 4)).backward()
    if dist.get_rank() == 0:
        time.sleep(0.5)
    assert torch.isfinite(engine(torch.ones(4, 4)))
