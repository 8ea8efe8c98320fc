"""`vescale.generate_plan` reads the sharded parameters from the model's ready module plan."""

import pytest
import torch
from torch import nn

import vescale
from vescale.dtensor import Replicate, Shard

GIB = 2**30


class Net(nn.Module):
    """Three blocks with attention heads, of no known family."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(3))


PLAN = {
    "parameter": {
        r"layers\.\d+\.linear1\.weight": {"tp": Shard(0)},
        r"layers\.\d+\.linear2\.weight": [Shard(1)],
        r"layers\.\d+\.norm1\.weight": {"tp": Replicate()},
        r"head\.weight": {"tp": Shard(0)},
    },
    "expert": {r"layers\.0\.self_attn": {"tp": Shard(0)}},
}


def constraints(**kwargs):
    return vescale.Constraints(global_batch_size=4, sequence_length=16, **kwargs)


SHARDED = [r"layers\.\d+\.linear1\.weight", r"layers\.\d+\.linear2\.weight", r"(?:layers\.0\.self_attn)\..*"]


def test_parameters_that_the_module_plan_splits_are_estimated_as_split():
    """Shards and experts of this model are split; replicated parameters and those of other models are not."""
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    ours = vescale.generate_plan(Net(), cluster, constraints(tp=2), module_plan=PLAN)
    for patterns in (SHARDED, SHARDED[:2], [*SHARDED, r"layers\.\d+\.norm1\.weight"]):
        profile = vescale.plan.profile(Net(), tp_sharded=patterns)
        same = vescale.generate_plan(profile, cluster, constraints(tp=2)).memory == ours.memory
        assert same == (patterns == SHARDED)


def test_model_without_a_ready_plan_gets_no_tensor_parallelism():
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    plan = vescale.generate_plan(Net(), cluster, constraints())
    assert (plan.dp, plan.tp) == (2, 1)
    assert "no ready plan for Net" in plan.explain()
    with pytest.raises(ValueError, match="no ready plan for Net"):
        vescale.generate_plan(Net(), cluster, constraints(tp=2))
    assert vescale.generate_plan(Net(), cluster, constraints(tp=2), module_plan=PLAN).tp == 2


def test_what_the_module_plan_splits_decides_the_memory():
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    all_split = vescale.generate_plan(vescale.plan.profile(Net()), cluster, constraints(tp=2))
    some_split = vescale.generate_plan(Net(), cluster, constraints(tp=2), module_plan=PLAN)
    assert some_split.memory[0].parameters > all_split.memory[0].parameters


def test_hugging_face_mixtral_is_planned():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig()).to(torch.bfloat16)
    cluster = vescale.Cluster(16, memory_bytes=80 * GIB)
    plan = vescale.generate_plan(model, cluster, vescale.Constraints(global_batch_size=64, sequence_length=4096))
    plan.check_world(16)
    assert plan.tp * plan.pp > 1
    assert max(stage.total for stage in plan.memory) < 72 * GIB
