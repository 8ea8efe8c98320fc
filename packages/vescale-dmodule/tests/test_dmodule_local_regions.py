"""A module that the plan declares a local region runs its own code on local tensors, in every mode."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dmodule import PlanError, parallelize_module, set_mode
from vescale.dtensor import Partial, Replicate, Shard, init_device_mesh
from vescale_testing import ranks

WIDTH = 6


class Gate(nn.Module):
    """Treats rows by their values: code that no rule for DTensors can follow."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, WIDTH, dtype=torch.float64))
        self.rare = nn.Parameter(torch.linspace(1, 2, WIDTH, dtype=torch.float64))
        self.seen = []

    def forward(self, x, factor=None):
        self.seen.append((type(x), tuple(x.shape)))
        out = torch.zeros_like(x)
        for row in range(x.shape[0]):
            if x[row].sum().item() > 0:
                out[row] = x[row] * self.scale
            elif x[row].abs().max().item() > 1.4:  # on some ranks no row is
                out[row] = x[row] * self.rare
        return out if factor is None else out * factor


class Net(nn.Module):
    def __init__(self, gate=None):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gate = gate or Gate()
        self.down = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.down(self.gate(self.up(x)))


ROWS = {
    "local": {"gate": {"input": [{"tp": Shard(0)}], "output": [{"tp": Shard(0)}]}},
    "forward": {r"down\.input": [{"tp": Replicate()}]},
}
X = torch.randn(7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def train(model, x):
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def pair(plan, make=Net, **options):
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    return plain, parallelize_module(make(), mesh(), plan, **options)


def assert_same(model, plain, x=X):
    (output, grads), (expected, expected_grads) = train(model, x), train(plain, x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_rows_equal_one_process(world):
    @ranks(world)
    def on_every_rank():
        plain, model = pair(ROWS)
        for mode in ("eager", "static"):
            set_mode(model, mode)
            for rows in (7, 6, 4, 7):  # even shards, uneven ones, with 3 ranks and 4 rows an empty one
                model.gate.seen.clear()
                assert_same(model, plain, X[:rows] * (1 if rows < 7 else 2))
                kind, shape = model.gate.seen[-1]
                assert kind is torch.Tensor
                assert shape[0] < rows
            assert isinstance(model.gate.scale, DTensor)

    on_every_rank()


@ranks(2)
def test_partial_outputs_and_parameters_that_one_rank_uses():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))
            self.other = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x):
            parts = x @ self.weight
            return parts * self.other if parts.shape[0] > 100 else parts

    plan = {
        "parameter": {r"gate\.weight": {"tp": Shard(0)}},
        "local": {"gate": {"input": [{"tp": Shard(1)}], "output": [{"tp": Partial()}]}},
        "forward": {r"down\.input": [{"tp": Replicate()}]},
    }
    plain, model = pair(plan, lambda: Net(Sum()))
    for mode in ("eager", "static"):
        set_mode(model, mode)
        assert_same(model, plain)
    wrong = {**plan, "local": {"gate": {"input": [{"tp": Shard(1)}], "output": [{"tp": Replicate()}]}}}
    plain, model = pair(wrong, lambda: Net(Sum()))
    with pytest.raises(AssertionError):
        assert_same(model, plain)


@ranks(2)
def test_local_attributes_and_named_arguments():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = WIDTH

        def forward(self, *, x, factor):
            return x.view(x.shape[0], self.width).cumsum(0) * factor

    class Named(Net):
        def forward(self, x):
            return self.down(self.gate(x=self.up(x), factor=2.0))

    plan = {
        "local": {"gate": {"input": {"x": {"tp": Shard(1)}}, "output": {"tp": Shard(1)}}},
        "local_attribute": {r"gate\.width": WIDTH // 2},
        "forward": {r"down\.input": [{"tp": Replicate()}]},
    }
    plain, model = pair(plan, lambda: Named(Heads()))
    for mode in ("eager", "static"):
        set_mode(model, mode)
        assert_same(model, plain)
        assert model.gate.width == WIDTH


@ranks(2)
def test_what_is_refused():
    mixed = {"local": {"gate": {"output": [{"tp": Shard(0)}, {"tp": Replicate()}]}}}
    expected = "so the gradients of replicated inputs are ambiguous; return the replicated one from a module of its own"
    with pytest.raises(PlanError, match=re.escape(expected)):
        pair(mixed)

    class Random(Gate):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5)

    _, model = pair(ROWS, lambda: Net(Random()))
    with pytest.raises(NotImplementedError, match="it is a local region; move the random operator out of it"):
        model(X)
    assert isinstance(model.gate.scale, DTensor)
