"""Static mode: arguments and results of any structure, shared modules, caches, control flow that data decide."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vescale.dmodule import NotLocalFriendlyError, parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Result:
    hidden: Tensor
    parts: tuple
    note: str = "kept"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


class Inner(nn.Module):
    """Takes and returns nested structures; its arguments have names only."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, *, given, scale=1.0, mask=None):
        x = given["x"][0] + given["pair"].first
        y = self.down(self.up(x).relu() * scale)
        y = y if mask is None else y * mask
        return {"result": Result(y, (y + 1, [y.detach()])), "pair": Pair(x.detach(), None), "scale": scale}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = Inner(), nn.LayerNorm(6)
        self.double()

    def forward(self, *, x, flags=(), **options):
        out = self.inner(given={"x": [x, None], "pair": Pair(x * 2, None)}, **options)
        result = out["result"]
        hidden = self.norm(result.hidden + result.parts[0] + result.parts[1][0])
        return Result(hidden, ({"pair": out["pair"], "flags": flags, "scale": out["scale"]},))


PLAN = {
    "parameter": {r".*up\.(weight|bias)": S0, r".*down\.weight": S1},
    "forward": {
        r"inner\.input": {"given": {"x": [R], "pair": [R]}, "mask": S0},
        r".*down\.output": [S0],
        r"inner\.output": {"result": {"hidden": S0, "parts": [S0, [S0]]}, "pair": [S0]},
        r"norm\.input": [S0],
        "output": {"hidden": R, "parts": [{"pair": [R]}]},
    },
}


@ranks(2)
def test_structures_of_arguments_and_results(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def program(model):
        x, found = X.clone().requires_grad_(), {}
        for step, options in enumerate(({}, {"mask": X > 0}, {"scale": 3.0}, {"flags": (1, "a")}, {"mask": X > 0})):
            out = model(x=x, **options)
            assert type(out) is Result
            inside = out.parts[0]
            assert (out.note, type(inside["pair"]), inside["pair"].second) == ("kept", Pair, None)
            assert (inside["flags"], inside["scale"]) == (options.get("flags", ()), options.get("scale", 1.0))
            (out.hidden.mul(X).square().sum()).backward()
            found[f"output {step}"] = out.hidden.detach()
        return {**found, "x": x.grad}

    in_all_modes(Outer, PLAN, mesh, program)
    with pytest.raises(AssertionError, match="differs by"):  # an argument that is lost is seen
        in_all_modes(
            Outer, PLAN, mesh, lambda m: {"y": m(x=X, scale=2.0 if hasattr(m, "_vescale_execution") else 1.0).hidden}
        )


class Shared(nn.Module):
    """Calls one layer twice, and one that returns what it gets."""

    def __init__(self, other_layout=False):
        super().__init__()
        self.layer, self.same, self.up, self.down = nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 8), nn.Linear(8, 6)
        self.other_layout = other_layout
        self.double()

    def forward(self, x):
        h = self.same(self.layer(self.layer(x).relu()))
        h = self.down(self.up(h).relu())  # lies in rows from here on
        return self.layer(h) if self.other_layout else h


@ranks(2)
def test_a_module_called_twice_and_one_that_returns_its_argument(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r"up\.(weight|bias)": S0, r"down\.weight": S1},
        "forward": {r"same\.input": [R], r"same\.output": [R], r"up\.input": [R], r"down\.output": [S0], "output": [R]},
    }

    def program(model):
        x = X.clone().requires_grad_()
        for _ in range(2):
            y = model(x)
            y.square().sum().backward()
        return {"y": y.detach(), "x": x.grad}

    in_all_modes(Shared, plan, mesh, program)
    # two layouts with different local shapes
    both = {**plan, "forward": {**plan["forward"], r"layer\.input": [S0], r"layer\.output": [R]}}
    in_all_modes(lambda: Shared(other_layout=True), both, mesh, program)
    # its gradient is whole from one call and a sum from the other, which no layout of local tensors says
    with pytest.raises(NotLocalFriendlyError, match=r"the gradient of parameter 'layer.weight' diff|another rank"):
        in_all_modes(lambda: Shared(other_layout=True), plan, mesh, program)


class TwoHeads(nn.Module):
    """Two results and one that nothing has a gradient for."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.other = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)
        self.double()

    def forward(self, x):
        h = self.down(self.up(x).relu())
        return h, self.other(h.detach()), (h.sum(), h.detach())


@ranks(2)
def test_results_without_a_gradient(in_all_modes):
    """The recording runs backward from scalars only; in a real call other results may have gradients, too."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r"up\.(weight|bias)": S0, r"down\.weight": S1},
        "forward": {r"up\.input": [R], r"down\.output": [R]},
    }

    def program(use):
        def run(model):
            for _ in range(2):
                use(*model(X)).backward()
            return {}

        return run

    in_all_modes(TwoHeads, plan, mesh, program(lambda _h, _other, rest: rest[0] * 2))
    in_all_modes(TwoHeads, plan, mesh, program(lambda h, _other, _rest: h.square().sum()))
    model = parallelize_module(TwoHeads(), mesh, plan, mode="static")
    with pytest.raises(RuntimeError, match="gradient"):
        program(lambda _h, other, rest: other.square().sum() + rest[0])(model)
    sums = {**plan, "forward": {r"up\.input": [R], r"down\.output": [S0]}}
    with pytest.raises(
        NotLocalFriendlyError, match=r"down\.output: expected a gradient placed as .* \(Shard\(dim=0\),\), or"
    ):
        parallelize_module(TwoHeads(), mesh, sums, mode="static")(X)


class Cache:
    """Keys of earlier calls, changed by the module; no structure that anybody knows."""

    def __init__(self):
        self.keys, self.num_calls = [], 0

    def append(self, key):
        self.keys = [*self.keys, key]
        self.num_calls += 1
        return torch.cat(self.keys)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x, cache):
        weights = self.q(x).unsqueeze(1) * cache.append(self.k(x)).unsqueeze(0)  # per feature, as heads of one
        return self.out((weights.softmax(1) * weights).sum(1)), cache


@ranks(2)
def test_caches_that_a_module_changes(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r"(q|k)\.(weight|bias)": S0, r"out\.weight": S1},
        "forward": {r"(q|k)\.input": [R], r"out\.output": [R]},
    }

    def program(model):
        found = {}
        for _ in range(2):
            cache = Cache()
            with torch.no_grad():
                for step in range(3):
                    y, same = model(X[step : step + 1], cache)
                    assert same is cache
                    assert cache.num_calls == len(cache.keys) == step + 1
                    found[f"output {step}"] = y
        y, _ = model(X, Cache())
        y.square().sum().backward()
        return found

    in_all_modes(Cached, plan, mesh, program)


class Branching(nn.Module):
    """A value decides which layer runs, and how often."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(Mlp() for _ in range(2)), nn.Linear(6, 6)
        self.double()

    def forward(self, x, num):
        h = self.layers[0](x) if x.sum() > 0 else self.layers[1](x)
        for _ in range(int(num.sum())):
            h = self.layers[0](h).tanh()
        return self.last(h)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@ranks(2)
def test_control_flow_that_data_decide(in_all_modes):
    """A branch that was not recorded is refused; the number of calls of a recorded branch may change."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r".*\.up\.(weight|bias)": S0, r".*\.down\.weight": S1},
        "forward": {r".*\.up\.input": [R], r".*\.down\.output": [R]},
    }
    up, down, count = X.abs(), -X.abs(), torch.tensor([1])

    def program(calls):
        def run(model):
            found = {}
            for step, (x, num) in enumerate(calls):
                y = model(x, num)
                y.square().sum().backward()
                found[f"output {step}"] = y.detach()
            return found

        return run

    in_all_modes(Branching, plan, mesh, program([(up, count), (up, count * 4), (up, count * 0)]))
    model = parallelize_module(Branching(), mesh, plan, mode="static")
    model(up, count).sum().backward()
    with pytest.raises(NotLocalFriendlyError, match=r"layers\.1\.up\.input 'input': expected .* recorded shape"):
        model(down, count)
    in_all_modes(Branching, {**plan, "eager": [r"layers\.\d"]}, mesh, program([(up, count), (up, count * 3)]))
