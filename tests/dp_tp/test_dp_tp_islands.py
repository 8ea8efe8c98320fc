"""Operators that run on DTensors inside static mode train under data parallelism as one process does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

PLAN = {
    "parameter": {r".*up\.(weight|bias)": {"tp": Shard(0)}, r".*down\.weight": {"tp": Shard(1)}},
    "forward": {r".*up\.input": [{"tp": Replicate()}], r".*down\.output": [{"tp": Replicate()}]},
}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Block(nn.Module):
    """Normalizes groups, has a hard-coded number of heads, and draws, all on a sharded dim."""

    def __init__(self):
        super().__init__()
        self.up, self.groups, self.down = nn.Linear(6, 12), nn.GroupNorm(3, 12), nn.Linear(12, 6)

    def forward(self, x):
        h = self.groups(self.up(x))
        h = h.view(*h.shape[:-1], 4, 3).softmax(-1).flatten(-2) + functional.dropout(h, 0.3)
        return x + self.down(h)


class Linear(nn.Linear):
    """Adds its bias in an operator of its own: in a row-parallel layer a whole value to a summand."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), Linear(6, 12), Linear(12, 6)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layer, *, checkpoints):
        super().__init__()
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


def build(layer=Block, *, checkpoints):
    torch.manual_seed(0)
    return Net(layer, checkpoints=checkpoints)


def losses(model, optimizer, x):
    torch.manual_seed(1)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).cos().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def parallel_losses(mesh, layer, *, zero, checkpoints):
    model = build(layer, checkpoints=checkpoints)
    model = parallelize_module(model, mesh["tp"], PLAN, mode="static", allow_implicit=True)
    model = DDP(model, mesh["dp"], zero=zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=1e-2)
    mine = losses(model, optimizer, X.chunk(2)[mesh["dp"].get_local_rank()])
    dist.all_reduce(mine, group=mesh["dp"].get_group())
    return mine / 2


@pytest.mark.parametrize(("layer", "checkpoints"), [(Block, False), (Block, True), (FeedForward, False)])
@ranks(4)
def test_losses_are_those_of_one_process(layer, checkpoints):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = build(layer, checkpoints=checkpoints)
    expected = losses(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), X)
    for zero in (0, 1, 3):
        found = parallel_losses(mesh, layer, zero=zero, checkpoints=checkpoints)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_other_weights_have_other_losses():
    model, other = build(checkpoints=False), build(checkpoints=False)
    expected = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2), X)
    other.layers[0].groups.weight.data.mul_(2)
    found = losses(other, torch.optim.AdamW(other.parameters(), lr=1e-2), X)
    assert (found - expected).abs().max() > 1e-6
