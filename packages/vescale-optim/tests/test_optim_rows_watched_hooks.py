"""Hooks for backward that no recording sees change gradients as on one device, or are refused in backward."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP
from vescale_testing import run_ranks

ROWS, WIDTH = 4, 6


class Net(nn.Module):
    """Two layers, a hook that is registered where gradients are taken, and one that code around it registers."""

    def __init__(self, hook=None):
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.hook = hook

    def forward(self, x):
        x = self.lift(x)
        if self.hook is not None and x.requires_grad:
            x.register_hook(self.hook)
        return self.out(x.tanh()).square().mean()


def on_parameter(hook):
    def make():
        model = Net()
        model.lift.weight.register_hook(hook)
        return model

    return make


def on_module(hook):
    def make():
        model = Net()
        model.lift.register_full_backward_hook(lambda _module, given, _of_results: hook(*given))
        return model

    return make


def before_module(hook):
    def make():
        model = Net()
        model.out.register_full_backward_pre_hook(lambda _module, of_results: hook(*of_results))
        return model

    return make


def with_gradients(hook):
    return lambda: Net(hook)


class Both(Net):
    """The recording sees one hook without code of its own, and not the other."""

    def forward(self, x):
        (2 * self.lift.bias).register_hook(functools.partial(torch.mul, 2))
        return super().forward(x)


def noisy(grad):
    return grad + torch.randn_like(grad)


def clipped_in_place(grad):
    grad.clamp_(-1e-3, 1e-3)


EQUAL = {
    "of a parameter": on_parameter(lambda grad: 0.1 * grad),
    "of a parameter, over its rows": on_parameter(lambda grad: grad - grad.mean(0)),
    "of a parameter, that looks": on_parameter(lambda grad: None),  # noqa: ARG005
    "of a module": on_module(lambda grad: (None if grad is None else -grad,)),
    "of a module, that looks": on_module(lambda grad: (grad,)),
    "before a module": before_module(lambda grad: (grad / 2,)),
    "where gradients are taken": with_gradients(lambda grad: -grad),
}
LINEAR, ROWS_MIXED = "but it is not linear", "but it does not treat every row alone"
PARAMETER, MODULE = "a hook (register_hook) of parameter 'lift.weight'", "a hook for backward of module"
FORWARD = "a hook (register_hook) that a forward registers"
REFUSED = {
    "clips a parameter": (on_parameter(lambda grad: grad.clamp(-1e-3, 1e-3)), PARAMETER, LINEAR),
    "keeps large numbers": (on_parameter(lambda grad: grad * (grad.abs() > 1e-2)), PARAMETER, LINEAR),
    "clips a parameter in place": (on_parameter(clipped_in_place), PARAMETER, "changes a gradient in place"),
    "draws for a parameter": (on_parameter(noisy), PARAMETER, "draws random numbers in backward"),
    "mixes rows of a module": (before_module(lambda grad: (grad - grad.mean(0),)), f"{MODULE} 'out'", ROWS_MIXED),
    "counts rows of a module": (before_module(lambda grad: (grad / len(grad),)), f"{MODULE} 'out'", ROWS_MIXED),
    "draws for a module": (before_module(lambda grad: (noisy(grad),)), f"{MODULE} 'out'", "draws random numbers"),
    "mixes rows in a forward": (with_gradients(lambda grad: grad - grad.mean(0)), FORWARD, ROWS_MIXED),
    "clips in a forward, beside another hook": (
        lambda: Both(functools.partial(torch.clamp, min=-1e-3, max=1e-3)),
        FORWARD,
        LINEAR,
    ),
    "clips in a forward": (with_gradients(lambda grad: grad.clamp(-1e-3, 1e-3)), FORWARD, LINEAR),
}


def batch(rows, *, generator=None):
    return torch.randn(rows, WIDTH, generator=generator or torch.Generator().manual_seed(2), dtype=torch.float64)


def differences(cases, **settings):
    size, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name, make in cases.items():
        gradients = []
        for part in (slice(None), slice(ROWS * rank, ROWS * (rank + 1))):
            torch.manual_seed(0)
            module = model = make().double()
            if part.stop is not None:
                model = DDP(module, init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), **settings)
            for _ in range(2):
                model(batch(ROWS * size)[part]).backward()
            gradients.append([p.grad for p in module.parameters()])
        found[name] = max((one - other).abs().max().item() for one, other in zip(*gradients, strict=True))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_device(size):
    for found in run_ranks(differences, size, EQUAL):
        assert max(found.values()) < 1e-10, found


def test_ranks_that_are_worlds_of_their_own_differ():
    cases = {name: make for name, (make, *_) in REFUSED.items() if "draws" not in name}  # which all ranks draw alike
    for found in run_ranks(differences, 2, cases, per_rank=True):
        assert min(found.values()) > 1e-8, found


def texts():
    found = {}
    for name, (make, *_) in REFUSED.items():
        model = DDP(make(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        loss = model(batch(2 * ROWS).float().chunk(2)[dist.get_rank()])
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        found[name] = str(error.value)
    return found


def test_what_differs_is_refused():
    for found in run_ranks(texts, 2):
        for name, (_, *parts) in REFUSED.items():
            assert all(part in found[name] for part in parts), found[name]
            assert "pass per_rank=True to DDP" in found[name]


def later():
    module = Net()
    model = DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    x, seen = batch(ROWS).float(), []
    model(x).backward()
    module.lift.weight.register_hook(lambda grad: seen.append(grad.shape))
    model(x).backward()
    handle = module.lift.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    loss = model(x)
    with pytest.raises(RuntimeError, match="is not linear"):
        loss.backward()
    handle.remove()
    return seen


def test_hooks_that_are_registered_after_the_first_call_are_watched():
    assert run_ranks(later, 2) == [[(WIDTH, WIDTH)] * 2] * 2, "one that looks runs once in each backward"
