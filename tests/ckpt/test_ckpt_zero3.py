"""A training with sharded parameters (ZeRO 3) is saved without gathering them, and goes on in any other layout."""

import torch
from torch import nn

from vescale import checkpoint
from vescale.dtensor import init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_state, ranks

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


def step(model, optimizer, seed):
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model, optimizer):
    with model.unsharded():
        params = {fqn: value.clone() for fqn, value in model.state_dict().items()}
    return params, gather_state(optimizer.state_dict()["state"])


@ranks(2)
def test_every_layout_loads_every_other(tmp_path):
    for index, settings in enumerate(LAYOUTS):
        model, optimizer = build(1, settings)
        step(model, optimizer, 1)
        checkpoint.save(tmp_path / str(index), {"model": model, "optimizer": optimizer})
        step(model, optimizer, 2)
        params, state = values(model, optimizer)
        for other in LAYOUTS if index == 0 else LAYOUTS[:1]:
            loaded, its_optimizer = build(2, other)
            checkpoint.load(tmp_path / str(index), {"model": loaded, "optimizer": its_optimizer})
            step(loaded, its_optimizer, 2)
            its_params, its_state = values(loaded, its_optimizer)
            for fqn, value in params.items():
                torch.testing.assert_close(its_params[fqn], value, rtol=0, atol=0)
            for fqn, entries in state.items():
                for name, value in entries.items():
                    torch.testing.assert_close(its_state[fqn][name], value, rtol=0, atol=0)
