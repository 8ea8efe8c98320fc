"""State dicts with ZeRO 3: pieces of this rank's part, or whole values, and never empty tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_named, gather_state, ranks


class Net(nn.Module):
    """Layers, a tied and a frozen parameter, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)])
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(seed, zero=3):
    torch.manual_seed(seed)
    return DDP(Net(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), zero=zero)


def whole(model):
    with model.unsharded():
        return model.state_dict()


def assert_equal(actual, expected):
    assert list(actual) == list(expected)
    for fqn, value in expected.items():
        assert torch.equal(actual[fqn], value), fqn


@ranks(3)
def test_a_state_dict_is_pieces_and_whole_inside_unsharded():
    model = wrapped(0)
    torch.manual_seed(0)
    expected = Net().state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    assert {fqn for fqn, value in state.items() if hasattr(value, "__boxes__")} == set(expected) - {"count"}
    assert torch.equal(state["count"], expected["count"])
    held = sum(view.numel() for fqn, value in state.items() if fqn != "count" for _, view in value.__boxes__())
    assert held < sum(value.numel() for value in expected.values())
    pieces = gather_named({k: v for k, v in state.items() if k != "count"})
    assert_equal({"count": state["count"]} | pieces, expected)
    full = whole(model)
    assert_equal(full, expected)  # still there after unsharded()
    assert model.state_dict(keep_vars=True)["layers.1.bias"] is model.layers[1].bias
    assert next(iter(model.state_dict(prefix="m."))) == "m.count"


@ranks(2)
def test_loading_pieces_whole_values_and_in_place():
    source = wrapped(1)
    expected = whole(source)
    by_pieces, by_values, by_place, inside = (wrapped(seed) for seed in (2, 3, 4, 5))
    assert not torch.equal(whole(by_pieces)["layers.0.bias"], expected["layers.0.bias"])
    by_pieces.load_state_dict(source.state_dict())
    by_values.load_state_dict(expected)
    target = by_place.state_dict()
    for fqn, value in target.items():
        for (_, to), (_, come) in (
            zip(*(s.__boxes__() for s in (value, source.state_dict()[fqn])), strict=True)
            if hasattr(value, "__boxes__")
            else ()
        ):
            to.copy_(come)
    by_place.load_state_dict(target)
    with inside.unsharded():
        inside.load_state_dict(expected)
        assert torch.equal(inside.layers[1].weight, expected["layers.1.weight"])
    for model in (by_pieces, by_values, by_place, inside):
        assert_equal(whole(model), expected)


@ranks(2)
def test_loading_into_parameters_that_are_whole():
    """After a forward without backward the root unit is whole; what is loaded must count all the same."""
    model, expected = wrapped(1), whole(wrapped(2))
    x = torch.ones(2, 5)
    model(x)
    model.load_state_dict(expected)
    plain = Net()
    plain.load_state_dict(expected)
    assert torch.equal(model(x), plain(x))


@ranks(2)
def test_what_does_not_fit():
    model = wrapped(0)
    state = whole(model)
    with pytest.raises(RuntimeError, match=r"not that of Net: missing \['layers.1.bias'\], unexpected \['other'\]"):
        model.load_state_dict({k: v for k, v in state.items() if k != "layers.1.bias"} | {"other": state["count"]})
    found = model.load_state_dict({"count": state["count"]}, strict=False)
    assert (len(found.missing_keys), found.unexpected_keys) == (6, [])
    with pytest.raises(ValueError, match=r"state of 'layers.1.bias' has global shape \(5,\), got \(4,\)"):
        model.load_state_dict(state | {"layers.1.bias": torch.ones(4)})
    with pytest.raises(ValueError, match="assign=True would replace the parameters"):
        model.load_state_dict(state, assign=True)


@ranks(2)
def test_optimizer_state_is_sharded_and_is_that_of_zero_2():
    states = []
    for zero in (2, 3):
        model = wrapped(0, zero)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        held = optimizer.state_dict()["state"]
        assert sum(v.numel() for e in held.values() for _, v in e["exp_avg"].__boxes__()) < 80
        states.append(gather_state(held))
        other = DistributedOptimizer(torch.optim.AdamW, model=wrapped(3, zero), lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        loaded = gather_state(other.state_dict()["state"])
        assert torch.equal(loaded["layers.1.weight"]["exp_avg"], states[-1]["layers.1.weight"]["exp_avg"])
    for fqn, entries in states[0].items():
        for name, value in entries.items():
            assert torch.equal(states[1][fqn][name], value)
