"""Derived plans shard activations between pairs of matrices over the sequence, or say why they cannot."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule import NotLocalFriendlyError, PlanError, parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale_testing import ranks

SEQUENCE = [{"tp": Shard(1)}]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.layers(self.norm(x))


class Flat(Block):
    def forward(self, x):
        return x + self.layers(self.norm(x).flatten(0, 1)).view_as(x)


def test_from_the_first_block_to_the_last_result():
    x = {"input": torch.ones(2, 6, 8)}
    plan = plans.derive(nn.Sequential(Block(), Block()), x, degree=2, sequence_parallel=True).plan
    assert plan["forward"] == {
        r"(0|1)\.layers\.2\.output": SEQUENCE,
        r"\d+\.layers\.input": {"input": {"tp": Replicate()}},
        "output": [{"tp": Replicate()}],
        r"0\.input": {"x": {"tp": Shard(1)}},
    }


def test_sums_without_a_sequence_are_refused():
    with pytest.raises(PlanError, match=r"sharded over the sequence for sequence_parallel=True, got a Flat"):
        plans.derive(Flat(), {"x": torch.ones(2, 6, 8)}, degree=2, sequence_parallel=True)
    assert plans.derive(Flat(), {"x": torch.ones(2, 6, 8)}, degree=2).plan["parameter"]


def test_models_train_as_in_one_process(build, train, assert_same_pass):
    """With 11 tokens, which two ranks do not share evenly, and dropout on the shards."""
    families = ("gpt2", "qwen2_moe")
    derived = {name: plans.derive(build(name), degree=2, sequence_parallel=True).plan for name in families}
    expected = {name: train(build(name, dropout=0.1), tokens=11) for name in families}

    @ranks(2, timeout=300)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for name, mode in (("gpt2", "static"), ("qwen2_moe", "eager")):
            model = parallelize_module(build(name, dropout=0.1), mesh, derived[name], mode=mode)
            assert_same_pass(train(model, tokens=11), expected[name])

    on_every_rank()


def test_a_missing_boundary_makes_no_other_results(build, train, assert_same_pass):
    """Eager mode gathers the merged rows of batch and sequence, for one operator; static mode refuses the plan."""
    plan = plans.derive(build("gpt2"), degree=2, sequence_parallel=True).plan
    (key,) = (key for key in plan["forward"] if "attn" in key and key.endswith("input"))
    forward = {name: entry for name, entry in plan["forward"].items() if name != key}
    expected = train(build("gpt2"))

    @ranks(2, timeout=300)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert_same_pass(train(parallelize_module(build("gpt2"), mesh, {**plan, "forward": forward})), expected)
        with pytest.raises(NotLocalFriendlyError, match=r"module 'transformer\.h\.0\.attn' fails"):
            train(parallelize_module(build("gpt2"), mesh, {**plan, "forward": forward}, mode="static"))

    on_every_rank()


def test_sequences_that_are_guessed_are_long_enough_for_the_ranks():
    blocks = nn.Sequential(Block(), Block())
    assert plans.derive(blocks, degree=8, sequence_parallel=True).inputs["input"].shape == (2, 16, 8)
    assert plans.derive(blocks, degree=8).inputs["input"].shape == (2, 8, 8)
