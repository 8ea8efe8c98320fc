"""A copy of a wrapped module is a plain module: it has the values, runs on one rank alone, and drops as one device."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module))}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def trained(zero):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
    model = DDP(net, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
    step(model, optimizer)
    return model, optimizer


def whole(model):
    return model.unsharded() if model.zero == 3 else contextlib.nullcontext()


def step(model, optimizer):
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model):
    with whole(model):
        return {fqn: value.clone() for fqn, value in model.module.state_dict().items()}


@ranks(2)
def test_copies():
    for zero in range(4):
        model, optimizer = trained(zero)
        for name, way in WAYS.items():
            with whole(model):
                twin = way(model.module)
            before = values(model)
            step(model, optimizer)
            after = values(model)
            assert twin.state_dict().keys() == before.keys()
            for fqn, value in twin.state_dict().items():
                assert torch.equal(value, before[fqn]), (zero, name, fqn)
                assert not torch.equal(value, after[fqn]), (zero, name, fqn)
            if dist.get_rank() == 0:  # on one rank: a collective would wait for the other rank forever
                with torch.random.fork_rng():  # the ranks go on with equal generators
                    torch.manual_seed(1)
                    out = twin(X)
                    torch.manual_seed(1)
                    assert torch.equal(out, F.dropout(F.linear(twin[0](X), twin[1][0].weight, twin[1][0].bias), 0.5))
                out.sum().backward()
                assert all(param.grad is not None for param in twin.parameters())
            assert all(slot.param.grad is None for slot in model.slots().values())


@ranks(2)
def test_a_copy_can_be_wrapped_again():
    model, _ = trained(1)
    for way in WAYS.values():
        twin = DDP(way(model.module), model.mesh_axis, zero=2)
        twin_optimizer = DistributedOptimizer(torch.optim.AdamW, model=twin, lr=0.1)
        before = values(model)
        step(twin, twin_optimizer)
        assert all(torch.equal(value, before[fqn]) for fqn, value in values(model).items())


@ranks(2)
def test_what_cannot_be_copied():
    model, _ = trained(3)
    for way in WAYS.values():
        with pytest.raises(TypeError, match=r"^a DDP cannot be copied or pickled.*copy `model\.module`.*unsharded\(\)"):
            way(model)
        with pytest.raises(RuntimeError, match=r"which has no values here.*model\.unsharded\(\)"):
            way(model.module)
