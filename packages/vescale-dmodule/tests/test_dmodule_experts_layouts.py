"""Experts on every layout of two mesh axes give one device's values and gradients, on local tensors and on DTensors.

Each axis cuts the expert dim, an inner dim or nothing, and the tokens are sharded over it or not: twenty layouts.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.dmodule._experts import Experts, install_experts, plan_experts
from vescale.dmodule._experts import dispatch as _dispatch
from vescale.dmodule._experts import operators as _operators
from vescale.dmodule._experts import region as _region
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


INNER_DIMS = {"up": Shard(1), "up_bias": Shard(1), "down": Shard(2)}
ROUTINGS = {
    "each to others": lambda logits: logits,
    "all to three": lambda logits: logits + torch.tensor([0.0, 50.0, 60.0, 70.0]),
    "one without tokens": lambda logits: logits + torch.tensor([0.0, 0.0, 0.0, -90.0]),
    "ties": torch.zeros_like,
}


def made():
    torch.manual_seed(0)
    return Mlps().double()


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
        if "experts" in roles:
            for tokens in itertools.product((Shard(0), Replicate()), repeat=2):
                yield roles, tokens


def plan(roles, skips_absent):
    placements = {axis: Shard(0) for axis, role in zip(AXES, roles, strict=True) if role == "experts"}
    inner = [axis for axis, role in zip(AXES, roles, strict=True) if role == "inner"]
    parameters = {leaf: dict.fromkeys(inner, placement) for leaf, placement in INNER_DIMS.items()} if inner else {}
    once = ["down_bias"] if inner else []
    return Experts(placements, parameters=parameters, once=once, skips_absent=skips_absent)


def on_dtensors(roles, tokens, routing, mesh, *, skips_absent=None):
    """Install on DTensor parameters and give the module DTensors."""
    module = made()
    layout = plan_experts("experts", module, plan(roles, skips_absent), mesh)
    for name, parameter in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, layout.parameters[name])))
    region = install_experts(module, layout, mesh)
    results = run(module, *(distribute_tensor(value, mesh, tokens) for value in operands(routing)))
    assert all(result.placements == tokens for result in results)
    assert region.last_tokens == tokens
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert all(grads[name].placements == region.gradient_placements(tokens)[name] for name in grads)
    return [result.full_tensor() for result in results], {name: grad.full_tensor() for name, grad in grads.items()}


def on_local_tensors(roles, tokens, routing, mesh, *, skips_absent=None):
    """Install on plain local parameters and give the module plain local tensors: no DTensor is involved."""
    module = made()
    layout = plan_experts("experts", module, plan(roles, skips_absent), mesh)
    shapes = {name: (p.shape, p.stride()) for name, p in module.named_parameters()}
    for name, parameter in list(module.named_parameters()):
        local = distribute_tensor(parameter.detach(), mesh, layout.parameters[name]).to_local()
        module.register_parameter(name, nn.Parameter(local.clone()))
    region = install_experts(module, layout, mesh)
    whole = operands(routing)
    local = [distribute_tensor(value, mesh, tokens).to_local() for value in whole]
    with region.on_local_tensors(tokens):
        results = run(module, *local)

    def full(value, placements, shape, stride):
        assert type(value) is torch.Tensor
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()

    like = (whole[0], whole[0], whole[2])
    results = [full(result, tokens, w.shape, w.stride()) for result, w in zip(results, like, strict=True)]
    placements = region.gradient_placements(tokens)
    return results, {name: full(p.grad, placements[name], *shapes[name]) for name, p in module.named_parameters()}


def assert_alike(actual, expected):
    for result, right in zip((*actual[0], *actual[1].values()), (*expected[0], *expected[1].values()), strict=True):
        torch.testing.assert_close(result, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "routings"),
    [
        (on_dtensors, {"one without tokens": False}),
        (on_local_tensors, {"all to three": False, "ties": True}),
    ],
)
def test_every_layout(call, routings):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        for routing, skips_absent in routings.items():
            expected = reference(routing)
            for roles, tokens in layouts():
                actual = call(roles, tokens, routing, mesh, skips_absent=skips_absent)
                try:
                    assert_alike(actual, expected)
                except AssertionError as error:
                    raise AssertionError(f"{roles}, {tokens}, {routing}: {error}") from error
                if roles == ("experts", "experts") and tokens == (Shard(0), Shard(0)):
                    assert torch.equal(actual[0][0], expected[0][0])  # each expert gets the rows it gets on one device
                    assert all(torch.equal(grad, expected[1][name]) for name, grad in actual[1].items())

    on_every_rank()


def flipped(rows, order, *sizes):
    return _operators._AddRows.apply(rows, order.flip(0), *sizes)


# what is replaced by what, and the layout in which that must be noticed
WRONG = {
    "no sum over the ranks": ("sum_ranks", lambda partial, *_: partial, ("experts", None), (Replicate(), Replicate())),
    "no sum of gradients": ("share", lambda _, *tensors: tensors, ("experts", "inner"), (Replicate(), Replicate())),
    "a part of the tokens only": (
        "gradient_placements",
        lambda layout, _: layout.parameters,
        ("experts", None),
        (Shard(0), Shard(0)),
    ),
    "rows of other tokens": ("add_rows", flipped, ("experts", "experts"), (Shard(0), Shard(0))),
}


@ranks(4)
def test_wrong_variants_are_noticed(monkeypatch):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    routing = "each to others"
    expected = reference(routing)
    for name, function, *layout in WRONG.values():
        assert_alike(on_local_tensors(*layout, routing, mesh), expected)
        with monkeypatch.context() as patch:
            patch.setattr(_region if hasattr(_region, name) else _dispatch, name, function)
            with pytest.raises(AssertionError):
                assert_alike(on_local_tensors(*layout, routing, mesh), expected)
