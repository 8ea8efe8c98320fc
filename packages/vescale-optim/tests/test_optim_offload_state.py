"""State dicts, loading and writing with offload: what is at home in host memory is what is stored, and used next."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks, run_ranks


class Net(nn.Module):
    """Layers, one of them frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)])
        self.layers[1].bias.requires_grad_(False)
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(seed, **settings):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(Net(), mesh["dp"], **{"zero": 3, "offload": True, **settings})
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    with model.unsharded():
        return {fqn: value.clone() for fqn, value in model.state_dict().items()}


def assert_equal(actual, expected):
    assert list(actual) == list(expected)
    for fqn, value in expected.items():
        assert torch.equal(actual[fqn], value), fqn


def check_loading():
    source, optimizer = wrapped(1)
    assert all(hasattr(v, "__boxes__") for k, v in source.state_dict().items() if k != "count")
    expected, state, full = whole(source), optimizer.state_dict(), optimizer.full_state_dict()
    ways = {
        "pieces": lambda: (source.state_dict(), state),
        "whole": lambda: (expected, full),
        "dtensors": lambda: ({**source.sharded_parameters(), "count": torch.tensor(3.0)}, state),
    }
    continued = {}
    for way, values in ways.items():
        model, other = wrapped(2)
        model(torch.ones(2, 5))  # leaves copies of the former values behind, if that is possible at all
        assert not torch.equal(whole(model)["layers.0.bias"], expected["layers.0.bias"])
        model.load_state_dict(values()[0])
        (other.load_full_state_dict if way == "whole" else other.load_state_dict)(values()[1])
        assert_equal(whole(model), expected)
        step(model, other)
        continued[way] = whole(model)
    step(source, optimizer)
    for found in continued.values():
        assert_equal(found, whole(source))
    with pytest.raises(AssertionError):
        assert_equal(whole(source), expected)


def test_state_goes_from_one_model_to_another():
    for size in (1, 2):
        run_ranks(check_loading, size)


@ranks(2)
def test_state_goes_to_a_model_without_offload_and_back():
    model, optimizer = wrapped(1)
    other, its_optimizer = wrapped(2, offload=False)
    other.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    for each in ((model, optimizer), (other, its_optimizer)):
        step(*each)
    assert_equal(whole(other), whole(model))
    back, back_optimizer = wrapped(3)
    back.load_state_dict(other.state_dict())
    back_optimizer.load_state_dict(its_optimizer.state_dict())
    for each in ((model, optimizer), (back, back_optimizer)):
        step(*each)
    assert_equal(whole(back), whole(model))


def check_writes():
    model, optimizer = wrapped(1)
    with model.unsharded(), torch.no_grad():
        model.layers[0].weight.fill_(0.25)
        model.layers[1].bias.fill_(0.5)  # frozen
    model.sharded_parameters()["layers.2.bias"].to_local().fill_(0.75)
    model.gather_parameters()
    plain = Net()
    plain.load_state_dict(whole(model))
    assert torch.equal(plain.layers[0].weight, torch.full((5, 5), 0.25))
    assert torch.equal(plain.layers[1].bias, torch.full((5,), 0.5))
    assert torch.equal(plain.layers[2].bias, torch.full((5,), 0.75))
    assert torch.equal(model(torch.ones(2, 5)), plain(torch.ones(2, 5)))
    step(model, optimizer)
    assert not torch.equal(model(torch.ones(2, 5)), plain(torch.ones(2, 5)))


def test_what_is_written_is_used_next():
    for size in (1, 2):
        run_ranks(check_writes, size)
