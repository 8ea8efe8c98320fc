"""Reentrant activation checkpointing runs backward inside backward: its end is not taken for the end."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import halved, ranks, run_ranks


class Net(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.recompute = recompute

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            recompute = self.recompute in (index, "all")
            x = torch.tanh(checkpoint(block, x, use_reentrant=True) if recompute else block(x))
        return x


def build(recompute, unused=False):
    torch.manual_seed(0)
    net = Net(recompute).double()
    net.unused.requires_grad_(unused)
    return net


def updated(model, optimizer):
    for step in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64).requires_grad_()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def on_ranks(recompute, zero):
    model = DDP(build(recompute), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=zero, bucket_bytes=200)
    return updated(model, DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1))


@halved
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("recompute", [0, 1, 2, "all"])
def test_checkpointed_blocks(recompute, zero):
    reference = build(None)
    expected = updated(reference, torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1))
    for actual in run_ranks(on_ranks, 2, recompute, zero):
        for fqn, value in expected.items():
            torch.testing.assert_close(actual[fqn], value, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_unused_parameters_after_a_nested_backward_are_not_forgotten():
    model = DDP(build(0, unused=True), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    model(torch.ones(4, 4, dtype=torch.float64, requires_grad=True)).square().mean().backward()
    optimizer.step()
    reference = build(None)
    reference(torch.ones(4, 4, dtype=torch.float64)).square().mean().backward()
    torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
    for fqn, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_only_nested_gradients_and_unused_parameters_is_an_error():
    model = DDP(build("all", unused=True), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    model(torch.ones(4, 4, dtype=torch.float64, requires_grad=True)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"has not finished: .*left parameters unused \(pass use_reentrant=False\)"):
        optimizer.step()
