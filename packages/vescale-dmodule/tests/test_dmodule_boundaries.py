"""Boundaries bring arguments and results of any structure to the placements of the plan, forward and backward."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vescale.dmodule import PlanError, parallelize_module
from vescale.dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from vescale_testing import ranks


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: Tensor | None = None
    note: str = "kept"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Inner(nn.Module):
    """Records the placements that its arguments arrive in."""

    def __init__(self, kind="tensor"):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.kind = kind
        self.seen = {}

    def forward(self, x, scale=2.0, *others, mask=None, **options):
        named = {"x": x, "scale": scale, "mask": mask, **options} | {f"other{i}": o for i, o in enumerate(others)}
        self.seen = {n: v.placements if isinstance(v, DTensor) else v for n, v in named.items()}
        y = self.linear(x) * scale
        for other in others:
            y = y + other
        return {
            "tensor": y,
            "tuple": (y, None, "text"),
            "list": [y, y.detach()],
            "named tuple": Pair(y, y + 1),
            "dict": {"hidden": y, "extra": None},
            "dataclass": Result(y),
            "nested": {"many": (Result(y), [y + 1])},
        }[self.kind]


class Outer(nn.Module):
    """Calls the inner module and returns what it returns."""

    def __init__(self, kind="tensor"):
        super().__init__()
        self.inner = Inner(kind)
        self.result = None

    def forward(self, x, *args, **kwargs):
        self.result = self.inner(x, *args, **kwargs)
        return self.result


def made(forward, kind="tensor", **options):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Outer(kind), mesh, {"forward": forward}, **options)


X = torch.arange(24, dtype=torch.float64).view(4, 6) / 10
S0, S1, R = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}


@ranks(2)
def test_inputs_by_position_and_by_name():
    rows = (Shard(0),)
    for entry in ([S0], S0, [[Shard(0)]], [S0, None], {"x": S0}, {"x": S0, "mask": None}, [{"tp": Shard(-2)}]):
        model = made({r"inner\.input": entry})
        model(X)
        assert model.inner.seen["x"] == rows, entry
        model(x=X)
        assert model.inner.seen["x"] == rows, entry
        assert model.inner.seen["scale"] == 2.0  # a default stays
    model = made({r"inner\.input": {"mask": S0, "extra": S1}, r"inner\.output": [R]})
    model(X, mask=X, extra=X)
    assert model.inner.seen["mask"] == rows
    assert model.inner.seen["extra"] == (Shard(1),)
    model = made({r"inner\.input": [S0, None, S0, S0]})
    model(X, 1.0, X, X)
    assert model.inner.seen["other1"] == rows


@ranks(2)
def test_outputs_of_any_structure():
    plain = Outer()
    torch.manual_seed(0)
    plain = Outer()
    expected = plain(X)
    entries = {
        "tensor": [S0],
        "tuple": [S0, None],
        "list": [S0, S1],
        "named tuple": [S0, R],
        "dict": {"hidden": S0, "extra": S0},
        "dataclass": {"hidden": S0, "extra": S0},
        "nested": {"many": [{"hidden": S0}, [R]]},
    }
    for kind, entry in entries.items():
        model = made({r"inner\.output": entry}, kind)
        output = model(X)
        inside, outside = (first_tensor(value) for value in (model.result, output))
        assert inside.placements == (Shard(0),), kind
        assert type(output) is type(model.result), kind
        assert isinstance(outside, DTensor), kind  # sharded outputs stay so
        torch.testing.assert_close(outside.full_tensor(), expected)
    model = made({r"inner\.output": [R, None]}, "tuple")
    assert model(X)[1:] == (None, "text")
    assert not isinstance(model(X)[0], DTensor)
    assert made({r"inner\.output": {"hidden": R}}, "dataclass")(X).note == "kept"


def first_tensor(value):
    if isinstance(value, Tensor):
        return value
    if dataclasses.is_dataclass(value):
        return value.hidden
    return first_tensor(next(iter(value.values())) if isinstance(value, dict) else value[0])


@ranks(2)
def test_gradients_pass_every_pair_of_placements():
    torch.manual_seed(0)
    plain = Outer()
    x = X.clone().requires_grad_()
    plain(x).square().sum().backward()
    for before in (S0, R):
        for after in (S0, S1, R):
            model = made({r"inner\.input": [before], r"inner\.output": [after], "output": [R]})
            y = X.clone().requires_grad_()
            model(y).square().sum().backward()
            torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=0)
            for name, parameter in plain.named_parameters():
                actual = model.get_parameter(name).grad
                assert actual.placements == (Replicate(),)
                torch.testing.assert_close(actual.to_local(), parameter.grad, rtol=1e-12, atol=0)


@ranks(2)
def test_partial_sums_are_reduced_at_the_root():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain, model = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    model.load_state_dict(plain.state_dict())
    parallelize_module(model, mesh, {"parameter": {"weight": {"tp": Shard(1)}}, "forward": {"input": [S1]}})
    output = model(X.float())
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, plain(X.float()))


@ranks(2)
def test_values_that_do_not_fit_the_plan():
    cases = [
        (
            "tensor",
            {r"inner\.output": [S0, S0]},
            "inner.output: expected a tuple or list of 2 values, one per entry",
        ),
        (
            "list",
            {r"inner\.output": [S0, S0, S0]},
            "inner.output: expected 3 values, one per entry of the plan, got 2;",
        ),
        (
            "tuple",
            {r"inner\.output": [S0, None, S0]},
            "inner.output [2]: expected a tensor for the planned placements (Shard(dim=0),), got a ",
        ),
        (
            "tensor",
            {r"inner\.output": {"hidden": S0}},
            "inner.output: expected a dict or dataclass with the planned fields ['hidden'], got a DTensor",
        ),
        ("dict", {r"inner\.output": {"hiden": S0}}, "inner.output: no field 'hiden'; use one of ['extra', 'hidden']"),
        (
            "dataclass",
            {r"inner\.output": {"x": S0}},
            "inner.output: no field 'x'; use one of ['extra', 'hidden', 'note']",
        ),
        (
            "tensor",
            {r"inner\.output": [{"tp": Shard(2)}]},
            "inner.output: Shard(dim=2) on a tensor of shape (4, 6), which",
        ),
        (
            "tensor",
            {r"inner\.input": [S0, S0]},
            "inner.input 'scale': expected a tensor for the planned placements (Shard(dim=0),), got a ",
        ),
        ("tensor", {r"inner\.input": {"mask2": S0}}, "inner.input 'options': no field 'mask2'; use one of []"),
    ]
    for kind, forward, text in cases:
        model = made(forward, kind)
        with pytest.raises(PlanError) as info:
            model(X, 1.0)
        assert str(info.value).startswith(text), str(info.value)


@ranks(2)
def test_a_wrong_boundary_would_be_noticed():
    """A value declared to be a partial sum is counted twice."""
    torch.manual_seed(0)
    expected = Outer()(X)
    model = made({})
    model.inner.register_forward_hook(
        lambda _module, _args, y: DTensor.from_local(y.to_local(), y.device_mesh, [Partial()])
    )
    assert not torch.allclose(model(X), expected)
