"""A transposed tensor keeps its memory order when it is redistributed: the views that its strides allow are there."""

import pytest
import torch
from torch.nn import functional

from vescale.dtensor import DTensor, Partial, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

VIEWS = {
    "redistributed": lambda x: moved(x.t()).t().view(-1),
    "multiplied": lambda x: moved(x.t() * 1.5).t().view(-1),
    "a function": lambda x: x.t().abs().t().view(-1),
    "a product": lambda x: (x @ x.t()).t().relu().t().view(-1),
    "three dims": lambda x: moved(x[None].permute(2, 0, 1)).permute(1, 2, 0).view(-1),
    "with ones": lambda x: torch.kron(x[:1].t(), x[:1].t()),
    "softplus": lambda x: turned(functional.softplus(x[None].repeat(2, 1, 1) @ x.t())),
    "hardtanh": lambda x: turned(functional.hardtanh(x[None].repeat(2, 1, 1) @ x.t())),
    "copysign": lambda x: torch.copysign(x.t() * 2, (x * 3).t().contiguous()).t().contiguous().view(-1),
    "sorted": lambda x: x.t().sort(1).values.t().view(-1),
}


def turned(x):
    """Return a view of a turned tensor: its gradient has another memory order than the tensor."""
    return x.transpose(1, 2).reshape(2, -1)


def moved(x):
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else x


@ranks(4)
def test_equal_one_device(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (4,))
    operand = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for view in VIEWS.values():
        assert assert_equals_one_device(view, [operand], mesh) == 4


@ranks(2)
def test_strides_are_those_of_one_device():
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(12.0).view(3, 4)
    for placement in (Shard(0), Shard(1), Partial()):
        x = DTensor.from_local(whole, mesh, [placement]).t()
        assert x.full_tensor().stride() == x.stride() == torch.empty(x.shape[::-1]).t().stride()


@ranks(2)
def test_stock_torch_fails():
    x = distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with disabled(), pytest.raises(RuntimeError, match="view size is not compatible"):
        VIEWS["redistributed"](x)
