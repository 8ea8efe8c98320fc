"""A program that is compiled before any DTensor has moved: the compiler meets nothing but the DTensors themselves."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchRuntimeError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale.dtensor._layout.groups import rank_set, ranks_of
from vescale.dtensor._placements import collectives as _collectives
from vescale.dtensor._placements import hooks as _hooks
from vescale_testing import ranks

KINDS = (Shard(0), Shard(1), Replicate(), Partial())


def move(local, mesh, before, after):
    return DTensor.from_local(local, mesh, [before], run_check=False).redistribute(placements=[after]).to_local()


def compiled():
    torch._dynamo.reset()
    return torch.compile(move, backend="eager", fullgraph=True)


@ranks(2)
def test_the_first_move_is_compiled():
    local = torch.arange(12.0).view(4, 3) + 100 * dist.get_rank()
    for before, after in itertools.product(KINDS, KINDS[:3]):
        mesh = init_device_mesh("cpu", (2,))
        ranks_of.cache_clear()
        _collectives.in_group_order.cache_clear()
        first = compiled()(local, mesh, before, after)
        torch.testing.assert_close(first, move(local, mesh, before, after), rtol=0, atol=0)


@ranks(2)
def test_an_operator_on_the_mesh_is_seen(monkeypatch):
    def by_tensors(mesh):
        return bool((mesh.mesh.diff() > 0).all())

    monkeypatch.setattr(_hooks, "in_group_order", by_tensors)
    with pytest.raises(TorchRuntimeError, match="convert all Tensors to FakeTensors"):
        compiled()(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), Shard(0), Replicate())


@ranks(6)
def test_the_order_of_ranks():
    cases = {
        ((0, 1, 2), (3, 4, 5)): True,
        ((0, 3), (1, 4), (2, 5)): True,
        ((0, 2, 1), (3, 4, 5)): False,
        ((3, 4, 5), (0, 1, 2)): False,
        ((0, 1, 5), (3, 4, 2)): False,
    }
    for rows, is_ascending in cases.items():
        mesh = DeviceMesh("cpu", torch.tensor(rows))
        assert ranks_of(mesh) == tuple(itertools.chain(*rows))
        assert rank_set(mesh) == frozenset(range(6))
        assert _collectives.in_group_order(mesh) == is_ascending
