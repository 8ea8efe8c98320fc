"""Hybrid sharding: what replicas hold together is saved once, and the training goes on in any other layout."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale import checkpoint
from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

#: Shape of the mesh (data-parallel ranks, or replicas and shards), and settings.
LAYOUTS = [
    ((4,), {"zero": 2}),
    ((2, 2), {"zero": 2}),
    ((2, 2), {"zero": 3}),
    ((1, 4), {"zero": 3, "units": []}),
    ((4, 1), {"zero": 1}),
]


class Net(nn.Module):
    """Layers, a tied and a frozen parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 64)])
        self.layers[2].weight = self.layers[1].weight
        self.layers[1].bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(seed, layout):
    shape, settings = layout
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp",) if len(shape) == 1 else ("replicate", "shard"))
    model = DDP(Net(), mesh, reduction="ordered", **settings)
    return model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)


def batch(seed):
    """Return this rank's rows."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).chunk(4)[dist.get_rank()]


def num_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@ranks(4)
def test_every_layout_loads_every_other(tmp_path, goes_on_alike):
    params, state = goes_on_alike(build, batch, LAYOUTS, lambda number: LAYOUTS if number in (0, 2) else LAYOUTS[:1])
    sizes = [num_bytes(tmp_path / str(index)) for index in range(len(LAYOUTS))]
    held = 4 * sum(value.numel() for value in params.values()) + 4 * sum(
        value.numel() for entries in state.values() for value in entries.values()
    )
    assert all(held < size < 1.5 * held for size in sizes), (sizes, held)  # twice, if replicas were saved twice


@ranks(4)
def test_replicas_that_differ_are_not_saved(tmp_path, take_step):
    model, optimizer = build(1, ((2, 2), {"zero": 2}))
    take_step(model, optimizer, batch(1))
    if dist.get_rank() == 3:
        optimizer.state_dict()["state"]["layers.1.weight"]["exp_avg"].tensor[7] += 1
    with pytest.raises(
        checkpoint.CheckpointError, match=r"expected equal replicas .*exp_avg.*rank 1 differ from rank 3"
    ):
        checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
