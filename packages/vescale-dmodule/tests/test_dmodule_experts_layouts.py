"""Experts on every layout of two mesh axes give one device's values and gradients, in eager and in static mode.

Each axis cuts the expert dim, an inner dim or nothing, and the tokens are sharded over it or not: 32 layouts.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import AllToAll, Experts, parallelize_module
from vescale.dtensor import init_device_mesh
from vescale_testing import ranks

NUM_EXPERTS, HIDDEN, INNER, NUM_TOKENS, TOP_K = 4, 6, 8, 11, 3
AXES = ("a", "b")


class Mlps(nn.Module):
    """Expert MLPs with biases, the second of which is added after the sum over a cut inner dim."""

    def __init__(self):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, INNER, HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(NUM_EXPERTS, INNER))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, INNER))
        self.down_bias = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token):
                inner = torch.tanh(hidden_states[token] @ self.up[expert].T + self.up_bias[expert])
                rows = inner @ self.down[expert].T + self.down_bias[expert]
                out = out.index_add(0, token, rows * top_k_weights[token, choice, None])
        return out


class Around(nn.Module):
    """Experts alone."""

    def __init__(self):
        super().__init__()
        self.experts = Mlps()

    def forward(self, hidden, index, weights):
        return self.experts(hidden, index, weights)


INNER_DIMS = {"up": Shard(1), "up_bias": Shard(1), "down": Shard(2)}
ROUTINGS = {
    "each to others": lambda logits: logits,
    "all to three": lambda logits: logits + torch.tensor([0.0, 50.0, 60.0, 70.0]),
    "one without tokens": lambda logits: logits + torch.tensor([0.0, 0.0, 0.0, -90.0]),
    "ties": torch.zeros_like,
}


def made():
    torch.manual_seed(0)
    return Around().double()


def operands(routing):
    generator = torch.Generator().manual_seed(1)
    hidden, logits, target = (torch.randn(NUM_TOKENS, n, generator=generator).double() for n in (HIDDEN, 4, HIDDEN))
    weights, index = torch.topk(torch.softmax(ROUTINGS[routing](logits), dim=-1), TOP_K)
    return hidden, index, weights, target


def run(module, hidden, index, weights, target):
    hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
    output = module(hidden, index, weights)
    (output * target).sum().backward()
    return output.detach(), hidden.grad, weights.grad


def reference(routing):
    module = made()
    results = run(module, *operands(routing))
    return results, {name: p.grad for name, p in module.named_parameters()}


def layouts():
    for roles in itertools.product(("experts", "inner", None), repeat=2):
        if any(roles):
            for tokens in itertools.product((Shard(0), Replicate()), repeat=2):
                yield roles, tokens


def experts(roles, **options):
    """The plan entry of experts whose mesh axes have these roles."""
    kinds = {"experts": Shard(0)}
    placements = {axis: kinds.get(role, Replicate()) for axis, role in zip(AXES, roles, strict=True)}
    inner = [axis for axis, role in zip(AXES, roles, strict=True) if role == "inner"]
    parameters = {leaf: dict.fromkeys(inner, placement) for leaf, placement in INNER_DIMS.items()} if inner else {}
    return Experts(placements, parameters=parameters, once=["down_bias"] if inner else [], **options)


def on_ranks(entry, tokens, routing, mesh, mode="eager"):
    forward = {"input": [tokens, tokens, tokens], "output": [(Replicate(), Replicate())]}
    model = parallelize_module(made(), mesh, {"expert": {"experts": entry}, "forward": forward}, mode=mode)
    results = run(model, *operands(routing))
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
    return results, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def assert_alike(actual, expected):
    for result, right in zip((*actual[0], *actual[1].values()), (*expected[0], *expected[1].values()), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mode", "routings"),
    [
        ("eager", {"one without tokens": False}),
        ("static", {"all to three": False, "ties": True}),
    ],
)
def test_every_layout(mode, routings):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        for routing, skips_absent in routings.items():
            expected = reference(routing)
            for roles, tokens in layouts():
                actual = on_ranks(experts(roles, skips_absent=skips_absent), tokens, routing, mesh, mode)
                try:
                    assert_alike(actual, expected)
                except AssertionError as error:
                    raise AssertionError(f"{roles}, {tokens}, {routing}: {error}") from error
                if roles == ("experts", "experts") and tokens == (Shard(0), Shard(0)):
                    assert torch.equal(actual[0][0], expected[0][0])  # each expert gets the rows it gets on one device
                    assert all(torch.equal(grad, expected[1][name]) for name, grad in actual[1].items())

    on_every_rank()


class OtherRows(AllToAll):
    """Brings back the outputs of other tokens."""

    def combine(self, rows, exchange):
        return super().combine(rows, exchange).flip(0)


class WithoutGradient(AllToAll):
    """Sends no gradient back."""

    def dispatch(self, rows, exchange):
        return super().dispatch(rows.detach(), exchange)


@ranks(4)
def test_wrong_variants_are_noticed():
    mesh, routing, tokens = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES), "each to others", (Shard(0), Shard(0))
    expected = reference(routing)
    for roles in (("experts", "experts"), ("experts", None), ("experts", "inner")):
        assert_alike(on_ranks(experts(roles), tokens, routing, mesh), expected)
        for dispatcher in (OtherRows(), WithoutGradient()):
            with pytest.raises((AssertionError, AttributeError)):
                assert_alike(on_ranks(experts(roles, dispatcher=dispatcher), tokens, routing, mesh), expected)
