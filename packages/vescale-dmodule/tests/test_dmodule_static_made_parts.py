"""A tensor of which a static part makes only this rank's heads goes to other parts as what it is: a shard."""

import pytest
import torch
from torch import nn

from vescale.dmodule import Divided, NotLocalFriendlyError, parallelize_module, set_mode
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

PLAN = {
    "parameter": {r".*up\.(weight|bias)": {"tp": Shard(0)}, r".*down\.weight": {"tp": Shard(1)}},
    "forward": {r".*up\.input": [{"tp": Replicate()}], r".*down\.output": [{"tp": Replicate()}]},
    "local_attribute": {r"(first|second)\.heads": Divided("tp")},
}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)


class Heads(nn.Module):
    """Adds a bias for each head, and makes one that it does not get."""

    def __init__(self, make):
        super().__init__()
        self.heads, self.make = 4, make
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, bias=None):
        h = self.up(x).view(len(x), self.heads, 2)
        bias = self.make(self.heads).view(1, self.heads, 1) if bias is None else bias
        return self.down((h + bias).sin().flatten(1)), bias


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second = Heads(make), Heads(make)
        self.double()

    def forward(self, x):
        y, bias = self.first(x)
        self.seen = bias
        return self.second(x + y, bias)[0]


def halves(number):
    return torch.full((number,), 0.5, dtype=torch.float64)


def positions(number):
    return torch.arange(number, dtype=torch.float64)


def build(make):
    torch.manual_seed(0)
    return Net(make)


def gradients(model):
    found = []
    for _ in range(2):
        model.zero_grad()
        y = model(X)
        y.cos().sum().backward()
        found += [gather_full(y.detach()), *(gather_full(p.grad) for p in model.parameters())]
    return found


def in_static_parts(make):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(make), mesh, PLAN, mode="eager")
    set_mode(model, "static", "first", "second")
    return model


@ranks(2)
def test_a_bias_for_heads_is_a_shard():
    model = in_static_parts(halves)
    for mine, theirs in zip(gradients(model), gradients(build(halves)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert isinstance(model.seen, DTensor)
    assert model.seen.placements == (Shard(1),)
    assert model.seen.shape == (1, 4, 1)


@ranks(2)
def test_values_that_are_no_part_of_the_whole_are_refused():
    with pytest.raises(NotLocalFriendlyError, match=r"first"):
        gradients(in_static_parts(positions))
