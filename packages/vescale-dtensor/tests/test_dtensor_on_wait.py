"""A meter measures every wait for a collective while it is open, of DTensors and of code on top of them."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale.dtensor.extension import METERS, on_wait, waits_of
from vescale_testing import ranks


class Counter:
    def __init__(self):
        self.devices, self.depth = [], 0

    @contextlib.contextmanager
    def waiting(self, device_type):
        self.devices.append(device_type)
        self.depth += 1
        assert self.depth == 1, "waits do not nest"
        try:
            yield
        finally:
            self.depth -= 1


@ranks(2)
def test_a_wait_is_seen_while_the_meter_is_open():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    first, second = Counter(), Counter()
    x.redistribute(placements=[Replicate()]).to_local()
    with on_wait(first):
        x.redistribute(placements=[Replicate()]).to_local()  # by torch's functional operators
        with on_wait(second):
            waits_of(mesh.get_group()).run("all-reduce", dist.all_reduce, torch.ones(2))
    x.redistribute(placements=[Replicate()]).to_local()
    assert first.devices == ["cpu"] * 2
    assert second.devices == ["cpu"]
    assert METERS == []


@ranks(2)
def test_backward_is_seen():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    y = distribute_tensor(torch.ones(4), mesh, [Replicate()]).requires_grad_()
    moved = y.redistribute(placements=[Shard(0)])  # free in forward, a gather in backward
    counter = Counter()
    with on_wait(counter):
        loss = (moved * moved).sum()
        assert counter.devices == []
        loss.backward()
        y.grad.sum().to_local()
    assert counter.devices == ["cpu"] * len(counter.devices) != []


def test_what_is_no_meter_is_refused():
    with pytest.raises(TypeError, match=r"on_wait: expected WaitMeter for meter, got 3"):
        on_wait(3)


def test_a_meter_is_removed_after_an_error():
    with pytest.raises(KeyError), on_wait(Counter()):
        raise KeyError
    assert METERS == []
