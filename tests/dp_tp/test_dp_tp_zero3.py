"""Sharded parameters (ZeRO 3) of tensor-parallel modules: eager mode trains as with ZeRO 2, other modes are refused."""

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

PLAN = {
    "parameter": {
        r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {r"layers\.\d+\.down\.output": [{"tp": Replicate()}]},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def build(mesh, zero, mode="eager"):
    torch.manual_seed(0)
    module = parallelize_module(Net().double(), mesh["tp"], PLAN)
    set_mode(module, mode)
    return DDP(module, mesh["dp"], zero=zero)


def train(mesh, zero):
    model = build(mesh, zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        out = model(x.chunk(2)[mesh.get_local_rank("dp")])
        (out.to_local() if isinstance(out, DTensor) else out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded():
        return {fqn: p.full_tensor().clone() for fqn, p in model.named_parameters()}


@ranks(4)
def test_modes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected, actual = train(mesh, 2), train(mesh, 3)
    for fqn, value in expected.items():
        assert torch.equal(actual[fqn], value), fqn
    for mode in ("static", "compile"):
        with pytest.raises(NotImplementedError, match=rf"zero=3 is not available .* mode \['{mode}'\].*eager"):
            build(mesh, 3, mode)
    model = build(mesh, 3)
    set_mode(model.module, "static")
    with pytest.raises(NotImplementedError, match=r"zero=3 is not available for modules in mode \['static'\]"):
        model(torch.ones(4, 8, dtype=torch.float64))
