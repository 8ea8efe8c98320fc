"""A plan that does not fit is refused with a text that says where and what to do, before any communication.

Most cases run without processes. Where ranks are needed, only one of them calls: a collective would hang.
"""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dmodule import PlanError, describe, parallelize_module, plans
from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks

S0, S1, R = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}


class Experts(nn.Module):
    def __init__(self, num_experts=6, **tensors):
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.zeros(6, 3))
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def forward(self, hidden_states, top_k_index, top_k_weights):  # noqa: ARG002 - the signature of experts
        return hidden_states


def network(**modules):
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                [nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)}) for _ in range(2)]
            ),
            "norm": nn.LayerNorm(6),
            **modules,
        }
    )


PARAMETER_ERRORS = [
    (
        {r"layers\.\d+\.upp\.weight": S0},
        r"expected parameter keys that match names of the module, got 'layers\\.\\d+\\.upp\\.weight'; nearest names: "
        "'layers.0.up.weight', 'layers.1.up.weight', ",
    ),
    (
        {r"layers\.0\.up\.weight": S0, r"layers\.\d\.up\.weight": S1},
        r"parameter keys 'layers\\.0\\.up\\.weight' and 'layers\\.\\d\\.up\\.weight' both match 'layers.0.up.weight' "
        "with different placements: {'tp': Shard(dim=0)} and {'tp': Shard(dim=1)}; make one of them narrower",
    ),
    (
        {r"norm\.weight": {"ep": Shard(0)}},
        "parameter 'norm.weight': expected one of the mesh's axes ('tp',), got 'ep'",
    ),
    (
        {r"norm\.weight": {"tp": Shard(1)}},
        "parameter 'norm.weight': Shard(dim=1) on a tensor of shape (6,), which has 1 dims",
    ),
    (
        {r"norm\.weight": [Shard(0), Replicate()]},
        "parameter 'norm.weight': expected placements for all axes of the mesh, ('tp',), got 2; name them in a dict",
    ),
    (
        {r"norm\.weight": Shard(0)},
        "parameter 'norm.weight': expected placements such as {'tp': Shard(0)} or [Shard(0)], got Shard(dim=0)",
    ),
    (
        {r"norm\.(weight": S0},
        r"expected regular expressions as parameter keys, got 'norm\\.(weight': missing ), unterminated subpattern",
    ),
]

FORWARD_ERRORS = [
    ({r"layers\.0\.up": [S0]}, r"expected forward keys that end in '.input' or '.output', got 'layers\\.0\\.up'"),
    (
        {r"nrm\.output": [S0]},
        r"expected forward keys that match names of the module, got 'nrm\\.output'; nearest names: 'norm.output', ",
    ),
    (
        {r"norm\.input": [S0, S0]},
        "norm.input: expected at most 1 entries, for the positional arguments ['inpu",
    ),
    ({r"norm\.input": {"x": S0}}, "norm.input: forward has no argument 'x'; use one of ['input']"),
    ({r"norm\.output": [{"dp": Shard(0)}]}, "norm.output [0]: expected one of the mesh's axes ('tp',), got 'dp'"),
    (
        {r"norm\.output": {"hidden": "Shard(0)"}},
        "norm.output 'hidden': expected placements such as {'tp': Shard(0)}, a list or dict of them, or None; got ",
    ),
    (
        {r"norm\.output": [R], r".*norm\.output": [S0]},
        r"forward keys 'norm\\.output' and '.*norm\\.output' both match 'norm.output' with different placements",
    ),
]

EXPERT_ERRORS = [
    (
        Experts(),
        {"tp": Shard(1)},
        "expert 'experts': one or several axes must hold Shard(0), the expert dim, the others Replicate(); got (Shard(",
    ),
    (
        Experts(),
        R,
        "expert 'experts': one or several axes must hold Shard(0), the expert dim, the others Replicate(); got (Repl",
    ),
    (Experts(), {"ep": Shard(0)}, "expert 'experts': expected one of the mesh's axes ('tp',), got 'ep'"),
    (
        nn.Linear(6, 6),
        S0,
        "expert 'experts': Linear has no integer attribute num_experts, so it is no stack of experts",
    ),
    (
        Experts(),
        S0,
        "expert 'experts': 6 experts do not divide over 4 ranks of the axis; use a degree that divides 6",
    ),
    (
        Experts(8),
        S0,
        "expert 'experts': parameter 'weight' of shape (6, 3) has no leading dim of 8",
    ),
    (
        Experts(8, weight=None, inner=nn.Linear(2, 8)),
        S0,
        "expert 'experts': parameter 'inner.weight' is in a submodule; expected stacked expert tensors",
    ),
]


def assert_refused(module, plan, text, *, ranks=4):
    with pytest.raises(PlanError) as info:
        describe(module, {"tp": ranks}, plan)
    assert str(info.value).startswith(text), str(info.value)


@pytest.mark.parametrize(
    ("plan", "text"), PARAMETER_ERRORS, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_parameter_section(plan, text):
    assert_refused(network(), {"parameter": plan}, text)


@pytest.mark.parametrize(
    ("plan", "text"), FORWARD_ERRORS, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_forward_section(plan, text):
    assert_refused(network(), {"forward": plan}, text)


@pytest.mark.parametrize(("experts", "placements", "text"), EXPERT_ERRORS, ids=range(len(EXPERT_ERRORS)))
def test_expert_section(experts, placements, text):
    assert_refused(network(experts=experts), {"expert": {"experts": placements}}, text)


def test_experts_that_do_not_exist():
    text = "expected expert keys that match names of the module, got 'expert'; nearest names: 'experts', "
    assert_refused(network(experts=Experts(8)), {"expert": {"expert": S0}}, text)


def test_plans_of_experts_that_disagree():
    text = (
        "expert keys 'experts' and 'expert.' both match 'experts' with different placements: {'tp': Shard(dim=0)} and"
    )
    assert_refused(network(experts=Experts(8)), {"expert": {"experts": S0, "expert.": R}}, text)


def test_experts_of_another_signature():
    experts = Experts(8, weight=nn.Parameter(torch.zeros(8, 3)))
    experts.forward = lambda x: x
    text = "expert 'experts': forward takes ['x'], expected ['hidden_states', 'top_k_index', 'top_k_weights']"
    assert_refused(network(experts=experts), {"expert": {"experts": S0}}, text)


def test_experts_with_a_value_per_expert_in_a_buffer():
    experts = Experts(8, weight=nn.Parameter(torch.zeros(8, 3)))
    experts.register_buffer("bias", torch.zeros(8))
    text = "expert 'experts': buffer 'bias' holds a value per expert, which is not supported"
    assert_refused(network(experts=experts), {"expert": {"experts": S0}}, text)


def test_experts_that_two_sections_place():
    experts = Experts(8, weight=nn.Parameter(torch.zeros(8, 3)))
    plan = {"expert": {"experts": S0}, "parameter": {r"experts\.weight": S1}}
    text = (
        "parameter 'experts.weight' is placed as (Shard(dim=1),), but its experts are placed as (Shard(dim=0),); leave"
    )
    assert_refused(network(experts=experts), plan, text)


def test_an_unknown_section():
    assert_refused(
        network(),
        {"parameters": {}},
        "expected a plan of the sections parameter, forward, expert, attribute, local_attribute, eager, ",
    )


def test_a_tied_parameter_placed_twice():
    module = network(head=nn.Linear(6, 8))
    module["head"].weight = module["layers"][0]["up"].weight
    plan = {"parameter": {r"layers\.0\.up\.weight": S0, r"head\.weight": S1}}
    text = (
        "'layers.0.up.weight' and 'head.weight' are one tied parameter, but the plan places it as (Shard(dim=0),) and"
    )
    assert_refused(module, plan, text, ranks=2)


@ranks(2)
def test_one_rank_alone_is_refused_without_communication():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    unnamed = init_device_mesh("cpu", (2,))
    placed = nn.ModuleDict({"a": nn.Linear(2, 2)})
    placed["a"].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]))
    dist.barrier()
    if dist.get_rank() == 1:
        for plan, text in PARAMETER_ERRORS:
            with pytest.raises(PlanError, match=re.escape(text)):
                parallelize_module(network(), mesh, {"parameter": plan})
        with pytest.raises(
            PlanError, match=r"the mesh has no axis names; give init_device_mesh\(\.\.\., mesh_dim_names="
        ):
            parallelize_module(network(), unnamed, {})
        with pytest.raises(
            PlanError, match=r"'a\.weight' is a DTensor already; give parallelize_module a module of plain"
        ):
            parallelize_module(placed, mesh, {})
        with pytest.raises(ValueError, match="for mode, got 'fast'; "):
            parallelize_module(network(), mesh, {}, mode="fast")


@ranks(2)
def test_a_refused_module_can_be_parallelized_afterwards_but_only_once():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = network()
    for plan in ({"parameter": {"nothing": S0}}, {"forward": {r"norm\.input": {"x": S0}}}):
        with pytest.raises(PlanError):
            parallelize_module(module, mesh, plan)
    parallelize_module(module, mesh, {})
    with pytest.raises(ValueError, match="this ModuleDict is parallelized already; build a new one to change the plan"):
        parallelize_module(module, mesh, {})


@ranks(2)
def test_a_dim_that_an_activation_does_not_have():
    """Shapes of activations are known in the first call only; it is refused in every mode."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for mode in ("eager", "static"):
        for side, place in (("input", "0.input 'input'"), ("output", "0.output")):
            model = nn.Sequential(nn.Linear(4, 4))
            parallelize_module(model, mesh, {"forward": {f"0.{side}": [{"tp": Shard(5)}]}}, mode=mode)
            text = f"{place}: Shard(dim=5) on a tensor of shape (2, 4), which has 2 dims"
            with pytest.raises(PlanError, match=re.escape(text)):
                model(torch.ones(2, 4))


@ranks(3)
def test_plans_that_differ_between_ranks_name_them():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    placement = S0 if dist.get_rank() == 2 else R
    expected = (
        "the plan differs between ranks: ranks 0, 1 have 'parameter norm.weight: (Replicate(),)', "
        "rank 2 has 'parameter norm.weight: (Shard(dim=0),)'"
    )
    with pytest.raises(PlanError, match=re.escape(expected)):
        parallelize_module(network(), mesh, {"parameter": {r"norm\.weight": placement}})
    with pytest.raises(PlanError, match="ranks 0, 1 have 'mode: eager', rank 2 has 'mode: static'"):
        parallelize_module(network(), mesh, {}, mode="static" if dist.get_rank() == 2 else "eager")
    implicit = dist.get_rank() == 1
    with pytest.raises(PlanError, match="ranks 0, 2 have 'allow_implicit: False', rank 1 has 'allow_implicit: True'"):
        parallelize_module(network(), mesh, {}, allow_implicit=implicit)


@ranks(4)
def test_one_rank_that_differs_is_an_error_on_every_rank_of_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placement = S0 if dist.get_rank() == 3 else R
    expected = (
        "the plan differs between ranks: ranks 0, 1, 2 have 'parameter norm.weight: (Replicate(), Replicate())', "
        "rank 3 has 'parameter norm.weight: (Replicate(), Shard(dim=0))'"
    )
    # Ranks 0 and 3 share no group: rank 0 must hear of it from the others, or it would go on and wait for them.
    with pytest.raises(PlanError, match=re.escape(expected)):
        parallelize_module(network(), mesh, {"parameter": {r"norm\.weight": placement}})


def test_ready_plans_check_the_degree():
    model = nn.Module()
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4, "num_hidden_layers": 1}
    model.config = SimpleNamespace(model_type="mixtral", **{**sizes, "num_local_experts": 6})
    text = "expected num_local_experts that tp=4 ranks divide, got 6; use a degree that divides it"
    with pytest.raises(PlanError, match=text):
        plans.plan_for(model, degree=4)
    plans.plan_for(model, degree=2)
    plans.plan_for(model, degree=4, expert_axis="ep")
    for family in plans.FAMILIES:
        model.config = SimpleNamespace(model_type=family, **{**sizes, "num_attention_heads": 6})
        text = (
            "expected num_attention_heads that tp=4 ranks divide, got 6; use a degree that divides it, or "
            "replicate_attention=True, which computes all heads on every rank"
        )
        with pytest.raises(PlanError, match=text):
            plans.plan_for(model, degree=4)
        plans.plan_for(model, degree=4, replicate_attention=True)
        plans.plan_for(model, degree=2)


def test_models_without_a_ready_plan():
    text = (
        "no ready plan for Linear: expected a family among gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, "
        "mixtral, olmo2, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, got None; give a plan of your own, or "
        "family= for a model with the same names"
    )
    with pytest.raises(PlanError, match=re.escape(text)):
        plans.plan_for(nn.Linear(2, 2))


def test_an_expert_axis_without_experts():
    model = nn.Module()
    model.config = SimpleNamespace(model_type="llama")
    with pytest.raises(PlanError, match="expected no expert_axis, as a model of type 'llama' has no experts, got 'ep'"):
        plans.plan_for(model, expert_axis="ep")


def test_pieces_that_disagree():
    with pytest.raises(PlanError) as info:
        plans.merge(plans.column("up"), {"parameter": {r"up\.(weight|bias)": S1}})
    assert str(info.value).startswith(
        r"expected one entry of parameter key 'up\\.(weight|bias)', got {'tp': Shard(dim=0)} and {'tp': Shard(dim=1)}"
    )
