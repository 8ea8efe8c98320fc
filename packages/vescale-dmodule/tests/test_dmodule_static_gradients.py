"""Gradients of static mode are those of eager mode, bit for bit, in every way a layer can be used."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import no_sync
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
WIDTH, INNER, BATCH, LENGTH = 8, 12, 2, 6


class Gated(nn.Module):
    """Two column parallel layers behind one boundary, one of them without a bias; their outputs change in place."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, False), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.project(self.norm(x))

    def project(self, x):
        return self.down(self.gate(x).relu_() * self.up(x).mul_(0.5))


class Stack(nn.Module):
    """Gated blocks with residuals; subclasses call them in other ways."""

    def __init__(self, block=Gated):
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList([block(), block()])
        self.double()

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + self.call(block, x)
        return x

    def call(self, block, x):
        return block(x)


def plan_for(sequence_parallel):
    between = [S1] if sequence_parallel else [R]
    return {
        "parameter": {r".*(gate|up)\.(weight|bias)": S0, r".*down\.weight": S1},
        "forward": {
            r"embed\.output": between,
            r"blocks\.\d\.norm\.output": [R],
            r"blocks\.\d\.down\.output": between,
            "output": [R],
        },
    }


def inputs(step=0):
    return torch.randn(BATCH, LENGTH, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def mesh_of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def train(model, passes=2):
    """Accumulate the gradients of some passes."""
    losses = [model(inputs(step)).square().sum() for step in range(passes)]
    for loss in losses:
        loss.backward()
    return {f"loss {step}": loss.detach() for step, loss in enumerate(losses)}


# ------------------------------------------------------------------------------------------------- values


class Recomputed(Stack):
    reentrant = False

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=self.reentrant)


class RecomputedInBackward(Recomputed):
    reentrant = True


class Single(Stack):
    """In float32, which autocast knows."""

    def __init__(self, block):
        super().__init__(block)
        self.float()

    def forward(self, x):
        return super().forward(x.float())


class Failing(Stack):
    """The first block's backward fails after its layers' backward, if the model is armed."""

    armed = False

    def call(self, block, x):
        x = block.norm(x)
        if self.armed and block is self.blocks[0]:
            x.register_hook(self.fail)
        return block.project(x)

    def fail(self, _gradient):
        if self.armed:
            self.armed = False
            raise ZeroDivisionError


class Shared(Stack):
    """Both calls of a block go through the same layers."""

    def call(self, block, x):
        return block.project(block.norm(x)) + block.project(block.norm(x * 2))


class Tied(Stack):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.weight = block.gate.weight


class Own(nn.Linear):
    """A forward of its own, which is left alone."""

    def forward(self, input):  # noqa: A002
        return super().forward(input) * 2


class OwnLayers(Gated):
    def __init__(self):
        super().__init__()
        self.up = Own(WIDTH, INNER, False)
        self.gate.forward = functools.partial(nn.Linear.forward, self.gate)


class Flat(Gated):
    """Layers that see a view of what came through the boundary."""

    def project(self, x):
        rows = x.view(-1, WIDTH)
        return self.down((self.gate(rows).relu_() * self.up(rows)).view(*x.shape[:-1], -1))


class Without(torch.autograd.Function):
    """A copy that hands no gradient on."""

    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        return None


class Cut(Gated):
    """A layer whose output gets no gradient, so its weight gets none."""

    def project(self, x):
        return self.down(self.gate(x).relu_() * Without.apply(self.up(x)))


class Reader(Gated):
    """A weight that is read by other code, too."""

    def project(self, x):
        return self.down(self.gate(x).relu_() * self.up(x) + nn.functional.linear(x, self.up.weight))


def frozen(model):
    for block in model.blocks:
        block.gate.weight.requires_grad_(False)
        block.gate.bias.requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    return train(model)


def frozen_biases(model):
    for block in model.blocks:
        block.gate.bias.requires_grad_(False)
    return train(model)


def twice(model):
    """The same graph twice, then one pass more."""
    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return train(model, 1)


def left_unsynchronised(model):
    with no_sync(model) if hasattr(model, "_vescale_execution") else contextlib.nullcontext():
        found = train(model, 1)
    return found | train(model, 1)


def of_the_input(model):
    """What `torch.autograd.grad` gives for the input; the parameters get nothing."""
    x = inputs().requires_grad_()
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    assert all(p.grad is None for p in model.parameters())
    return {"gradient of the input": found} | train(model, 1)


def fail_once(model):
    """A backward that fails, then another one through the same graph."""
    train(model, 1)
    model.armed = True
    loss = model(inputs(1)).square().sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return train(model, 1)


def under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return train(model)


def forward_of_its_own(model):
    """A forward that is set when the program is made, and taken away again."""
    train(model, 1)
    layer = model.blocks[0].up
    own = layer.forward
    layer.forward = lambda x: own(x) * 2
    train(model, 1)
    del layer.forward
    return train(model, 1)


def hooked(model):
    """A user's hook sees one full gradient per pass."""
    seen = []
    parameter = model.blocks[0].up.weight
    handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(gather_full(p.grad).clone()))
    found = train(model)
    handle.remove()
    assert len(seen) == 2
    return found | {"seen": torch.stack(seen)}


# class of the model, class of its blocks, program
CASES = {
    "plain": (Stack, Gated, train),
    "views": (Stack, Flat, train),
    "recomputed": (Recomputed, Gated, train),
    "recomputed in backward": (RecomputedInBackward, Gated, train),
    "twice": (Stack, Gated, twice),
    "no_sync": (Stack, Gated, left_unsynchronised),
    "frozen": (Stack, Gated, frozen),
    "frozen biases": (Stack, Gated, frozen_biases),
    "of the input": (Stack, Gated, of_the_input),
    "another reader": (Stack, Reader, train),
    "failed": (Failing, Gated, fail_once),
    "forward of its own": (Stack, Gated, forward_of_its_own),
    "hooked": (Stack, Gated, hooked),
    "autocast": (Single, Gated, under_autocast),
    "without a gradient": (Stack, Cut, train),
    "shared": (Shared, Gated, train),
    "tied": (Tied, None, train),
    "own forwards": (Stack, OwnLayers, train),
}


@ranks(2)
def test_gradients(in_all_modes):
    mesh = mesh_of_two()
    for name, (model, block, use) in CASES.items():
        make = model if block is None else functools.partial(model, block)
        for sequence_parallel in (False, True) if name == "plain" else (True,):
            in_all_modes(make, plan_for(sequence_parallel), mesh, use, bound=0.1 if model is Single else 1e-12)


@ranks(4)
def test_two_axes(in_all_modes):
    """Gradients that are summed over the other axis, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = {"dp": Shard(0)}
    forward = {key: [entry[0] | batch] for key, entry in plan_for(True)["forward"].items() if key != "output"}
    plan = plan_for(True) | {"forward": forward | {"input": [batch], "output": [R]}}
    in_all_modes(Stack, plan, mesh, functools.partial(train, passes=3))
