"""With allow_implicit=True, operators that are wrong on local tensors run on DTensors, and only they, as islands."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dtensor import Replicate, Shard, debug, init_device_mesh
from vescale_testing import gather_full, ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {
    "parameter": {r".*up\.(weight|bias)": S0, r".*down\.weight": S1},
    "forward": {r".*up\.input": [R], r".*down\.output": [R]},
}
X = torch.linspace(-1, 1, 72, dtype=torch.float64).view(12, 6)


class Net(nn.Module):
    """A column-parallel and a row-parallel layer, with code between that is written for global shapes."""

    def __init__(self, between, width=12):
        super().__init__()
        self.between = between
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)
        self.norm, self.groups = nn.LayerNorm(width), nn.GroupNorm(3, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, width))
        self.double()

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


def center(_net, h):
    return h - h.mean(-1, keepdim=True)


def normalize(net, h):
    return net.norm(h)


def normalize_groups(net, h):
    return net.groups(h)


def hard_coded_heads(_net, h):
    return h.view(*h.shape[:-1], 4, 3).softmax(-1).flatten(-2)


def write_a_slice(_net, h):
    h = h * 1
    h[..., 2:5] = h[..., 0:3] * 2
    return h


def by_size(_net, h):
    return h * (h.square().sum() / h.numel()).rsqrt()


def by_value(_net, h):
    return h * float(h.detach().abs().max())


def by_position(net, h):
    return h * torch.where(torch.arange(h.shape[-1]) < 4, 1, 2) * net.scale


def overlapping_windows(_net, h):
    windows = torch.as_strided(h * 1, (12, 11, 2), (12, 1, 1))  # torch's formula of the gradient makes plain tensors
    return functional.pad(windows.sum(-1), (0, 1))


def random_beside(_net, h):
    return functional.dropout(h, 0.5) * h.mean(-1, keepdim=True) + functional.dropout(h.cumsum(-1), 0.2)


def used_twice(_net, h):
    weights = h.softmax(-1)
    return weights * h + h.flip(-1) * weights.sum(0, keepdim=True)


def write_into_views(_net, h):
    out = h.new_empty(h.shape)
    out[:6].copy_(h[:6])
    out[6:].copy_(h[6:].mean(-1, keepdim=True).expand(-1, h.shape[-1]))  # whole on all ranks, into a shard
    return out * h


BODIES = [
    center,
    normalize,
    normalize_groups,
    hard_coded_heads,
    write_a_slice,
    write_into_views,
    by_size,
    by_value,
    by_position,
    overlapping_windows,
    random_beside,
    used_twice,
]


class Forked(nn.Module):
    """Splits a whole tensor: one part gets summands of its gradient, the other, by way of an island, all of it."""

    def __init__(self, expands=True):
        super().__init__()
        self.fork, self.up, self.down = nn.Linear(6, 7), nn.Linear(6, 12), nn.Linear(12, 6)
        self.expands = expands
        self.double()

    def forward(self, x):
        own, common = self.fork(x).split([6, 1], -1)
        h = self.up(own)
        return self.down(h * (common.expand(-1, h.shape[-1]) if self.expands else common))


def build(body, **options):
    torch.manual_seed(0)
    return Net(body, **options)


def train(model, num_steps=3):
    """Return results and gradients of some steps."""
    torch.manual_seed(1)
    found = {}
    for step in range(num_steps):
        model.zero_grad()
        x = (X + step).requires_grad_()
        y = model(x)
        y.cos().sum().backward()
        found |= {f"{step} y": gather_full(y.detach()), f"{step} x": x.grad}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{step} {name}"] = gather_full(parameter.grad)
    return found, torch.get_rng_state()


def assert_same(actual, expected):
    (found, state), (wanted, wanted_state) = actual, expected
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(state, wanted_state)


@pytest.mark.parametrize("body", BODIES)
@ranks(2)
def test_results_and_gradients_are_those_of_one_device(body, compile_with):
    compile_with("aot_eager")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for mode in ("static", "compile"):
        model = parallelize_module(build(body), mesh, PLAN, mode=mode, allow_implicit=True)
        assert_same(train(model), train(build(body)))


@ranks(3)
def test_on_three_ranks():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for body in BODIES:
        model = parallelize_module(build(body), mesh, PLAN, mode="static", allow_implicit=True)
        assert_same(train(model), train(build(body)))


@ranks(4)
def test_on_two_axes_and_uneven_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {**PLAN, "forward": {**PLAN["forward"], "input": [{"dp": Shard(0)}]}}
    plan["forward"][r".*up\.input"] = [{"dp": Shard(0), **R}]
    plan["forward"][r".*down\.output"] = [{"dp": Shard(0), **R}]
    for body in (center, normalize_groups, random_beside, by_size):
        for sizes in ({}, {"width": 15}):
            model = parallelize_module(build(body, **sizes), mesh, plan, mode="static", allow_implicit=True)
            assert_same(train(model), train(build(body, **sizes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(2)
def test_in_other_dtypes(dtype):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = X.to(dtype)
    for body in BODIES:
        eager, static = (
            parallelize_module(build(body).to(dtype), mesh, PLAN, mode=mode, allow_implicit=True)
            for mode in ("eager", "static")
        )
        for model in (eager, static):
            torch.manual_seed(1)
            model(x).square().sum().backward()
        for (name, expected), (_, actual) in zip(eager.named_parameters(), static.named_parameters(), strict=True):
            if expected.grad is not None:
                scale = gather_full(expected.grad).abs().max()
                difference = (gather_full(actual.grad) - gather_full(expected.grad)).abs().max()
                assert difference <= 8 * torch.finfo(dtype).eps * scale, (body.__name__, name, difference / scale)


@ranks(2)
def test_only_islands_communicate():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(lambda _net, h: h.tanh().exp()), mesh, PLAN, mode="static", allow_implicit=True)
    train(model, 1)
    with debug.comm_log() as log:
        model(X.clone().requires_grad_())
    assert len(log) == 1  # the boundary of `down`


@ranks(2)
def test_a_size_that_changes_between_calls_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = build(lambda net, h: h.softmax(-1) / (h.shape[-1] * net.factor))
    net.factor = 1
    model = parallelize_module(net, mesh, PLAN, mode="static", allow_implicit=True)
    model(X)
    net.factor = 2
    text = r"div expected 6, which stands for 12 of the full tensor, as when this call was recorded, got 12"
    with pytest.raises(NotLocalFriendlyError, match=text):
        model(X)


@ranks(2)
def test_a_loop_over_a_sharded_dim_is_refused():
    def scan(_net, h):
        state, states = torch.zeros_like(h[..., 0]), []
        for i in range(h.shape[-1]):
            state = state / 2 + h[..., i]
            states.append(state)
        return torch.stack(states, -1)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(scan), mesh, PLAN, mode="static", allow_implicit=True)
    with pytest.raises(NotLocalFriendlyError):
        model(X)


@ranks(2)
def test_without_permission_nothing_communicates_on_its_own():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for body in (center, normalize, normalize_groups, by_size):
        with pytest.raises(RuntimeError, match="allow_implicit=True"):
            parallelize_module(build(body), mesh, PLAN, mode="static")(X)


@ranks(2)
def test_gradients_that_meet_before_a_boundary_are_sums_of_one_kind():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"parameter": PLAN["parameter"], "forward": {r"fork\.output": [R], r"down\.output": [R]}}

    def make(expands):
        torch.manual_seed(0)
        return Forked(expands)

    for expands in (True, False):  # without the island both are summands anyway
        model = parallelize_module(make(expands), mesh, plan, mode="static", allow_implicit=True)
        assert_same(train(model), train(make(True)))
    whole = {**plan, "forward": {**plan["forward"], r"up\.input": [R]}}  # both have all of it
    model = parallelize_module(make(True), mesh, whole, mode="static", allow_implicit=True)
    assert_same(train(model), train(make(True)))


@ranks(1)  # a backward in this process would keep ranks from being forked
def test_another_body_has_other_results():
    with pytest.raises(AssertionError):
        assert_same(train(build(center)), train(build(normalize)))
