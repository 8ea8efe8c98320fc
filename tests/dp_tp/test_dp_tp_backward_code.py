"""Code of the program that runs in backward, beside a tensor-parallel plan: as on one device, or refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP
from vescale_testing import gather_full, run_ranks

ROWS, TOKENS, WIDTH = 4, 3, 8
WHOLE = {"tp": Replicate()}
PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {r"up\.input": [WHOLE], r"down\.output": [WHOLE]},
}


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004 - autograd's signature
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return -0.3 * grad


class Normalized(Reversed):
    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad / grad.norm()


class Net(nn.Module):
    def __init__(self, function=None, hook=None):
        super().__init__()
        self.function, self.hook = function, hook
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = self.down(self.up(x).tanh())
        if self.hook is not None and x.requires_grad:
            x.register_hook(self.hook)
        return x if self.function is None else self.function.apply(x)


def of_parameter(hook):
    def make():
        model = Net()
        model.up.weight.register_hook(hook)
        return model

    return make


EQUAL = {
    "function": lambda: Net(Reversed),
    "hook in a forward": lambda: Net(hook=lambda grad: -grad),
    "hook of a parameter": of_parameter(lambda grad: grad - grad.mean(0)),
}
FUNCTION = "the backward of Normalized (torch.autograd.Function) is not linear"
REFUSED = {
    "function": (lambda: Net(Normalized), FUNCTION),
    "hook in a forward": (
        lambda: Net(hook=lambda grad: grad.clamp(-1e-4, 1e-4)),
        "a hook (register_hook) that a forward registers changes gradients as on one device, but it is not linear",
    ),
    "hook of a parameter": (
        of_parameter(lambda grad: grad.clamp(-1e-4, 1e-4)),
        "a hook (register_hook) of parameter 'up.weight' changes gradients as on one device, but it is not linear",
    ),
}


def build(make, mode, **settings):
    torch.manual_seed(0)
    model = make().double()
    if mode is None:
        return model, model
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(model, mesh["tp"], PLAN, mode=mode)
    return model, DDP(model, mesh["dp"], **settings)


def batch():
    return torch.randn(2 * ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def differences(cases, mode, **settings):
    mine = slice(ROWS * (dist.get_rank() // 2), ROWS * (dist.get_rank() // 2 + 1))
    found = {}
    for name, make in cases.items():
        gradients = []
        for each, rows in ((None, slice(None)), (mode, mine)):
            module, model = build(make, each, **(settings if each else {}))
            model(batch()[rows]).square().mean().backward()
            gradients.append([gather_full(p.grad) for p in module.parameters()])
        found[name] = max((one - other).abs().max().item() for one, other in zip(*gradients, strict=True))
    return found


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_gradients_are_those_of_one_device(mode):
    for found in run_ranks(differences, 4, EQUAL, mode):
        assert max(found.values()) < 1e-10, found


def test_ranks_that_are_worlds_of_their_own_differ():
    for found in run_ranks(differences, 4, {n: make for n, (make, _) in REFUSED.items()}, "eager", per_rank=True):
        assert min(found.values()) > 1e-8, found


def texts(mode):
    found = {}
    for name, (make, _) in REFUSED.items():
        _, model = build(make, mode)
        with pytest.raises(RuntimeError) as error:
            model(batch()[:ROWS]).square().mean().backward()
        found[name] = str(error.value)
    return found


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_what_differs_is_refused(mode):
    for found in run_ranks(texts, 4, mode):
        for name, (_, text) in REFUSED.items():
            assert text in found[name], found[name]
            assert "pass per_rank=True to DDP" in found[name]
