"""`torch.distributed.tensor.rand`, `randn`, `linspace` and `logspace` give what those of `torch` give on one device."""

import pytest
import torch
import torch.distributed as dist
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


SPACES = [((0, 10, 7), torch.int64), ((0.1, 7.3, 11), torch.float32), ((3, -2, 5), None), ((0, 1, 3), torch.float64)]
HAS_SPACES = pytest.mark.skipif(not hasattr(sharded, "linspace"), reason="torch has them from 2.14 on")


def spaced(mesh, shard_of):
    """Return each factory's values and what they have to be, for all cases."""
    for name in ("linspace", "logspace"):
        for (start, end, steps), dtype in SPACES:
            expected = getattr(torch, name)(start, end, steps, dtype=dtype)
            for placement in (S0, R):
                made = getattr(sharded, name)(start, end, steps, dtype=dtype, device_mesh=mesh, placements=[placement])
                assert made.dtype == expected.dtype
                yield made.to_local(), shard_of(expected, mesh, [placement])


@HAS_SPACES
@ranks(4)
def test_spaced_values(shard_of):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    assert all(torch.equal(made, expected) for made, expected in spaced(mesh, shard_of))


@HAS_SPACES
@ranks(4)
def test_stock_torch_spaces_each_shard_anew(shard_of):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with disabled():
        equal = [torch.equal(made, expected) for made, expected in spaced(mesh, shard_of)]
    found = [None] * 4
    dist.all_gather_object(found, all(equal))
    assert not all(found)
