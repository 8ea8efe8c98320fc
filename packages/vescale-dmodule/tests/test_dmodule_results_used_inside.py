"""A module may use its result itself, for an auxiliary loss: boundaries move the gradient of the caller's use alone."""

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
PARAMETERS = {r"up\.(weight|bias)": S0, r"down\.weight": S1}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Penalized(nn.LayerNorm):
    """Keeps an auxiliary loss of its result."""

    def forward(self, x):
        result = super().forward(x)
        self.penalty = result.square().mean()
        return result


class Auxiliary(nn.Module):
    """Adds an auxiliary loss that a part has computed from its result."""

    boundaries = (r"norm\.output", r"down\.output")

    def __init__(self):
        super().__init__()
        self.norm, self.same = Penalized(6), nn.Identity()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh()) + self.norm.penalty


class Residual(Auxiliary):
    """Uses a tensor as the argument of a module, as its result, and by itself."""

    boundaries = (r"same\.output", r"down\.output")

    def forward(self, x):
        hidden = self.norm(x)
        return self.down(self.up(self.same(hidden)).tanh()) + hidden


def gradients(model):
    """Train for two steps; return the gradients of the last one."""
    for _ in range(2):
        model.zero_grad()
        x = X.clone().requires_grad_()
        model(x).cos().mean().backward()
    return {"x": x.grad, **{name: gather_full(p.grad) for name, p in model.named_parameters()}}


def build(kind):
    torch.manual_seed(0)
    return kind()


def assert_same(actual, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", [Auxiliary, Residual])
@ranks(2)
def test_gradients_are_those_of_one_device(kind, compile_with):
    compile_with("aot_eager")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"parameter": PARAMETERS, "forward": {boundary: [R] for boundary in kind.boundaries}}
    expected = gradients(build(kind))
    for mode in ("eager", "static", "compile"):
        assert_same(gradients(parallelize_module(build(kind), mesh, plan, mode=mode)), expected)


@pytest.mark.parametrize("kind", [Auxiliary, Residual])
def test_without_the_use_inside_the_gradients_differ(kind):
    expected = gradients(build(kind))
    changed = build(kind)
    changed.norm.register_forward_hook(lambda norm, *_: setattr(norm, "penalty", norm.penalty.detach()))
    changed.same.register_forward_hook(lambda _same, _args, out: out.detach())
    with pytest.raises(AssertionError):
        assert_same(gradients(changed), expected)
