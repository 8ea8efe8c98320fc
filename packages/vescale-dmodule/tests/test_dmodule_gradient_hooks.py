"""Hooks that a program has registered on parameters before it gets a plan change gradients as on one device."""

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

R = {"tp": Replicate()}
PLAN = {
    "parameter": {r"0\.(weight|bias)": {"tp": Shard(0)}, r"2\.weight": {"tp": Shard(1)}},
    "forward": {r"0\.input": [R], r"2\.output": [R]},
}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


def tripled(parameter):
    parameter.grad.mul_(3)


def build(hook=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    handle = hook and model[0].weight.register_hook(hook)
    model[2].weight.register_post_accumulate_grad_hook(tripled)
    return model, handle


def gradients(model):
    for _ in range(2):
        model.zero_grad()
        model(X).square().mean().backward()
    return [gather_full(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("mode", ["eager", "static"])
@ranks(2)
def test_gradients_are_those_of_one_device(mode):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for hook in (lambda grad: 0.1 * grad, lambda grad: grad - grad.mean(0), lambda grad: grad.clamp(-1e-3, 1e-3)):
        expected = gradients(build(hook)[0])
        actual = gradients(parallelize_module(build(hook)[0], mesh, PLAN, mode=mode))
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert not torch.allclose(expected[0], gradients(build()[0])[0], rtol=0, atol=1e-8), "the hook changes them"


@ranks(2)
def test_handles_remove_them():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    seen = []
    model, handle = build(lambda grad: seen.append(grad.shape))
    model = parallelize_module(model, mesh, PLAN, mode="eager")
    gradients(model)
    handle.remove()
    gradients(model)
    assert seen == [(8, 6)] * 2
