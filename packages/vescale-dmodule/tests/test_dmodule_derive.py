"""Plans derived from dataflow: what is found in modules of every form, compared with the ready plans."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import Divided, PlanError, parallelize_module, plans
from vescale.dtensor import InterleavedShard, deferred_init, init_device_mesh
from vescale_testing import keep_float64, ranks

TP = {"tp": Shard(0)}
WHOLE = [{"tp": Replicate()}]


class FeedForward(nn.Module):
    """Gate and up projection in one matrix."""

    def __init__(self, width=8, inner=12):
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)


class Scored(FeedForward):
    """Targets, which are no DTensors, beside logits."""

    def forward(self, x, target):
        return nn.functional.cross_entropy(super().forward(x).flatten(0, 1), target.flatten())


class PerHead(nn.Module):
    """Query, key and value of one head after the other, with a bias for each head."""

    def __init__(self, heads=4, size=4):
        super().__init__()
        self.heads, self.size = heads, size
        self.qkv, self.out = nn.Linear(heads * size, 3 * heads * size), nn.Linear(heads * size, heads * size)
        self.slopes = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3, self.size).unbind(3)
        weights = torch.einsum("bshd,bthd->bhst", q, k) * self.slopes
        return self.out(torch.einsum("bhst,bthd->bshd", weights.softmax(-1), v).flatten(2))


class Routed(nn.Module):
    """Experts in a list, called one by one on the rows that are routed to them."""

    def __init__(self, width=8, num_experts=4):
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x):
        rows = x.flatten(0, -2)
        weights, index = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (index == number).nonzero().flatten()
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]) * weights[mine, None])
        return out.view_as(x)


def test_pairs_and_their_boundaries():
    derived = plans.derive(FeedForward(), degree=2)
    assert derived.plan == {
        "parameter": {
            r"down\.weight": {"tp": Shard(1)},
            r"gate_up\.(bias|weight)": {"tp": InterleavedShard(0, 2)},
        },
        "forward": {r"down\.output": WHOLE, r"gate_up\.input": {"input": {"tp": Replicate()}}},
    }
    assert not derived.replicated
    assert derived.num_bytes == 2 * 2 * 8 * 8 * 4  # an activation forward, a gradient backward
    assert str(derived).endswith("communication of a step: 1 KiB of each rank")


def test_function_modes_that_see_backward_change_nothing():
    batch = {"x": torch.ones(2, 5, 8), "target": torch.ones(2, 5, dtype=torch.long)}
    expected = plans.derive(Scored(), batch, degree=2).plan
    with keep_float64():
        assert plans.derive(Scored(), batch, degree=2).plan == expected
    assert len(expected["parameter"]) == 2


def test_heads_that_alternate_are_a_plain_shard():
    derived = plans.derive(PerHead(), {"x": torch.ones(2, 5, 16)}, degree=2)
    found = derived.plan["parameter"]
    assert found == {r"out\.weight": {"tp": Shard(1)}, r"slopes": TP, r"qkv\.(bias|weight)": TP}
    assert derived.plan["local_attribute"] == {"heads": Divided("tp")}


def test_heads_that_do_not_divide_stay_whole():
    derived = plans.derive(PerHead(), {"x": torch.ones(2, 5, 16)}, degree=3)
    assert not derived.plan["parameter"]
    assert "such that 3 ranks do not have whole parts of it" in derived.replicated["out.weight"]


def test_experts_in_a_list():
    derived = plans.derive(Routed(), {"x": torch.ones(2, 5, 8)}, degree=2)
    assert derived.plan["expert"] == {"experts": TP}
    assert set(derived.replicated) == {"gate.weight"}
    other = plans.derive(Routed(), {"x": torch.ones(2, 5, 8)}, degree=2, expert_axis="ep")
    assert other.plan["expert"] == {"experts": {"ep": Shard(0)}}
    assert (
        "do not divide" in plans.derive(Routed(), {"x": torch.ones(2, 5, 8)}, degree=3).replicated["experts.0.weight"]
    )


def test_a_norm_between_two_matrices_runs_whole():
    """It needs all features: they are gathered before it, and cut after it."""
    derived = plans.derive(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), degree=2)
    assert derived.plan["parameter"] == {r"2\.weight": {"tp": Shard(1)}, r"0\.(bias|weight)": TP}
    assert derived.plan["forward"][r"1\.input"] == {"input": {"tp": Replicate()}}
    assert derived.plan["forward"][r"1\.output"] == [{"tp": Shard(2)}]


def test_norms_of_a_residual_stream_do_not_run_whole():
    """The stream would be cut over its features, which every norm needs."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.layer(self.norm(x)).sort(-1).values

    derived = plans.derive(nn.Sequential(Block(), Block()), degree=2)
    assert not derived.plan["parameter"]
    assert "native_layer_norm in '1.norm' needs all of" in derived.replicated["1.layer.weight"]


def test_it_derives_without_memory_and_leaves_the_module_alone():
    with torch.device("meta"):
        large = nn.Sequential(nn.Linear(1 << 16, 1 << 18), nn.ReLU(), nn.Linear(1 << 18, 1 << 16))
    assert len(plans.derive(large, degree=8).plan["parameter"]) == 2
    deferred = deferred_init(FeedForward)
    assert plans.derive(deferred, degree=2).plan == plans.derive(FeedForward(), degree=2).plan
    model = PerHead()
    before = copy.deepcopy(vars(model)), {name: p.clone() for name, p in model.named_parameters()}
    plans.derive(model, {"x": torch.ones(2, 5, 16)}, degree=2)
    assert vars(model).keys() == before[0].keys()
    assert all(torch.equal(p, before[1][name]) and p.grad is None for name, p in model.named_parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class Permuted(nn.Module):
    """A pair of matrices, and a parameter of integers, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x.index_select(-1, self.order))))


def test_a_parameter_without_a_gradient_stays_whole():
    derived = plans.derive(Permuted(), degree=2)
    assert {"up\\.(bias|weight)", "down\\.weight"} == set(derived.plan["parameter"])


def test_inputs_that_do_not_run_are_refused():
    class Odd(nn.Module):
        def forward(self, x):
            raise ValueError("not on shapes", x)

    with pytest.raises(PlanError, match=r"the model, a Odd, runs on shapes, got none among those that were guessed"):
        plans.derive(Odd(), degree=2)
    with pytest.raises(PlanError, match=r"got \['x'\] \(ValueError: .*; pass an example batch"):
        plans.derive(Odd(), {"x": torch.ones(1)}, degree=2)


@ranks(2, timeout=240)
def test_derived_plans_run_in_both_modes(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def use(model):
        y = model(x[..., : model.down.out_features] if isinstance(model, FeedForward) else x)
        y.square().sum().backward()
        return {"output": y.detach()}

    for make, inputs in ((FeedForward, None), (PerHead, {"x": x})):
        plan = plans.derive(make(), inputs, degree=2).plan
        in_all_modes(lambda make=make: make().double(), plan, mesh, use)

    plan = plans.derive(FeedForward(), degree=2).plan
    wrong = {**plan, "parameter": {**plan["parameter"], r"gate_up\.(bias|weight)": TP}}
    with pytest.raises(Exception, match=r"implicitly|would communicate|whole parts|on its own"):
        use(parallelize_module(FeedForward().double(), mesh, wrong))
