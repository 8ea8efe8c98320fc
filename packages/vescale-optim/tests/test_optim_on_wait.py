"""A meter sees the waits for reductions and gathers of data parallelism."""

import contextlib

import pytest
import torch
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.dtensor.extension import on_wait
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks


class Counter:
    def __init__(self):
        self.num_waits = 0

    @contextlib.contextmanager
    def waiting(self, _device_type):
        self.num_waits += 1
        yield


@ranks(2)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_waits_of_a_step_are_seen(zero):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), mesh, zero=zero)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()  # recorded
    optimizer.step()
    optimizer.zero_grad()
    counter, no_sync = Counter(), Counter()
    with on_wait(counter):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert counter.num_waits > 0
    if zero == 0:
        with on_wait(no_sync), model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        assert no_sync.num_waits < counter.num_waits
