"""Optimizers on sharded parameters (ZeRO 3) give the bits of ZeRO 2: matrices, master weights, whole state dicts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import run_ranks

CASES = {
    "muon": (Muon, {"lr": 0.02}, torch.float64),
    "master weights": (torch.optim.AdamW, {"lr": 0.001, "master_dtype": torch.float32}, torch.bfloat16),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.float64),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def train(zero):
    """Return, by case, parameters and whole optimizer state after three steps, one of them after a reload."""
    records = {}
    for name, (optimizer_class, settings, dtype) in CASES.items():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = DDP(Net().to(dtype), mesh["dp"], zero=zero)
        optimizer = DistributedOptimizer(optimizer_class, model=model, **settings)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                model.load_state_dict(model.state_dict())
                optimizer.load_state_dict(optimizer.state_dict())
        state = optimizer.full_state_dict()
        optimizer.load_full_state_dict(state)
        with model.unsharded():
            records[name] = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}, state["state"]
    return records


def test_the_bits_of_zero_2():
    expected = run_ranks(train, 2, 2)
    for actual, reference in zip(run_ranks(train, 2, 3), expected, strict=True):
        for name in CASES:
            for fqn, value in reference[name][0].items():
                assert torch.equal(actual[name][0][fqn], value), (name, fqn)
            for key, entries in reference[name][1].items():
                for which, value in entries.items():
                    torch.testing.assert_close(actual[name][1][key][which], value, rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert torch.equal(expected[0]["muon"][0]["head.weight"], expected[0]["momentum"][0]["head.weight"])
