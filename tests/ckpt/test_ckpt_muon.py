"""Muon's state goes to any layout of data parallelism, sharded, hybrid or offloaded, and the training goes on alike."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale import checkpoint
from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import ranks

#: Shape of the mesh (data-parallel ranks, or replicas and shards), and settings.
LAYOUTS = [
    ((4,), {"zero": 0}),
    ((4,), {"zero": 2}),
    ((2, 2), {"zero": 3}),
    ((4,), {"zero": 3, "offload": True}),
    ((2, 2), {"zero": 1}),
]


class Net(nn.Module):
    """Matrices for Muon, a stack of them, and an embedding, a head, norms and biases for AdamW."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self.stack = nn.Parameter(torch.randn(3, 12, 12) / 4)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        for matrix in self.stack:
            x = self.norm(x + torch.tanh(x @ matrix))
        return self.head(x)


def build(seed, layout):
    shape, settings = layout
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp",) if len(shape) == 1 else ("replicate", "shard"))
    model = DDP(Net(), mesh, reduction="ordered", **settings)
    adamw = {"adamw": [r"embed.*", r"head.*"], "adamw_lr": 0.01}
    return model, DistributedOptimizer(Muon, model=model, lr=0.05, weight_decay=0.1, **adamw)


def batch(seed):
    """Return this rank's rows."""
    return torch.randint(17, (8, 5), generator=torch.Generator().manual_seed(seed)).chunk(4)[dist.get_rank()]


@ranks(4)
def test_every_layout_goes_on_in_another(goes_on_alike):
    _, state = goes_on_alike(build, batch, LAYOUTS, lambda number: [LAYOUTS[number - 1]])
    assert set(state["up.weight"]) == {"momentum_buffer"}
    assert {"exp_avg", "exp_avg_sq"} <= set(state["embed.weight"])


@pytest.mark.thorough
@ranks(4)
def test_every_layout_goes_on_in_every_other(goes_on_alike):
    goes_on_alike(build, batch, LAYOUTS, lambda _: LAYOUTS)


@ranks(4)
def test_without_the_momentum_the_training_differs(tmp_path, take_step):
    def trained(name, *, ignore):
        model, optimizer = build(2, LAYOUTS[1])
        checkpoint.load(tmp_path / "c", {"model": model, **({} if ignore else {"optimizer": optimizer})}, ignore=ignore)
        take_step(model, optimizer, batch(2))
        with model.unsharded():
            return model.state_dict()[name].clone()

    model, optimizer = build(1, LAYOUTS[0])
    take_step(model, optimizer, batch(1))
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    take_step(model, optimizer, batch(2))
    expected = model.state_dict()["up.weight"]
    assert torch.equal(trained("up.weight", ignore=[]), expected)
    assert not torch.equal(trained("up.weight", ignore=["optimizer"]), expected)
