"""Data parallelism looks at every operator for random ones; a static call that draws nothing runs without that."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from vescale.dmodule import NotLocalFriendlyError, parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, init_device_mesh, random
from vescale.optim import DDP
from vescale_testing import ranks

R = {"tp": Replicate()}
PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {"input": [R], r"up\.input": [R], r"down\.output": [R]},
}
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Layer(nn.Module):
    """Notes how many modes see its operators."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.0)
        self.double()
        self.num_modes = []

    def forward(self, x):
        self.num_modes.append(len(_get_current_dispatch_mode_stack()))
        return self.dropout(self.down(self.up(x).relu()))


def losses(rate, x):
    """One process: the losses of two steps without dropout, and of two with it."""
    torch.manual_seed(0)
    model = Layer()
    found = [model(x).square().sum() for _ in range(2)]
    model.dropout.p = rate
    return torch.stack([*found, *(model(x).square().sum() for _ in range(2))]).detach()


@ranks(4)
def test_quiet_calls_are_not_watched():
    expected = losses(0.5, X)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Layer()
    layer = parallelize_module(model, mesh["tp"], PLAN, mode="static")
    model = DDP(layer, mesh["dp"])
    x = X.chunk(2)[mesh.get_local_rank("dp")]

    def total():
        found = model(x).square().sum().detach()
        torch.distributed.all_reduce(found, group=mesh["dp"].get_group())
        return found

    found = [total(), total()]
    assert layer.num_modes[-1] == 0
    with random.stream("philox", seed=1):
        model(x)
        assert layer.num_modes[-1] == 0, "nor are they in the other stream"
    layer.dropout.p = 0.5
    with pytest.raises(NotLocalFriendlyError, match="drew random numbers, but the recorded call did not"):
        model(x)
    torch.manual_seed(0)
    Layer()  # takes the numbers that the reference has taken
    set_mode(layer, "static")
    found += [total(), total()]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-12, atol=0)
