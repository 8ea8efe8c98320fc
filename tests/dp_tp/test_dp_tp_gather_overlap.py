"""Gathers of parameters (ZeRO 1, 2) overlap with the forward of a tensor-parallel module, except on local tensors."""

import torch
from torch import nn

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

WHOLE = [{"tp": Replicate()}]
PLAN = {
    "parameter": {r"\d+\.up\.(weight|bias)": {"tp": Shard(0)}, r"\d+\.down\.weight": {"tp": Shard(1)}},
    "forward": {r"\d+\.up\.input": WHOLE, r"\d+\.down\.output": WHOLE},
}


class Block(nn.Module):
    """A layer with parameters of its own, besides those of the layers of torch."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + self.down(self.up(x).relu()) * self.scale


def waiting(model):
    return [fqn for fqn, param in model.named_parameters() if type(param).__name__.startswith("Awaited")]


def train(mesh, *, modes, **settings):
    """Run each step in a mode; return parameters at the end, and what is on its way after each step."""
    torch.manual_seed(0)
    module = parallelize_module(nn.Sequential(*[Block() for _ in range(3)]).double(), mesh["tp"], PLAN)
    model = DDP(module, mesh["dp"], bucket_bytes=2000, zero=2, **settings)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)
    on_their_way = []
    for step, mode in enumerate(modes):
        set_mode(model.module, mode)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        (model(x.chunk(2)[mesh.get_local_rank("dp")]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        on_their_way.append(waiting(model))
    return [param.full_tensor() for param in model.parameters()], on_their_way


@ranks(4)
def test_modes_may_change_while_gathers_are_on_their_way():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    modes = ("eager", "eager", "static", "static", "eager")
    values, on_their_way = train(mesh, modes=modes)
    assert [len(names) for names in on_their_way[:-1]] == [15, 15, 0, 0]
    expected, never = train(mesh, modes=modes, overlap=False)
    assert not any(never)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
