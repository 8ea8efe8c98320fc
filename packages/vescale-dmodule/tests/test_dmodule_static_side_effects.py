"""The dry runs of static mode leave nothing behind that one call of the module would not."""

import contextvars
import functools

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [{"tp": Replicate()}]},
}
GENERATOR = torch.Generator()
SHAPES, COUNT = [], 0
COLLECTED = contextvars.ContextVar("collected")


class Net(nn.Module):
    """Keeps a list, a set and a dict, draws from a generator of the program, and decays a weight in its forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.shapes, self.seen, self.counts = [], set(), {}

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        self.seen.add(len(self.shapes))
        self.counts[len(self.shapes)] = 1
        with torch.no_grad():
            self.scale.mul_(0.5)
        noise = torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)
        return self.down(self.up(x).relu()) * self.scale + noise


def run(model):
    GENERATOR.manual_seed(3)
    outputs = []
    for step in range(2):
        model.zero_grad()
        out = model(torch.full((2, 4), step + 1.0, dtype=torch.float64))
        out.square().sum().backward()
        outputs.append(gather_full(out.detach()))
    gradients = [gather_full(p.grad) for p in model.parameters()]
    return [*outputs, *gradients, gather_full(model.scale.detach()), GENERATOR.get_state().double()]


def build():
    torch.manual_seed(0)
    return Net().double()


@ranks(2)
def test_generators_parameters_and_attributes():
    alone = build()
    expected = run(alone)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(), mesh["tp"], PLAN, mode="static")
    for value, other in zip(run(model), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-10)
    assert (model.shapes, model.seen, model.counts) == (alone.shapes, alone.seen, alone.counts)


class Watcher:
    """Stores in attributes of an object that is no module."""

    def __init__(self):
        self.count, self.shapes = 0, []

    def after(self, _module, _args, output):
        self.count += 1
        self.shapes.append(output.shape)

    __call__ = after


def by_closure():
    count, shapes = 0, []

    def hook(_module, _args, output):
        nonlocal count
        count += 1
        shapes.append(output.shape)

    return hook, lambda: (count, len(shapes))


def by_global():
    global COUNT
    COUNT = 0
    SHAPES.clear()

    def hook(_module, _args, output):
        global COUNT
        COUNT += 1
        SHAPES.append(output.shape)

    return hook, lambda: (COUNT, len(SHAPES))


def by_partial():
    stored = {"shapes": [], "count": []}

    def hook(stored, _module, _args, output):
        stored["shapes"].append(output.shape)
        stored["count"].append(1)

    return functools.partial(hook, stored), lambda: (len(stored["count"]), len(stored["shapes"]))


def by_method():
    watcher = Watcher()
    return watcher.after, lambda: (watcher.count, len(watcher.shapes))


def by_object():
    watcher = Watcher()
    return watcher, lambda: (watcher.count, len(watcher.shapes))


def by_context():
    COLLECTED.set({"shapes": [], "count": []})

    def hook(_module, _args, output):
        COLLECTED.get()["shapes"].append(output.shape)
        COLLECTED.get()["count"].append(1)

    return hook, lambda: (len(COLLECTED.get()["count"]), len(COLLECTED.get()["shapes"]))


@pytest.mark.parametrize("way", [by_closure, by_global, by_partial, by_method, by_object, by_context])
@ranks(2)
def test_what_hooks_store(way):
    """As Hugging Face models collect hidden states: one for each call."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(), mesh["tp"], PLAN, mode="static")
    hook, stored = way()
    model.up.register_forward_hook(hook)
    for step in range(3):
        assert stored() == (step, step)
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    assert stored() == (3, 3)
