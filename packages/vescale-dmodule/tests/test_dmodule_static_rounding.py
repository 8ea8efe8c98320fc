"""The check of a recording allows what rounding errors do in this program, and no more."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import ranks

PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [{"tp": Replicate()}]},
}


class Net(nn.Module):
    """Adds the hidden features in another order on DTensors, as kernels may, where large terms cancel."""

    def __init__(self, large, error):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.large, self.error = large, error

    def forward(self, x):
        y = self.down(self.up(x).tanh())
        far = y + self.large
        if isinstance(x, DTensor) or isinstance(y, DTensor):
            return far * 7 - 7 * self.large
        return far + far * 2 + far * 4 - 7 * self.large + self.error * y


class Masked(Net):
    """Takes the best features of some: the others are at infinity."""

    def forward(self, x):
        y = super().forward(x)
        best = y.masked_fill(torch.arange(8) % 2 == 0, float("-inf")).topk(2, -1).indices
        return y.gather(-1, best)


def run(dtype, large, error, kind=Net):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(kind(large, error).to(dtype), mesh, PLAN, mode="static")
    model(torch.randn(4, 8).to(dtype)).square().mean().backward()


@pytest.mark.parametrize("dtype, large", [(torch.float64, 1e9), (torch.float32, 3e3), (torch.bfloat16, 16.0)])
@ranks(2)
def test_cancellation_is_no_difference(dtype, large):
    run(dtype, large, 0.0)


@pytest.mark.parametrize("dtype, large, error", [(torch.float64, 0.0, 1e-8), (torch.float32, 0.0, 1e-2)])
@ranks(2)
def test_another_number_is(dtype, large, error):
    with pytest.raises(NotLocalFriendlyError, match="static and eager mode diverge"):
        run(dtype, large, error)


@ranks(2)
def test_infinity_hides_no_difference():
    run(torch.float64, 0.0, 0.0, Masked)
    with pytest.raises(NotLocalFriendlyError, match="static and eager mode diverge"):
        run(torch.float64, 0.0, 1e-8, Masked)


@ranks(2)
def test_in_bfloat16():
    run(torch.bfloat16, 0.0, 0.0)
    with pytest.raises(NotLocalFriendlyError, match="static and eager mode diverge"):
        run(torch.bfloat16, 0.0, 2.0)  # of 7
