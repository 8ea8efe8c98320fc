"""In static mode the order of calls tells apart values, and random operators, of the same local shape."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {
    "parameter": {r"(.*\.)?up\.(weight|bias)": S0, r"(.*\.)?down\.weight": S1},
    "forward": {r"(.*\.)?up\.input": [R], r"(.*\.)?down\.output": [R], r"same\.output": [R]},
}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Model(nn.Module):
    """On two ranks, the shards of `up` have the local shape of the whole results of `small`."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.small = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4)
        self.same, self.drop = nn.Identity(), nn.Dropout(0.4)
        self.double()


class AlikeDraws(Model):
    """Two dropouts on one local shape, one of them on shards; a call between them draws nothing."""

    def forward(self, x):
        sharded = functional.dropout(self.up(x), 0.3)
        sharded = functional.dropout(sharded, 0.0)
        whole = functional.dropout(self.small(x), 0.3)
        return self.down(sharded) + whole.sum(-1, keepdim=True)


class AlikeCalls(Model):
    """One dropout module, called for shards and for whole tensors of the same local shape."""

    def forward(self, x):
        return self.down(self.drop(self.up(x))) + self.drop(self.small(x)).sum(-1, keepdim=True)


class AlikeValues(Model):
    """One boundary, for a shard and for a whole tensor of the same local shape."""

    def forward(self, x):
        return self.same(self.up(x).tanh()).sum() * x + self.same(self.small(x).tanh()).sum()


class MadeInside(Model):
    """A mask with one row per head is made inside: with the local number of heads, on local tensors."""

    def __init__(self):
        super().__init__()
        self.heads = 4

    def forward(self, x):
        scores = self.up(x).view(8, self.heads, -1).transpose(0, 1)
        bias = torch.zeros((self.heads, 8, 1), dtype=x.dtype)
        drawn = functional.scaled_dot_product_attention(scores, scores, scores, bias.expand(-1, -1, 8), 0.3)
        return self.down(drawn.transpose(0, 1).flatten(1))


def train(model):
    """Return results and gradients of three steps, and the state of the generator."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        output = model(X)
        output.cos().sum().backward()
        found += [output.detach(), *(gather_full(p.grad) for p in model.parameters() if p.grad is not None)]
    return [*found, torch.get_rng_state()]


def build(make):
    torch.manual_seed(0)
    return make()


def parallel(make):
    plan = PLAN if make is not MadeInside else {**PLAN, "local_attribute": {"heads": 2}}
    return parallelize_module(build(make), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan, mode="static")


def assert_same(actual, expected):
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@ranks(2)
def test_alike_draws_and_values_are_those_of_one_device():
    for make in (AlikeDraws, AlikeCalls, AlikeValues, MadeInside):
        assert_same(train(parallel(make)), train(build(make)))


class Branching(AlikeDraws):
    """Leaves out the first draw when a switch, which is no argument, is on."""

    skips = False

    def forward(self, x):
        return super().forward(x) if not self.skips else functional.dropout(self.small(x), 0.3)


class Passing(AlikeValues):
    """Passes the boundary more or less often when a switch, which is no argument, says so."""

    number = 2

    def forward(self, x):
        if self.number == 1:
            return self.same(self.small(x).tanh()).sum() * x
        return super().forward(x) if self.number == 2 else super().forward(x) + self.same(self.small(x)).sum()


@ranks(2)
def test_another_order_is_refused():
    model = parallel(Branching)
    model(X)
    model.skips = True
    with pytest.raises(NotLocalFriendlyError, match=r"the root module: expected 3 calls of .*dropout, .* got 1; only"):
        model(X)
    model = parallel(Passing)
    model(X)
    for number, got in ((3, "one more"), (1, "got 1; only their order tells them apart")):
        model.number = number
        with pytest.raises(NotLocalFriendlyError, match=rf"same.output: expected 2 values of local shape .*{got}"):
            model(X)
    model.number = 2
    assert_same(train(model), train(build(Passing)))


class LastDraw(Model):
    """Ends with a dropout: a recomputation ends inside of it."""

    def forward(self, x):
        return functional.dropout(self.down(functional.dropout(self.up(x), 0.3)), 0.3)


class Recomputed(nn.Module):
    """Recomputes a part whose values or draws only the order of calls tells apart."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@ranks(2)
def test_the_order_of_recomputed_calls_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {**PLAN, "forward": {key.replace("same", r"inner\.same"): entry for key, entry in PLAN["forward"].items()}}
    x = X.clone().requires_grad_()
    model = parallelize_module(Recomputed(build(AlikeValues)), mesh, plan, mode="static")
    with pytest.raises(NotLocalFriendlyError, match=r"expected one layout of values .* activation checkpointing"):
        model(x)
    model = parallelize_module(Recomputed(build(AlikeCalls)), mesh, plan, mode="static")
    with pytest.raises(
        NotLocalFriendlyError, match=r"'inner.drop': expected the same random operators in all of its 2"
    ):
        model(x)
    for make in (AlikeDraws, LastDraw):
        model = parallelize_module(Recomputed(build(make)), mesh, plan, mode="static")
        assert_same(train(model), train(Recomputed(build(make))))
