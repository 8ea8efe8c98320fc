"""Gradients may be cleared in every way that torch knows, and at any time, at any ZeRO stage."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import halved, ranks


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()


def wrapped(zero):
    return DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=zero, bucket_bytes=100)


def loss_of(model, seed):
    return model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).square().mean()


def per_parameter(model, _optimizer):
    for param in model.parameters():
        param.grad = None


WAYS = {
    "optimizer, None": lambda _model, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda _model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, None": lambda model, _optimizer: model.zero_grad(),
    "module, zeros": lambda model, _optimizer: getattr(model, "module", model).zero_grad(set_to_none=False),
    "by hand": per_parameter,
    "plain optimizer, zeros": lambda model, _: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
}


def train(model, optimizer, clear):
    """Clear at odd moments: before the first backward, after a wasted backward, and between steps."""
    clear(model, optimizer)
    loss_of(model, 100).backward()
    clear(model, optimizer)
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(model, step + 10).backward()  # accumulates
        optimizer.step()
        clear(model, optimizer)
    return {k: v.clone() for k, v in model.state_dict().items()}


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_clearing(way, zero):
    model = build()
    expected = train(model, torch.optim.Adam(model.parameters(), lr=0.1), WAYS[way])

    @ranks(2)
    def body():
        model = wrapped(zero)
        actual = train(model, DistributedOptimizer(torch.optim.Adam, model=model, lr=0.1), WAYS[way])
        for fqn, value in expected.items():
            torch.testing.assert_close(actual[fqn], value, rtol=1e-12, atol=1e-14)

    body()


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_not_clearing_at_all_is_seen(zero):
    results = []
    for clear in (WAYS["by hand"], lambda _model, _optimizer: None):
        model = wrapped(zero)
        results.append(train(model, DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1), clear)["0.weight"])
    assert not torch.allclose(*results)


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_local_accumulation_after_a_reduction_adds_to_it(zero):
    model, reference = wrapped(zero), build()
    loss_of(model, 0).backward()
    with model.no_sync():
        loss_of(model, 1).backward()
    loss_of(model, 2).backward()
    DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1).step()

    sum(loss_of(reference, seed) for seed in range(3)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for fqn, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_clearing_some_parameters_only(zero):
    model, reference = wrapped(zero), build()
    for each in (model, reference):
        loss_of(each, 0).backward()
        getattr(each, "module", each)[0].zero_grad()
        loss_of(each, 1).backward()
    DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for fqn, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_a_gradient_assigned_by_hand_is_reduced_with_the_next_backward(zero):
    model, reference = wrapped(zero), build()
    for each in (model, reference):
        getattr(each, "module", each)[0].weight.grad = torch.ones(5, 3, dtype=torch.float64)
        loss_of(each, 0).backward()
    DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for fqn, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value, rtol=1e-12, atol=1e-14)
