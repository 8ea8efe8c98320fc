"""Ready plans, what a plan makes of a model without any rank, and models of which a part lives elsewhere."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import PlanError, describe, plans


def test_ready_plans_shard_every_matrix_but_the_small_ones(build):
    router = {"model.layers.0.mlp.gate.weight"}
    attention = "model.layers.{}.self_attn.{}_proj.weight"
    replicated = {
        "gpt2": {"transformer.wpe.weight"},
        "mixtral": {*router, "model.layers.1.mlp.gate.weight"},
        "qwen2_moe": {*router, "model.layers.0.mlp.shared_expert_gate.weight"},
        "qwen3_moe": router,
        "phi3": {attention.format(i, "qkv") for i in range(2)},  # grouped queries
    }
    for family in plans.FAMILIES:
        model = build(family)
        for degree in (2, 4):
            layouts = describe(model, {"tp": degree}, plans.plan_for(model, degree=degree))
            whole = {layout.name for layout in layouts if layout.placements == (Replicate(),) and len(layout.shape) > 1}
            repeated = {attention.format(i, name) for i in range(2) for name in "kv"}
            fewer_heads = degree == 4 and family not in ("gpt2", "gpt_neox", "phi3")
            assert whole == replicated.get(family, set()) | (repeated if fewer_heads else set()), family
            assert [layout.name for layout in layouts] == [name for name, _ in model.named_parameters()]


def test_a_degree_that_divides_all_heads_changes_nothing(build):
    for family in plans.FAMILIES:
        model = build(family)
        assert plans.plan_for(model, degree=2) == plans.plan_for(model), family


def test_sequence_parallelism_changes_boundaries_only():
    for plan in (getattr(plans, name) for name in plans.__all__ if name in plans.FAMILIES):
        plain, sequence = plan(axis="model"), plan(axis="model", sequence_parallel=True)
        forward, whole = sequence.pop("forward"), plain.pop("forward")
        assert plain == sequence
        # the first layer takes its part of the sequence, after the final norm it is whole again
        (first,) = (key for key in forward.keys() - whole if key.endswith(r"0\.input"))
        assert forward[first] == [{"model": Shard(1)}]
        (last,) = forward.keys() - whole - {first}
        assert forward[last] == [{"model": Replicate()}]
        assert any(forward[key] != whole[key] for key in whole)
        assert "'tp'" not in str([plain, forward])


def test_a_transformer_in_a_few_pieces():
    layer = r"model\.layers\.\d+"
    plan = plans.merge(
        plans.vocab(r"model\.embed_tokens", "lm_head"),
        plans.sequence(r"model\.layers\.0", r"model\.norm"),
        plans.block(rf"{layer}\.self_attn"),
        plans.column(rf"{layer}\.self_attn\.(q|k|v)_proj"),
        plans.row(rf"{layer}\.self_attn\.o_proj", output=Shard(1)),
        plans.block(rf"{layer}\.mlp", output=Shard(1)),
        plans.experts(rf"{layer}\.mlp\.experts"),
    )
    assert plan == plans.mixtral(sequence_parallel=True, expert_axis="ep")
    assert plan != plans.mixtral(sequence_parallel=True)
    merged = plans.merge({"eager": ["a"], "local": {"b": {"output": [None]}}}, {"eager": ["c"]})
    assert merged == {"eager": ["a", "c"], "local": {"b": {"output": [None]}}}


def test_the_largest_shard_counts():
    layouts = describe(
        nn.Linear(6, 5, dtype=torch.bfloat16), {"dp": 2, "tp": 3}, {"parameter": {"weight": {"tp": Shard(0)}}}
    )
    weight, bias = layouts
    assert str(weight) == "weight  [5, 6] R S(0) -> [2, 6]"
    assert (weight.local_bytes, bias.local_bytes) == (24, 10)
    assert weight.placements == (Replicate(), Shard(0))


def test_dims_counted_from_the_end():
    (weight,) = describe(nn.Linear(6, 5, bias=False), {"tp": 2}, {"parameter": {"weight": [Shard(-1)]}})
    assert weight.placements == (Shard(1),)


class Stub(nn.Module):
    def __init__(self, *absent):
        super().__init__()
        self.absent_fqns = absent

    def forward(self, *args):
        return args


def test_names_of_other_pipeline_stages_are_known():
    module = nn.ModuleDict({"here": nn.Linear(2, 2), "there": Stub("", "up", "up.weight")})
    plan = {
        "parameter": {r"(here|there\.up)\.weight": {"tp": Shard(0)}, r"there\.up\.weight": {"tp": Shard(0)}},
        "forward": {r"there\.input": {"hidden": {"tp": Shard(0)}}, r"there\.up\.output": [{"tp": Shard(0)}]},
        "expert": {r"there\.up": {"tp": Shard(0)}},
    }
    assert [layout.name for layout in describe(module, {"tp": 2}, plan)] == ["here.weight", "here.bias"]
    for section, key in [
        ("parameter", r"there\.down\.weight"),
        ("forward", r"there\.down\.input"),
        ("expert", "elsewhere"),
    ]:
        with pytest.raises(PlanError, match="keys that match names of the module"):
            describe(module, {"tp": 2}, {section: {key: {"tp": Shard(0)}}})
