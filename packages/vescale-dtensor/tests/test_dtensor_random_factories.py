"""`torch.distributed.tensor.rand` and `randn` give what `torch.rand` and `torch.randn` give on one device."""

import pytest
import torch
from torch.distributed import tensor as sharded

from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

S0, S1, R = Shard(0), Shard(1), Replicate()


@ranks(4)
def test_factories(shard_of):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for ours, plain in [(sharded.rand, torch.rand), (sharded.randn, torch.randn)]:
        for placements in [(S0, S1), (S0, S0), (R, S1), (R, R)]:
            for size, dtype in [((5, 7), torch.float32), ((3, 2), torch.float64), ((17, 16), torch.bfloat16)]:
                torch.manual_seed(3)
                expected, follow_up = plain(size, dtype=dtype), torch.rand(3)
                torch.manual_seed(3)
                actual = ours(size, dtype=dtype, device_mesh=mesh, placements=placements)
                assert torch.equal(torch.rand(3), follow_up)
                assert actual.dtype == dtype
                assert torch.equal(actual.to_local(), shard_of(expected, mesh, placements))
    assert sharded.rand((4, 4), requires_grad=True, device_mesh=mesh, placements=(S0, R)).requires_grad
    assert not sharded.zeros((4, 4), device_mesh=mesh, placements=(S0, R)).to_local().any()


@ranks(2)
def test_stock_torch_draws_none_on_the_cpu():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with disabled(), pytest.raises(AssertionError):
        sharded.rand((4, 4), device_mesh=mesh, placements=(S0,))
