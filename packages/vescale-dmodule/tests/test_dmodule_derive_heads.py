"""Grouped queries: derived plans repeat key-value heads that are fewer than ranks, or merged with more queries."""

import pytest
import torch
from torch.distributed.tensor import Shard

from vescale.dmodule import Repeat, parallelize_module, plans
from vescale.dtensor import InterleavedShard, init_device_mesh
from vescale_testing import ranks

TOKENS = {"input_ids": torch.ones(4, 8, dtype=torch.int64)}
LAYER = r"model\.layers\.\d+\.self_attn"


def test_heads_are_repeated_until_each_rank_has_one(build):
    plan = plans.derive(build("qwen3"), TOKENS, degree=4).plan
    repeat = Repeat({"tp": Shard(2)}, dim=2, parts=2, times=2)
    assert [entry for entry in plan["forward"].values() if entry == [repeat]]
    assert plan["attribute"] == {rf"{LAYER}\.num_key_value_groups": 1}
    assert "attribute" not in plans.derive(build("qwen3"), TOKENS, degree=2).plan  # two ranks, two heads


def test_heads_in_one_matrix_with_queries_are_as_many(build):
    plan = plans.derive(build("phi3"), TOKENS, degree=2).plan
    repeat = Repeat({"tp": InterleavedShard(2, 3)}, dim=2, parts=(4, 4), times=(1, 2))  # the second: keys and values
    assert plan["forward"][rf"{LAYER}\.qkv_proj\.output"] == [repeat]
    assert plan["attribute"] == {rf"{LAYER}\.num_key_value_groups": 1, rf"{LAYER}\.num_key_value_heads": 4}


def test_queries_that_ranks_do_not_share_stay_whole(build):
    derived = plans.derive(build("qwen2"), TOKENS, degree=3)
    assert "attribute" not in derived.plan
    assert "model.layers.0.self_attn.o_proj.weight" in derived.replicated


def test_models_train_as_in_one_process(build, train, assert_same_pass):
    families = ("gemma3_text", "phi3")
    derived = {name: plans.derive(build(name), degree=4).plan for name in families}
    expected = {name: train(build(name, dropout=0.1), tokens=11) for name in families}

    @ranks(4, timeout=300)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        for name, mode in (("gemma3_text", "eager"), ("phi3", "static")):
            model = parallelize_module(build(name, dropout=0.1), mesh, derived[name], mode=mode)
            assert_same_pass(train(model, tokens=11), expected[name])
        # k0 k1 k0 k1 instead of k0 k0 k1 k1
        forward = derived["gemma3_text"]["forward"]
        (key,) = (key for key, entry in forward.items() if isinstance(entry, list) and isinstance(entry[0], Repeat))
        wrong = {**forward, key: [Repeat({"tp": Shard(2)}, dim=2, parts=1, times=2)]}
        model = build("gemma3_text", dropout=0.1)
        model = parallelize_module(model, mesh, {**derived["gemma3_text"], "forward": wrong})
        with pytest.raises(AssertionError):
            assert_same_pass(train(model, tokens=11), expected["gemma3_text"])

    on_every_rank()
