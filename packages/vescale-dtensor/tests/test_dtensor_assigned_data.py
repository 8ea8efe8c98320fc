"""``x.data = y`` gives a DTensor the values of another one, as it does on one device."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale.dtensor import InterleavedShard, RaggedShard, disabled, distribute_tensor, strict
from vescale_testing import ranks, run_ranks


def values(*shape, dtype=torch.float64):
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def placements():
    """Return placements of a matrix of 6 rows; uneven and empty shards among them."""
    last = dist.get_world_size() - 1
    return [Replicate(), Shard(0), Shard(1), InterleavedShard(0, 2), RaggedShard((0,), (1,) * last + (6 - last,))]


def check_values_are_those_that_were_assigned():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for to in placements():
        for given in placements():
            x = nn.Parameter(distribute_tensor(torch.zeros(6, 3).double(), mesh, [to]))
            kept = x
            y = distribute_tensor(values(6, 3), mesh, [given])
            x.data = y
            assert kept is x
            assert x.placements == (to,)
            assert torch.equal(x.full_tensor(), values(6, 3))
            (2 * x).sum().backward()
            assert torch.equal(x.grad.full_tensor(), torch.full((6, 3), 2.0).double())
        x.data = DTensor.from_local(values(6, 3) / dist.get_world_size(), mesh, [Partial()])
        assert torch.equal(x.full_tensor(), values(6, 3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_are_those_that_were_assigned(world_size):
    run_ranks(check_values_are_those_that_were_assigned, world_size)


def check_shape_and_dtype_are_those_of_the_value():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = nn.Parameter(distribute_tensor(torch.zeros(6, 3), mesh, [Shard(0)]))
    x.data = distribute_tensor(values(5, 2), mesh, [Shard(0)])
    assert x.shape == (5, 2)
    assert x.dtype == torch.float64
    assert torch.equal((x + 1).full_tensor(), values(5, 2) + 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_shape_and_dtype_are_those_of_the_value(world_size):
    run_ranks(check_shape_and_dtype_are_those_of_the_value, world_size)


def check_the_tensors_share_memory():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = nn.Parameter(distribute_tensor(torch.zeros(6, 3).double(), mesh, [Shard(0)]))
    x.data = y = distribute_tensor(values(6, 3), mesh, [Shard(0)])
    y.mul_(2)
    x.data.add_(1)
    assert torch.equal(x.full_tensor(), 2 * values(6, 3) + 1)
    assert torch.equal(y.full_tensor(), 2 * values(6, 3) + 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_tensors_share_memory(world_size):
    run_ranks(check_the_tensors_share_memory, world_size)


@ranks(2)
def test_placements_that_do_not_fit_are_those_of_the_value():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement, given in itertools.product((Partial(), Shard(1)), (Shard(0), Replicate())):
        x = DTensor.from_local(values(6, 3), mesh, [placement])
        x.data = distribute_tensor(values(5), mesh, [given])
        assert x.placements == (given,)
        assert torch.equal((2 * x).full_tensor(), 2 * values(5))


@ranks(2)
def test_stock_loses_them():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = nn.Parameter(distribute_tensor(torch.zeros(6, 3).double(), mesh, [Shard(0)]))
    y = distribute_tensor(values(6, 3), mesh, [Shard(0)])
    with disabled("operators"):
        x.data = y
    assert not x.full_tensor().any()


@ranks(2)
def test_refused_where_ranks_could_differ():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    other = init_device_mesh("cpu", (1, dist.get_world_size()))
    x = distribute_tensor(torch.zeros(6, 3), mesh, [Shard(0)])
    rows = [
        (torch.zeros(6, 3), TypeError, "expected a DTensor to assign to `.data` of a DTensor of shape (6, 3)"),
        (None, TypeError, "placements (Shard(dim=0),), got NoneType; distribute it with distribute_tensor"),
        (distribute_tensor(torch.zeros(6, 3), other), ValueError, "expected a DTensor over the mesh"),
    ]
    for value, kind, message in rows:
        with pytest.raises(kind, match=re.escape(message)):
            x.data = value
    with strict(), pytest.raises(RuntimeError, match="implicitly"):
        x.data = distribute_tensor(values(6, 3).float(), mesh, [Shard(1)])
    assert not x.full_tensor().any()
