"""`disabled()` gives stock torch back while it is open, and everything is in place again afterwards."""

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import Shard, disabled, init_device_mesh, random
from vescale_testing import ranks


@ranks(2)
def test_random_operators_are_stock_inside(shard, shard_of):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(torch.ones(8, 8), mesh, (Shard(0),))

    def masks():
        torch.manual_seed(1)
        plain = F.dropout(torch.ones(8, 8))
        torch.manual_seed(1)
        return F.dropout(x).to_local(), shard_of(plain, mesh, (Shard(0),))

    ours, whole = masks()
    assert torch.equal(ours, whole)
    with disabled():
        stock, whole = masks()
        assert torch.equal(stock, whole) == (mesh.get_local_rank() == 0)  # every rank draws the first rows
        with disabled():
            pass
        assert not torch.equal(masks()[0], ours) or mesh.get_local_rank() == 0
    ours, whole = masks()
    assert torch.equal(ours, whole)


@ranks(2)
def test_an_exception_inside_restores_the_rules(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ZeroDivisionError), disabled():
        raise ZeroDivisionError
    assert_drawn_alike(torch.rand_like, torch.ones(5, 5), mesh, (Shard(1),))


@ranks(2)
def test_local_batch_does_nothing_inside():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def draw():
        torch.manual_seed(1)
        return torch.rand(4)

    plain = draw()
    with disabled(), random.local_batch(mesh):
        assert torch.equal(draw(), plain)
    with random.local_batch(mesh):
        assert torch.equal(draw(), plain) == (mesh.get_local_rank() == 0)
        with disabled():
            assert torch.equal(draw(), plain)
