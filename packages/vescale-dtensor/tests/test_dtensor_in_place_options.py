"""An operator that writes in place writes with keyword arguments, too, and reads what it overwrites before it does."""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks

IN_PLACE = {
    "cumsum_": lambda x, y, _: x.cumsum_(1, dtype=y.dtype),
    "cumprod_": lambda x, y, _: x.cumprod_(0, dtype=y.dtype),
    "addmm_": lambda x, y, _: x.addmm_(y, y.t() @ y, alpha=0.6, beta=0.2),
    "addr_": lambda x, y, _: x.addr_(y[:, 0].clone(), y[0].clone(), alpha=0.6, beta=0.2),
    "index_add_": lambda x, y, i: x.index_add_(0, i, y, alpha=-1),
    "index_reduce_": lambda x, y, i: x.index_reduce_(0, i, y, "prod", include_self=False),
    "scatter_reduce_": lambda x, y, i: x.scatter_reduce_(0, i[:, None], y, "amax", include_self=False),
    "put_": lambda x, y, i: x.put_(i, y[:, 0].clone(), accumulate=True),
    "baddbmm_": lambda x, y, _: x[None].clone().baddbmm_(y[None], (y.t() @ y)[None], beta=0.2, alpha=0.6),
}


@pytest.mark.parametrize("name", IN_PLACE)
@ranks(3)
def test_it_writes_as_one_device_does(name):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
    write = IN_PLACE[name]
    for placement in (Replicate(), Shard(0), Shard(1)):
        torch.manual_seed(0)
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
        before, i = x.clone(), torch.arange(5).flip(0)
        dx, dy = (distribute_tensor(each, mesh, [placement]) for each in (x, y))
        returned, expected = write(dx, dy, distribute_tensor(i, mesh, [Replicate()])), write(x, y, i)
        torch.testing.assert_close(returned.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dx.full_tensor(), x, rtol=1e-12, atol=1e-12)
        assert not torch.equal(expected.view(5, 4), before)  # the comparison can fail


@ranks(2)
def test_an_operand_that_is_the_result_is_read_first():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    for placement in (Replicate(), Shard(0), Shard(1)):
        whole, sharded = x.clone(), distribute_tensor(x, mesh, [placement])
        torch.cumsum(whole, 1, dtype=torch.float64, out=whole)
        torch.cumsum(sharded, 1, dtype=torch.float64, out=sharded)
        assert torch.equal(sharded.full_tensor(), whole)
