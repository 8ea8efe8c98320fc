"""Modules whose code is wrong on local tensors are refused by name, and every way out that the error names works."""

import functools

import pytest
import torch
from torch import nn

from vescale.dmodule import Divided, NotLocalFriendlyError, parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
X = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class NanoAttention(nn.Module):
    """Reads the number of heads from an attribute and divides the width by it, as nanoGPT does."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = 4, 8
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.c_proj = nn.Linear(8, 8)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = (p(x).view(batch, length, self.n_head, width // self.n_head) for p in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).contiguous().view(batch, length, -1))


class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleDict({"attn": NanoAttention(), "ln": nn.LayerNorm(8)}) for _ in range(2))
        self.double()

    def forward(self, x):
        for block in self.h:
            x = x + block["attn"](block["ln"](x))
        return x


NANO = {
    "parameter": {r".*\.(q|k|v)\.weight": S0, r".*\.c_proj\.weight": S1},
    "forward": {r".*\.attn\.input": [R], r".*\.c_proj\.output": [R]},
}


def step(model):
    found = {}
    for again in range(2):
        y = model(X)
        y.square().sum().backward()
        found[f"output {again}"] = y.detach()
    return found


@ranks(2)
def test_a_hard_coded_number_of_heads(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Nano(), mesh, NANO, mode="static")
    for _ in range(2):  # it stays usable, and refused
        with pytest.raises(NotLocalFriendlyError) as info:
            model(X)
        for text in (
            "on local tensors module 'h.0.attn' fails, which runs in eager mode: RuntimeError: shape '[2, 4, 4, 2]' is",
            "code before it is written for global shapes (a hard-coded number of heads, a size, ",
            r'"local_attribute": {r"h\.0\.attn\.NAME": Divided("tp")}',
            r'"eager": [r"h\.0\.attn"] in the plan, or set_mode(model, "eager", r"h\.0\.attn")',
            "bring the values that it reads to other placements by a boundary",
        ):
            assert text in str(info.value), str(info.value)
    ways = [
        {
            **NANO,
            "local_attribute": {r".*\.attn\.n_head": Divided("tp")},
        },  # not enough: it divides the width
        {**NANO, "eager": [r"h\.\d+\.attn"]},
        {**NANO, "forward": {**NANO["forward"], r".*\.(q|k|v)\.output": [R], r".*\.c_proj\.input": [{"tp": Shard(2)}]}},
    ]
    with pytest.raises(NotLocalFriendlyError, match=r"module 'h\.0\.attn' fails"):
        step(parallelize_module(Nano(), mesh, ways[0], mode="static"))
    for plan in ways[1:]:
        in_all_modes(Nano, plan, mesh, step)

    def changed_at_run_time(model):
        if hasattr(model.h[0].attn.q.weight, "placements"):
            set_mode(model, "eager", r"h\.\d\.attn")
        return step(model)

    in_all_modes(Nano, NANO, mesh, changed_at_run_time)


class Piece(nn.Module):
    """Two layers with a function of the caller between them."""

    def __init__(self, between, heads=4):
        super().__init__()
        self.heads, self.between = heads, between
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


def in_heads(piece, h):
    """Right, once the number of heads is divided."""
    return h.view(*h.shape[:-1], piece.heads, 2).softmax(-1).flatten(-2)


def halved(piece, h):
    return h.view(*h.shape[:-1], piece.heads, -1).softmax(-1).flatten(-2)


def by_size(_piece, h):
    return h / h.shape[-1]


class WrongGradient(torch.autograd.Function):
    """Right forward; its backward reads the size of a dim."""

    @staticmethod
    def forward(ctx, h):  # noqa: ARG004 - autograd's signature
        return h.clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return grad * grad.shape[-1]


def only_gradient(_piece, h):
    return WrongGradient.apply(h)


PIECE = {"parameter": {r"up\..*": S0, r"down\.weight": S1}, "forward": {r"up\.input": [R], r"down\.output": [R]}}


@ranks(2)
def test_values_that_differ(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = r"static and eager mode diverge after \"up\.input 'input'\": 'down\.output' differs by"
    gradient = r"static and eager mode diverge: the gradient of .* differs by"
    cases = {halved: value, by_size: value, only_gradient: gradient}
    for between, text in cases.items():
        plan = {**PIECE, "forward": {**PIECE["forward"]}}
        make = functools.partial(Piece, between)
        model = parallelize_module(make(), mesh, plan, mode="static")
        with pytest.raises(NotLocalFriendlyError, match=text):
            model(X)
        assert all(parameter.grad is None for parameter in model.parameters())
        whole = {"forward": {**PIECE["forward"], r"up\.output": [R], r"down\.input": [{"tp": Shard(2)}]}}
        in_all_modes(make, {**PIECE, **whole}, mesh, step)
    in_all_modes(functools.partial(Piece, in_heads), {**PIECE, "local_attribute": {"heads": Divided("tp")}}, mesh, step)
    with pytest.raises(NotLocalFriendlyError, match=r"the root module fails.*the attribute .*\{r\"NAME\": Divided"):
        step(parallelize_module(Piece(in_heads), mesh, PIECE, mode="static"))


class Weighted(nn.Module):
    """Weighs features by position: on local tensors only the second rank is wrong, and its result is not gathered."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        h = self.up(x)
        return h * torch.where(torch.arange(h.shape[-1]) < 4, 1, 2)


@ranks(2)
def test_all_ranks_refuse_what_one_rank_sees():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"parameter": {r"up\..*": S0}, "forward": {"output": [{"tp": Shard(2)}]}}
    model = parallelize_module(Weighted(), mesh, plan, mode="static")
    other = "another rank of the mesh found this model unfit for local tensors; see its error"
    with pytest.raises(NotLocalFriendlyError, match=other if mesh.get_rank() == 0 else "static and eager mode diverge"):
        model(X)


class Averages(nn.Module):
    """Keeps a statistic of what may be sharded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(8, dtype=torch.float64))
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        self.average = self.average * 0.5 + x.detach().mean((0, 1))
        return self.linear(x)


@ranks(2)
def test_statistics_of_sharded_values():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Averages(), mesh, {"forward": {"input": [S1], "output": [R]}}, mode="static")
    with pytest.raises(
        NotLocalFriendlyError, match="static and eager mode diverge: buffer 'average' after the call differs by"
    ):
        model(X)
    assert not model.average.any()


@ranks(2)
def test_a_sharded_tied_weight_without_a_boundary(tiny, in_all_modes):
    mesh, plan = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), tiny.plan()
    before = {name: entry for name, entry in plan["forward"].items() if name != r"head\.input"}
    model = parallelize_module(tiny(1, tied=True), mesh, {**plan, "forward": before}, mode="static")
    with pytest.raises(NotLocalFriendlyError) as info:
        model(tiny.ids())
    for text in (
        ". 'head.weight' is sharded and tied to 'embed.weight': expected a boundary at the input of 'head', got none; ",
        r"""add "forward": {r"head\.input": [{'tp': Replicate()}]} to the plan. """,
    ):
        assert text in str(info.value), str(info.value)

    def train(model):
        model(tiny.ids()).square().sum().backward()
        return {}

    fixed = {**plan, "forward": before | {r"head\.input": [{"tp": Replicate()}]}}
    in_all_modes(lambda: tiny(1, tied=True), fixed, mesh, train)


class Branching(nn.Module):
    """Uses one layer or two, by an attribute that is no argument."""

    def __init__(self):
        super().__init__()
        self.up, self.other, self.uses_other = nn.Linear(8, 8), nn.Linear(8, 8), False
        self.double()

    def forward(self, x):
        return self.up(x) + self.other(x) if self.uses_other else self.up(x)


@ranks(2)
def test_a_gradient_that_was_not_recorded():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"parameter": {r"(up|other)\..*": S0}, "forward": {"input": [R], "output": [R]}}
    model = parallelize_module(Branching(), mesh, plan, mode="static")
    model(X).sum().backward()
    model.uses_other = True
    with pytest.raises(
        NotLocalFriendlyError, match=r"parameter 'other\.\w+': expected no gradient, as when .* but got"
    ):
        model(X).sum().backward()
    model.zero_grad()
    set_mode(model, "static")
    model(X).sum().backward()
    assert model.other.weight.grad.full_tensor().any()


class Sized(nn.Module):
    """Code that checks its own sizes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.up(x)
        assert y.shape[-1] == 8, "expected a width of 8"
        return self.down(y)


@pytest.mark.parametrize("allow_implicit", [False, True])
@ranks(2)
def test_code_that_checks_its_sizes(allow_implicit):
    """The error of the user's code is named as one on local tensors, also where these are searched for islands."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r"up\..*": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
        "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [{"tp": Replicate()}]},
    }
    module = parallelize_module(Sized(), mesh, plan, mode="static", allow_implicit=allow_implicit)
    with pytest.raises(
        NotLocalFriendlyError, match=r"on local tensors .* fails.*AssertionError: expected a width of 8"
    ):
        module(torch.ones(2, 4)), module(torch.ones(2, 4, requires_grad=True))
