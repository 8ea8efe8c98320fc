"""Activation checkpointing in static mode recomputes the same values, dropout included."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import NotLocalFriendlyError, parallelize_module, plans, set_mode
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}


class Own(torch.autograd.Function):
    """A checkpoint that is none of torch's."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), grad)
        return None, x.grad


class Recomputed(nn.Module):
    """Checkpoints the elements of a list, a module that is in no list, a function, or functions inside of layers."""

    def __init__(self, kind, use_reentrant=False, again=None):
        super().__init__()
        self.kind = kind
        self.again = again or functools.partial(checkpoint, use_reentrant=use_reentrant)
        layer = functools.partial(Layer, self.again if kind == "inside" else None)
        self.first, self.layers = layer(), nn.ModuleList([layer(), layer()])
        self.last = nn.Linear(6, 6)
        self.double()

    def inner(self, x):
        return self.first.down(nn.functional.dropout(self.first.up(x).relu(), 0.3))

    def forward(self, x):
        first = {"function": self.inner}.get(self.kind, self.first)
        x = self.again(first, x) if self.kind in ("module", "function") else first(x)
        for layer in self.layers:
            x = self.again(layer, x) if self.kind == "list" else layer(x)
        return self.last(x)


class Layer(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(0.3)
        self.scale, self.again = nn.Parameter(torch.linspace(0.5, 1, 6)), again

    def inner(self, x):
        """Has operators of its own on shards, and parameters, where no hook of a module runs."""
        h = nn.functional.dropout(self.up(self.norm(x) * self.scale).relu(), 0.2)
        return x + self.down(nn.functional.dropout(self.drop(h), 0.3))

    def forward(self, x):
        x = nn.functional.dropout(x, 0.1)
        return self.again(self.inner, x) if self.again else self.inner(x)


PLAN = {
    "parameter": {r".*\.up\.(weight|bias)": S0, r".*\.down\.weight": S1},
    "forward": {r"first\.input": [S0], r".*\.up\.input": [R], r".*\.down\.output": [S0], r"last\.input": [R]},
}


def inputs(rows, seed):
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(model):
    found = {}
    for step, rows in enumerate((8, 7, 8)):  # 7 and 8 look the same on the first rank
        y = model(inputs(rows, step).requires_grad_())
        y.square().sum().backward()
        found[f"output {step}"] = y.detach()
    first, second = (model(inputs(rows, rows).requires_grad_()) for rows in (8, 7))
    first.square().sum().backward()  # recomputed after a call with other layouts
    second.square().sum().backward()
    return found


@ranks(2)
def test_layers_modules_and_functions(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for use_reentrant in (False, True):
        for kind in ("list", "module", "function", "inside"):
            in_all_modes(functools.partial(Recomputed, kind, use_reentrant), PLAN, mesh, train)


def test_what_surrounds_a_function_reaches_backward_by_its_checkpoint_alone(monkeypatch):
    monkeypatch.setattr("vescale.dtensor._torch.recompute.carriers", [])

    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for kind in ("function", "inside"):
            model = parallelize_module(Recomputed(kind), mesh, PLAN, mode="static")
            with pytest.raises(NotLocalFriendlyError, match=r"local tensors backward fails|eager mode diverge"):
                train(model)
            assert all(parameter.grad is None for parameter in model.parameters())

    on_every_rank()


def forward_with_moved(model, rows):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return model(inputs(rows, rows).requires_grad_()).square().sum()


@ranks(2)
def test_saved_tensors_that_move(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def with_several_layouts(model):
        for rows in (7, 8, 9):  # on each rank, two of them look the same
            model(inputs(rows, 0).requires_grad_()).sum().backward()
        losses = [forward_with_moved(model, rows) for rows in (8, 7, 9)]
        for loss in losses:
            loss.backward()
        return {}

    for kind in ("list", "inside"):
        in_all_modes(functools.partial(Recomputed, kind), PLAN, mesh, with_several_layouts)


@ranks(2)
def test_other_checkpoints_find_their_layouts_by_memory(in_all_modes):
    mesh, make = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), lambda: Recomputed("list", again=Own.apply)

    def train_without_dropout(model):
        return train(model.eval())

    def with_one_layout(model):
        forward_with_moved(model.eval(), 8).backward()
        return {}

    in_all_modes(make, PLAN, mesh, train_without_dropout)
    in_all_modes(make, PLAN, mesh, with_one_layout)
    model = parallelize_module(make(), mesh, PLAN, mode="static").eval()
    for rows in (7, 8, 9):
        model(inputs(rows, 0).requires_grad_()).sum().backward()
    loss = forward_with_moved(model, 8)
    with pytest.raises(NotLocalFriendlyError, match=r"'layers\.1' is recomputed in backward: expected the operands of"):
        loss.backward()
    model(inputs(8, 0).requires_grad_()).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_hugging_face_checkpointing_switched_on_after_some_steps(use_reentrant, build, train, assert_same_pass):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        expected = train(build("llama", dropout=0.1), use_cache=False)
        model = build("llama", dropout=0.1)
        parallelize_module(model, mesh, plans.plan_for(model, degree=2, sequence_parallel=True), mode="static")
        assert_same_pass(train(model, use_cache=False), expected)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.zero_grad()
        assert_same_pass(train(model, use_cache=False), expected)
        calls = []  # counted in a call that is already recorded
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        model.zero_grad()
        assert_same_pass(train(model, use_cache=False), expected)
        assert len(calls) == 2  # it has run again
        set_mode(model, "eager")
        model.zero_grad()
        assert_same_pass(train(model, use_cache=False), expected)

    on_every_rank()
