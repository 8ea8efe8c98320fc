"""ZeRO 3 where a rank does not use parameters that another uses: none waits for what the other does only later."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks


class Net(nn.Module):
    """Units, and factors of the root unit that only the first rank uses, last in the forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(6)])
        self.factors = nn.ParameterList([torch.full((5,), 1.0 + i / 4) for i in range(5)])

    def forward(self, x, rank=None):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for factor in self.factors if rank == 0 else ():
            x = x * factor
        return x


def build():
    torch.manual_seed(0)
    return Net().double()


def rows(rank):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.usefixtures("impatient_reducer")
@pytest.mark.parametrize("reduction", ["backend", "ordered"])
@ranks(2)
def test_a_rank_that_uses_fewer_parameters_of_the_root_unit(reduction):
    """The first rank has reductions of factors to wait for, which the second launches at the end of its backward."""
    rank, reference = dist.get_rank(), build()
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(build(), mesh, zero=3, bucket_bytes=1, reduction=reduction, per_rank=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    for _ in range(2):
        model(rows(rank), rank).square().mean().backward()
        (sum(reference(rows(each), each).square().mean() for each in range(2)) / 2).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert rank > 0 or model._reducer._patience == 0, "the first rank should have found out that it must not wait"
    with model.unsharded():
        for fqn, value in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(fqn), value, rtol=1e-12, atol=1e-14)
