"""Attributes, eager modules, local regions and repeated parts: what a plan means, and how a wrong one is refused."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vescale.dmodule import Divided, PlanError, Repeat, describe, parallelize_module
from vescale.dtensor import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks

S0, R = {"tp": Shard(0)}, {"tp": Replicate()}


AXES = {"dp": 2, "tp": 4}
X = torch.linspace(-1, 1, 64).view(4, 16)


class Attention(nn.Module):
    head_dim = 8

    def __init__(self, config):
        super().__init__()
        self.config, self.split_size, self.scale, self.causal, self.seen = config, 32, 0.5, True, None
        self.qkv = nn.Linear(16, 96)

    def forward(self, hidden, *, mask=None):  # noqa: ARG002 - a named argument
        self.seen = self.head_dim, self.split_size, self.scale, self.config.num_heads, self.config.rope.theta
        return self.qkv(hidden), None


class Network(nn.Module):
    """Two layers with one config, side by side."""

    def __init__(self):
        super().__init__()
        config = SimpleNamespace(num_heads=12, rope=SimpleNamespace(theta=10, nested=SimpleNamespace(far=1)))
        self.layers, self.norm = nn.ModuleList([Attention(config), Attention(config)]), nn.LayerNorm(16)

    def forward(self, x):
        x = self.norm(x)
        return sum(layer(x)[0] for layer in self.layers)


@ranks(4)
def test_attributes_of_modules_and_of_objects_they_hold():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "local_attribute": {
            r"layers\.\d\.split_size": Divided("tp"),
            r"layers\.1\.config\.num_heads": Divided("tp"),
            r"layers\.1\.scale": Divided("dp", 6),
            r"layers\.0\.config\.rope\.theta": 7,
        },
        "attribute": {r".*\.(head_dim|scale)": 2, r"norm\.eps": 1e-3},
    }
    for mode, seen in (
        ("eager", [(2, 32, 2, 12, 10), (2, 32, 2, 12, 10)]),
        ("static", [(2, 16, 2, 12, 7), (2, 16, 3, 6, 10)]),
    ):
        model = parallelize_module(Network(), mesh, plan, mode=mode)
        model(X).sum().backward()
        assert [layer.seen for layer in model.layers] == seen
        first, second = model.layers
        assert (first.split_size, first.scale, second.scale, model.norm.eps) == (32, 2, 2, 1e-3)
        assert first.config is second.config
        assert (first.config.num_heads, first.config.rope.theta) == (12, 10)


@ranks(2)
def test_ranks_compare_every_section():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    for section, entries, lines in (
        (
            "local_attribute",
            [{r"layers\.1\.config\.num_heads": n} for n in (3, 4)],
            ["local_attribute layers.1.config.num_heads: 3", "local_attribute layers.1.config.num_heads: 4"],
        ),
        (
            "attribute",
            [{r"norm\.eps": eps} for eps in (0.5, 0.25)],
            ["attribute norm.eps: 0.5", "attribute norm.eps: 0.25"],
        ),
        ("eager", [[r"layers\.1", r"layers\.\d"], [r"layers\.1"]], ["eager layers.0", "eager layers.1"]),
        (
            "local",
            [{r"layers\.0\.qkv": {"input": [S0], "output": [R]}}, {"norm": {"output": {"tp": Partial()}}}],
            [
                "local layers.0.qkv: input {'input': {'tp': Shard(dim=0)}}, output [{'tp': Replicate()}]",
                "local norm: input None, output {'tp': Partial(sum)}",
            ],
        ),
    ):
        with pytest.raises(PlanError) as info:
            parallelize_module(Network(), mesh, {section: entries[rank]})
        for line in lines:
            assert line in str(info.value), str(info.value)
    # an object without a text of its own is described without its address
    parallelize_module(Network(), mesh, {"attribute": {r"norm\.eps": object()}})


class Stub(nn.Module):
    absent_fqns = ("", "attn")


def test_attributes_of_other_pipeline_stages():
    module = nn.ModuleDict({"here": Attention(SimpleNamespace(num_heads=4)), "there": Stub()})
    describe(module, AXES, {"attribute": {r"(here|there\.attn)\.split_size": 1, r"there\.attn\.config\.num_heads": 1}})
    with pytest.raises(PlanError, match="keys that match names of the module"):
        describe(module, AXES, {"attribute": {r"elsewhere\.num_heads": 1}})


REGION = {"input": [R], "output": [R]}
REFUSED = [
    (
        {"local_attribute": {r"layers\.\d\.splt_size": 1}},
        r"expected local_attribute keys that match names of the module, got 'layers\\.\\d\\.splt_size'; nearest names: "
        "'layers.1.split_size', 'layers.0.split_size', ",
    ),
    (
        {"attribute": {r"layers\.\d\.config\.rope\.nested\.far": 1}},
        r"expected attribute keys that match names of the module, got 'layers\\.\\d\\.config\\.rope\\.nested\\.far'",
    ),
    (
        {"attribute": {r"layers\.0\.scale": 1, r"layers\..\.scale": 2}},
        r"attribute keys 'layers\\.0\\.scale' and 'layers\\..\\.scale' both match 'layers.0.scale' with different",
    ),
    (
        {"local_attribute": {r"layers\.0\.split_size": Divided("ep")}},
        "local_attribute 'layers.0.split_size': expected one of the mesh's axes ('dp', 'tp'), got 'ep'",
    ),
    (
        {"local_attribute": {r"layers\.0\.scale": Divided("tp")}},
        "local_attribute 'layers.0.scale': Divided('tp') needs an integer, got 0.5",
    ),
    (
        {"attribute": {r"layers\.0\.causal": Divided("tp")}},
        "attribute 'layers.0.causal': Divided('tp') needs an integer, got True",
    ),
    (
        {"local_attribute": {r"layers\.0\.config\.rope\.theta": Divided("tp")}},
        "local_attribute 'layers.0.config.rope.theta' is 10, which the 4 ranks of axis 'tp' do not divide; give the "
        "value itself, or use a degree that divides 10",
    ),
    (
        {"eager": r"layers\.0"},
        r"expected regexes of module names in section 'eager' of the plan, got 'layers\\.0'",
    ),
    (
        {"eager": ["layer"]},
        "expected eager keys that match names of the module, got 'layer'; nearest names: 'layers'",
    ),
    ({"local": {"norm": [R]}}, "local 'norm': expected {'input': entry, 'output': entry}, got [{'tp': Replicate()}]"),
    ({"local": {"norm": {}}}, "local 'norm': expected {'input': entry, 'output': entry}, got {}"),
    ({"local": {"norm": {"outputs": [R]}}}, "local 'norm': expected {'input': entry, 'output': entry}, got "),
    (
        {"local": {"norm": {"output": {"ep": Shard(0)}}}},
        "local norm.output: expected one of the mesh's axes ('dp', 'tp'), got 'ep'",
    ),
    ({"local": {"norm": {"input": {"x": R}}}}, "norm.input: forward has no argument 'x'; use one of ['input']"),
    (
        {"local": {r"layers\.0": REGION}, "forward": {r"layers\.0\.qkv\.output": [R]}},
        "forward entry for 'layers.0.qkv' lies inside the local region 'layers.0', which runs on local tensors; move "
        "the entry out of it, or make the region smaller",
    ),
    (
        {"local": {r"layers\.0": REGION, r"layers\.0\.qkv": REGION}},
        "local entry for 'layers.0.qkv' lies inside the local region 'layers.0', which runs on local tensors",
    ),
    (
        {"local": {r"layers\.0": REGION}, "eager": [r"layers\.0\.qkv"]},
        "eager entry for 'layers.0.qkv' lies inside the local region 'layers.0'",
    ),
    (
        {"parameter": {r"layers\.\d\.qkv\.weight": {"tp": InterleavedShard(0, 5)}}},
        "parameter 'layers.0.qkv.weight': InterleavedShard(dim=0, k=5) on a dim of 96 elements, which is not made of 5",
    ),
    (
        {"parameter": {r"layers\.\d\.qkv\.weight": {"tp": InterleavedShard(0, 16)}}},
        "parameter 'layers.0.qkv.weight': InterleavedShard(dim=0, k=16) cuts each of 16 parts of 6 elements over 4 "
        "ranks, which do not divide it; use a degree that does",
    ),
    (
        {"parameter": {r"norm\.weight": {"tp": InterleavedShard(1, 3)}}},
        "parameter 'norm.weight': InterleavedShard(dim=1, k=3) on a tensor of shape (16,), which has 1 dims",
    ),
    (
        {"parameter": {r"norm\.weight": {"tp": RaggedShard((0,), (1, 2))}}},
        "parameter 'norm.weight': RaggedShard(dims=(0,), local_units=(1, 2)) names 2 ranks; its mesh axis has 4",
    ),
    (
        {"parameter": {r"norm\.weight": {"tp": Partial()}}},
        "parameter 'norm.weight': Partial(sum) is for activations; a parameter is sharded or replicated",
    ),
]


@pytest.mark.parametrize(("plan", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refused(plan, text):
    with pytest.raises(PlanError) as info:
        describe(Network(), AXES, plan)
    assert str(info.value).startswith(text), str(info.value)


def test_empty_shards_need_a_word():
    linear = nn.Linear(3, 9, bias=False)
    text = (
        "parameter 'weight': Shard(dim=0) of a tensor of shape (9, 3) over the 4 ranks of axis 'tp' leaves a rank "
        "without any of it; use fewer ranks, another dim, or allow_empty=True"
    )
    # ceil(9 / 5) = 2 rows for ranks 0 to 3, one for rank 4; ceil(9 / 4) = 3 for three of them, none for the last
    for sizes, placements, empty in (
        ({"tp": 5}, [Shard(0)], False),
        ({"tp": 4}, [Shard(0)], True),
        ({"dp": 2, "tp": 4}, [Shard(0), Shard(0)], True),  # 5 and 4 rows, of which 5 leave the last of 4 without
        ({"dp": 1, "tp": 3}, [Shard(0), Shard(1)], False),
    ):
        plan = {"parameter": {"weight": placements}}
        assert len(describe(linear, sizes, plan, allow_empty=True)) == 1
        if empty:
            with pytest.raises(PlanError, match=re.escape(text)):
                describe(linear, sizes, plan)
        else:
            describe(linear, sizes, plan)


@ranks(4)
def test_a_rank_without_any_of_a_parameter_trains_with_the_others():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r"0\.(weight|bias)": S0, r"2\.weight": {"tp": Shard(1)}},
        "forward": {r"2\.output": [R]},
    }

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()

    plain, x = network(), torch.randn(7, 3, dtype=torch.float64)
    with pytest.raises(PlanError, match=r"parameter '0\.weight': Shard\(dim=0\) of a tensor of shape \(5, 3\) over"):
        parallelize_module(network(), mesh, plan)
    model = parallelize_module(network(), mesh, plan, allow_empty=True)
    assert model[0].weight.to_local().shape == (0 if mesh.get_local_rank() == 3 else 2 - mesh.get_local_rank() // 2, 3)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12)


def test_layouts_of_special_placements():
    linear = nn.Linear(4, 12, bias=False)
    plan = {"parameter": {"weight": [InterleavedShard(0, 3)]}}
    assert str(describe(linear, {"tp": 2}, plan)[0]) == "weight  [12, 4] S(0/3) -> [6, 4]"
    plan = {"parameter": {"weight": [RaggedShard((0,), (1, 3))]}}
    assert str(describe(linear, {"tp": 2}, plan)[0]) == "weight  [12, 4] Ragged(1, 3) -> [9, 4]"


@ranks(4)
def test_repeated_parts_on_local_and_distributed_tensors():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain, upstream = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    repeat = Repeat({"tp": Shard(-1)}, dim=-1, parts=2, times=2)
    assert eval(repr(repeat), {"Repeat": Repeat, "Shard": Shard}) == repeat

    leaf = plain.clone().requires_grad_()
    expected = leaf.unflatten(-1, (2, 3)).repeat_interleave(2, dim=-2).flatten(-2)
    expected.backward(upstream)
    local = plain.clone().requires_grad_()
    repeat.apply(local).backward(upstream)
    assert torch.equal(repeat.apply(plain), expected)
    assert torch.equal(local.grad, leaf.grad)

    whole = distribute_tensor(plain, mesh, [Replicate()]).requires_grad_()
    sharded = repeat.apply(whole).redistribute(placements=[Shard(2)])
    assert torch.equal(sharded.full_tensor(), expected)
    sharded.backward(distribute_tensor(upstream, mesh, [Shard(2)]))
    assert torch.equal(whole.grad.full_tensor(), leaf.grad)
    assert not torch.equal(whole.grad.to_local(), upstream[..., :6] + upstream[..., 6:])  # heads side by side

    with pytest.raises(PlanError, match=r"expected a dim that is not sharded, got placements \(Shard\(dim=2\),\)"):
        repeat.apply(sharded)
    with pytest.raises(PlanError, match=r"expected a dim -1 of 2 equal parts, got a tensor of shape \(2, 3, 5\)"):
        repeat.apply(plain[..., :5])
    sections = Repeat({"tp": Shard(-1)}, parts=(1, 2), times=(2, 1)).apply(whole)
    assert torch.equal(sections.to_local(), plain[..., [0, 1, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="Repeat: expected an integer of 1 or more for times, got 0"):
        Repeat(S0, parts=2, times=0)
    for parts, times in (((1, 2), (1,)), ((1, 2), 2)):
        text = f"Repeat: expected as many numbers for times as for parts, got parts={parts} and times={times}"
        with pytest.raises(PlanError, match=re.escape(text)):
            Repeat(S0, parts=parts, times=times)
