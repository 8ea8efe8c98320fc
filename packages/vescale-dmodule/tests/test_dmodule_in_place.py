"""The caller of a module may change its result in place, as on one device, also where a boundary pins the gradient."""

import pytest
import torch
from torch import nn
from torch.profiler import profile

from vescale.dmodule import parallelize_module, report
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

R, S0, S1, LAST = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Shard(-1)}
PLAN = {
    "parameter": {r"up\.(weight|bias)": S0, r"down\.weight": S1},
    "forward": {r"norm\.output": [R], r"same\.output": [R], r"up\.output": [LAST], r"down\.output": [R]},
}
X = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Changing(nn.Module):
    """Changes in place: a sum over ranks, a shard, a result that does not move, and a result that is an argument."""

    def __init__(self):
        super().__init__()
        self.norm, self.same = nn.LayerNorm(6), nn.Identity()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x):
        hidden = self.norm(x)
        hidden *= 2  # its gradient is a partial sum
        inner = self.up(hidden)
        inner.add_(1)
        inner[1:3].zero_()
        out = self.down(inner.tanh())
        out += x
        again = self.same(out)
        again.mul_(3)  # changes `out`, too
        return again * out


def steps(model, watch=None):
    """Train for three steps; return results and gradients."""
    found = []
    for step in range(3):
        model.zero_grad()
        x = X.clone().requires_grad_()
        if step == 2 and watch is not None:
            with watch(model):
                model(x).cos().sum().backward()
        else:
            model(x).cos().sum().backward()
        found.append({"x": x.grad, **{name: gather_full(p.grad) for name, p in model.named_parameters()}})
    return found


def assert_same(actual, expected):
    for got, wanted in zip(actual, expected, strict=True):
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                got[name], gradient, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def build():
    torch.manual_seed(0)
    return Changing()


@ranks(2)
def test_changes_in_place_are_those_of_one_device(compile_with):
    compile_with("aot_eager")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = steps(build())
    for mode in ("eager", "static", "compile"):
        for watch in (None, report, lambda _model: profile()):
            actual = steps(parallelize_module(build(), mesh, PLAN, mode=mode), watch)
            assert_same(actual, expected)


@ranks(2)
def test_without_the_change_the_gradients_differ(monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = steps(build())
    model = parallelize_module(build(), mesh, PLAN)
    monkeypatch.setattr(torch.Tensor, "mul_", lambda self, _other: self)
    with pytest.raises(AssertionError):
        assert_same(steps(model), expected)


class Doubled(torch.autograd.Function):
    """The program's own operator in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004 - autograd's signature
        return 2 * grad


class ChangingView(Changing):
    """It changes a result that is a view: that of a linear layer with three dims."""

    def forward(self, x):
        hidden = self.up(self.norm(x[None]))
        return self.down((hidden + Doubled.apply(hidden)).tanh())[0]


@ranks(2)
def test_own_functions_in_place_are_those_of_one_device():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    expected = steps(ChangingView())
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        assert_same(steps(parallelize_module(ChangingView(), mesh, PLAN, mode=mode)), expected)
