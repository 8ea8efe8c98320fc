"""A meter measures a rank's waits for other stages: the stage after a slow one waits."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks


class Clock:
    def __init__(self):
        self.seconds, self.devices = 0.0, set()

    @contextlib.contextmanager
    def waiting(self, device_type):
        began = time.perf_counter()
        yield
        self.devices.add(device_type)
        self.seconds += time.perf_counter() - began


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1)
        return super().forward(x)


@ranks(2)
def test_the_stage_after_a_slow_one_waits():
    torch.manual_seed(0)
    model = nn.Sequential(Slow(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    engine = PipelineEngine(
        model, mesh, PipelinePlan(num_microbatches=2, split=["1"]), loss_fn=lambda y: y.square().mean()
    )
    engine(torch.ones(4, 4)).backward()  # recorded
    clock = Clock()
    with pytest.raises(TypeError, match=r"PipelineEngine.on_wait: expected WaitMeter for meter, got 3"):
        engine.on_wait(3)
    with engine.on_wait(clock):
        engine(torch.ones(4, 4)).backward()
    assert clock.devices == {"cpu"}
    first = clock.seconds
    if dist.get_rank() == 1:
        assert first > 0.15
    engine(torch.ones(4, 4)).backward()
    assert clock.seconds == first  # the meter is closed


@ranks(2)
def test_a_meter_and_a_measured_step_agree():
    torch.manual_seed(0)
    model = nn.Sequential(Slow(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    engine = PipelineEngine(
        model, mesh, PipelinePlan(num_microbatches=2, split=["1"]), loss_fn=lambda y: y.square().mean()
    )
    engine(torch.ones(4, 4)).backward()
    clock = Clock()
    with engine.timing() as timing, engine.on_wait(clock):
        engine(torch.ones(4, 4)).backward()
    (step,) = timing.steps
    assert step.makespan > 0.2
    assert clock.seconds > 0.15 if dist.get_rank() == 1 else clock.seconds < step.makespan
