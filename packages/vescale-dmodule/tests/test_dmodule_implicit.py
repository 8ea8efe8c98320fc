"""Operators inside a parallelized module communicate only where the plan says so, and plain tensors mix in safely."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode

from vescale.dmodule import ImplicitRedistributionError, parallelize_module
from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, strict
from vescale_testing import ranks


class Net(nn.Module):
    """Calls `body(x, y, self)` in a submodule, where x is sharded over rows and y over columns."""

    def __init__(self, body):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)
        self.join = Join(body)

    def forward(self, x):
        return self.join(self.one(x), self.two(x))


class Join(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, y):
        return self.body(x, y)


X = torch.arange(24, dtype=torch.float64).view(4, 6) / 10
PLAN = {"forward": {r"one\.output": [{"tp": Shard(0)}], r"two\.output": [{"tp": Shard(1)}]}}


def made(body, plan=PLAN, **options):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Net(body), mesh, plan, **options)


def plain(body):
    torch.manual_seed(0)
    return Net(body)


def grads(model):
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


@ranks(2)
def test_a_forgotten_boundary_is_an_error_that_says_where():
    model = made(lambda x, y: x + y)
    expected = (
        "in module 'join': torch.Tensor.add on operands (4, 6) (Shard(dim=0),), (4, 6) (Shard(dim=1),) "
        "would communicate on its own; bring them to fitting placements by a boundary in the plan, "
        r'such as "forward": {r"join\.input": [...]}, or pass allow_implicit=True'
    )
    with pytest.raises(RuntimeError, match=re.escape(expected)) as info:
        model(X)
    assert info.type is ImplicitRedistributionError
    boundary = {"forward": PLAN["forward"] | {r"join\.input": [{"tp": Replicate()}, {"tp": Replicate()}]}}
    torch.testing.assert_close(made(lambda x, y: x + y, boundary)(X), plain(lambda x, y: x + y)(X))


@ranks(2)
def test_an_operator_of_the_root_itself():
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x).cumsum(1)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Root(6, 6).double(), mesh, {"parameter": {"weight|bias": {"tp": Shard(0)}}})
    with pytest.raises(
        ImplicitRedistributionError, match=r'in the root module: torch\.Tensor\.cumsum .*\{r"input": \['
    ):
        model(X)


@ranks(2)
def test_allowed_it_computes_the_right_values():
    bodies = {
        "add": lambda x, y: x + y,
        "softmax": lambda x, y: torch.softmax(y, dim=1) * x,
        "cumsum": lambda x, y: x.cumsum(0) - y,
    }
    for name, body in bodies.items():
        model, reference = made(body, allow_implicit=True), plain(body)
        for module in (model, reference):
            output = module(X)
            (output.full_tensor() if hasattr(output, "full_tensor") else output).square().sum().backward()
        for one, other in zip(grads(model), grads(reference), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


@ranks(2)
def test_the_users_own_strict_decides_where_implicit_communication_is_allowed():
    model = made(lambda x, y: x + y, allow_implicit=True)
    with strict(), pytest.raises(ImplicitRedistributionError, match=r"aten\.add.*strict\(\) forbids that"):
        model(X)

    def free(x, _y):
        with strict(free=False):
            return x + torch.ones(4, 6, dtype=x.dtype)  # a rank cuts its part out of the ones

    with pytest.raises(ImplicitRedistributionError, match=r"in module 'join': torch\.Tensor\.add") as info:
        made(free)(X)
    assert "test_dmodule_implicit.py" in str(info.value.__cause__)  # names the line


@ranks(2)
def test_a_branch_on_a_partial_value():
    with pytest.raises(ImplicitRedistributionError, match="in module 'join'"):
        made(lambda x, _y: x * 2 if x.sum() > 0 else x)(X)
    threshold = plain(lambda x, _y: x.sum())(X).item()
    model = made(lambda x, _y: x * 2 if x.sum() > threshold - 1e-6 else x * 3, allow_implicit=True)
    torch.testing.assert_close(model(X).full_tensor(), plain(lambda x, _y: x * 2)(X))


@ranks(2)
def test_plain_tensors_mix_in_with_their_gradients():
    scale = torch.linspace(0, 1, 6, dtype=torch.float64)

    def body(x, _y):
        mask = torch.ones(4, 6, dtype=torch.bool).tril()
        rows = torch.cat([torch.empty(0), x, torch.zeros(1, 6, dtype=x.dtype)])  # the first as legacy caches have it
        return (x.masked_fill(~mask, 0.0) * scale + torch.where(mask, x, 1.0)).sum() + rows[:4].sum()

    plan = {"forward": {r"one\.output": [{"tp": Replicate()}]}}
    gradients = []
    for module in (made(body, plan), plain(body)):
        scale.grad, scale.requires_grad = None, True
        module(X).backward()
        gradients.append((scale.grad, grads(module)[0]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@ranks(2)
def test_writing_into_a_plain_tensor_must_not_lose_a_gradient():
    def add_into(x, _y):
        out = torch.zeros(4, 6, dtype=x.dtype)
        out.index_add_(0, torch.arange(4), x)
        return out

    def assign(x, _y):
        out = torch.zeros(4, 6, dtype=x.dtype)
        out[1:3] = x[1:3]
        return out

    def out_argument(x, _y):
        out = torch.zeros(4, 6, dtype=x.dtype)
        with torch.no_grad():
            torch.add(x, 1, out=out)
        return out

    plan = {"forward": {r"one\.output": [{"tp": Replicate()}]}}
    expected = (
        r"in module 'join': torch\.Tensor\.(index_add_|__setitem__) writes a DTensor that requires grad into a plain "
        r"tensor of shape \(4, 6\), which would lose the gradient; make the destination from a DTensor \(x\.new_zeros"
    )
    for body in (add_into, assign):
        with pytest.raises(RuntimeError, match=expected):
            made(body, plan)(X)
        with torch.no_grad():
            torch.testing.assert_close(made(body, plan)(X), plain(body)(X))
    torch.testing.assert_close(made(out_argument, plan)(X), plain(out_argument)(X))


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_function_modes_of_the_user_see_every_call():
    plan = {"forward": {r"one\.output": [{"tp": Replicate()}]}}

    def body(x, _y):
        with Counting() as inside, torch.device("cpu"):
            mixed = x * torch.ones(6, dtype=x.dtype)
        assert "mul" in inside.names or "__mul__" in inside.names
        return mixed

    model = made(body, plan)
    with Counting() as outside:
        torch.testing.assert_close(model(X), plain(body)(X))
    assert "linear" in outside.names
    torch.testing.assert_close(model(X), plain(body)(X))


class StandIn(torch.Tensor):
    """A foreign tensor subclass; records the calls with an operand of it."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append((func.__name__, [type(a) for a in args]))
        return torch.ones(4, 6, dtype=torch.float64)


@ranks(2)
def test_other_tensor_subclasses_pass_untouched():
    stand_in = torch.zeros(4, 6).as_subclass(StandIn)
    model = made(lambda x, _y: torch.add(x, stand_in), {"forward": {r"one\.output": [{"tp": Replicate()}]}})
    StandIn.seen.clear()
    assert torch.equal(model(X), torch.ones(4, 6, dtype=torch.float64))
    ((name, types),) = StandIn.seen
    assert name == "add"
    assert types[1] is StandIn


@ranks(2)
def test_the_mode_ends_with_the_forward():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows, columns = (distribute_tensor(X, mesh, [Shard(dim)]) for dim in (0, 1))
    model = made(lambda x, _y: x, {})
    model(X)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        rows + X
    torch.testing.assert_close((rows + columns).full_tensor(), X + X)  # implicit, as stock DTensor allows
    with implicit_replication():
        model(X)
        torch.testing.assert_close((rows + X).full_tensor(), X + X)  # still on
