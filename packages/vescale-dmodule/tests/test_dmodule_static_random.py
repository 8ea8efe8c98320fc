"""Random operators in static mode draw what one device draws, in both streams, for a part of the batch, too."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh, random
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {
    "parameter": {r"up\.(weight|bias)": S0, r"down\.weight": S1},
    "forward": {r"up\.input": [R], r"down\.output": [R]},
}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


def drop(hidden):
    return functional.dropout(hidden, 0.3)


def rand_like(hidden):
    return hidden * torch.rand_like(hidden) + torch.randn_like(hidden)


def in_place(hidden):
    noise = torch.empty_like(hidden).normal_()
    mask = torch.empty_like(hidden).bernoulli_(0.6)
    return hidden * mask + noise.uniform_(-1, 1)


def bernoulli(hidden):
    return hidden * torch.bernoulli(torch.full_like(hidden, 0.5))


def twice(hidden):
    return functional.dropout(functional.dropout(hidden, 0.2), 0.2)


def feature(hidden):
    return functional.alpha_dropout(hidden, 0.3)


class Noisy(nn.Module):
    """Draws on sharded activations between its two layers, and on whole ones after them."""

    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.2)
        self.draw = draw
        self.double()

    def forward(self, x):
        return self.drop(self.down(self.draw(self.up(x).tanh())))


class Fused(nn.Module):
    """Attention in one operator, with dropout."""

    def __init__(self):
        super().__init__()
        self.qkv, self.down = nn.ModuleList(nn.Linear(6, 8, bias=n != 1) for n in range(3)), nn.Linear(8, 6)
        self.double()

    def forward(self, x):
        q, k, v = (p(x).view(2, 4, -1, 2).transpose(1, 2) for p in self.qkv)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return self.down(y.transpose(1, 2).flatten(2)).flatten(0, 1)


FUSED = {**PLAN, "parameter": {r"qkv\.\d\.(weight|bias)": S0, r"down\.weight": S1}}
FUSED["forward"] = {r"qkv\.\d\.input": [R], r"down\.output": [R]}


def steps(model):
    found = {}
    for step in range(2):
        y = model(X)
        y.square().sum().backward()
        found |= {f"output {step}": y.detach(), f"next {step}": torch.rand(3)}
    return found


@ranks(2)
def test_draws_are_those_of_one_device(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for stream in ("torch", "philox"):
        with random.stream(stream, seed=3) if stream == "philox" else contextlib.nullcontext():
            for draw in (drop, rand_like, in_place, bernoulli, twice, feature):
                in_all_modes(lambda draw=draw: Noisy(draw), PLAN, mesh, steps)
    in_all_modes(Fused, FUSED, mesh, steps)


@ranks(4)
def test_each_data_rank_draws_its_part_of_the_batch(in_all_modes):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_local_rank("dp")

    def local_steps(model):
        torch.manual_seed(7)
        if not hasattr(model, "_vescale_execution"):
            return {"output": model(X)[4 * dp : 4 * dp + 4].detach()}
        with random.local_batch(mesh["dp"]):
            for _ in range(2):
                torch.manual_seed(7)
                output = model(X[4 * dp : 4 * dp + 4])
        return {"output": output.detach()}

    for draw in (drop, in_place):
        in_all_modes(lambda draw=draw: Noisy(draw), PLAN, mesh["tp"], local_steps)


class Scheduled(nn.Module):
    """Drops after some calls; no argument depends on it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.p = 0.0
        self.double()

    def forward(self, x):
        return self.down(functional.dropout(self.up(x), self.p))


@ranks(2)
def test_random_operators_that_are_not_recorded_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Scheduled(), mesh, PLAN, mode="static")
    model(X)
    model(X)
    model.p = 0.5
    with pytest.raises(NotLocalFriendlyError, match=r"drew random numbers, .* the recorded call did not"):
        model(X)
    model.p = 0.0
    model(X)  # the module is as before

    class Branching(Noisy):
        def forward(self, x):
            hidden = self.up(x)
            if x[0, 0] > 0:
                hidden = torch.bernoulli(torch.full_like(hidden[:, :2], 0.5)).sum() + hidden
            return self.down(torch.bernoulli(torch.full_like(hidden, 0.5)) * hidden)

    model = parallelize_module(Branching(None), mesh, PLAN, mode="static")
    model(X)
    with pytest.raises(NotLocalFriendlyError, match=r"the root module: .*bernoulli on local shapes .* draws random"):
        model(-X)
