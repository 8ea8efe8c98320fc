"""A training with sharded parameters (ZeRO 3) is saved without gathering them, and goes on in any other layout."""

import torch
from torch import nn

from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

#: What may differ between the run that saves and the run that loads.
LAYOUTS = [{"zero": 3}, {"zero": 3, "units": []}, {"zero": 3, "units": ["0", "layers.1"]}, {"zero": 2}, {"zero": 0}]


class Net(nn.Module):
    """Blocks, a tied and a frozen parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(5, 7))
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        x = getattr(self, "0")(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(seed, settings):
    torch.manual_seed(seed)
    model = DDP(Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), **settings)
    return model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)


def batch(seed):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


@ranks(2)
def test_every_layout_loads_every_other(goes_on_alike):
    goes_on_alike(build, batch, LAYOUTS, lambda number: LAYOUTS if number == 0 else LAYOUTS[:1])
