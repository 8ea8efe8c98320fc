"""Ready plans, what a plan makes of a model without any rank, and models of which a part lives elsewhere."""

import doctest
import importlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import PlanError, describe, plans


def test_ready_plans_shard_every_matrix_but_the_small_ones(build):
    replicated = {
        "mixtral": {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"},
        "llama": set(),
        "gpt2": {"transformer.wpe.weight"} | {f"transformer.h.{i}.attn.c_attn.weight" for i in range(2)},
    }
    for family, expected in replicated.items():
        model = build(family)
        layouts = describe(model, {"tp": 2}, plans.plan_for(model, degree=2))
        whole = {layout.name for layout in layouts if layout.placements == (Replicate(),) and len(layout.shape) > 1}
        assert whole == expected
        assert [layout.name for layout in layouts] == [name for name, _ in model.named_parameters()]


def test_sequence_parallelism_changes_boundaries_only():
    for plan in (plans.mixtral, plans.llama, plans.gpt2):
        plain, sequence = plan(axis="model"), plan(axis="model", sequence_parallel=True)
        assert plain["parameter"] == sequence["parameter"]
        assert plain["forward"].keys() == sequence["forward"].keys()
        assert plain["forward"] != sequence["forward"]
        assert "'tp'" not in str(sequence)


def test_the_largest_shard_counts():
    layouts = describe(
        nn.Linear(6, 5, dtype=torch.bfloat16), {"dp": 2, "tp": 4}, {"parameter": {"weight": {"tp": Shard(0)}}}
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
        with pytest.raises(PlanError, match="matches nothing in the module"):
            describe(module, {"tp": 2}, {section: {key: {"tp": Shard(0)}}})


@pytest.mark.parametrize("name", ["_agree", "_boundary", "_describe", "plans.gpt2", "plans.llama", "plans.mixtral"])
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"vescale.dmodule.{name}")
    names = {"torch": torch, "nn": nn, "Shard": Shard, "Replicate": Replicate}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
