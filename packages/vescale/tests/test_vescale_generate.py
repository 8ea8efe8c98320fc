"""`vescale.generate_plan` counts what the parts shard: by a module plan of the user, a ready one, or a derived one."""

import pytest
import torch
from torch import nn

import vescale
from vescale import _generate
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


def test_a_model_that_does_not_run_gets_no_tensor_parallelism():
    """Net has no forward, from which a plan would be derived."""
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    plan = vescale.generate_plan(Net(), cluster, constraints())
    assert (plan.dp, plan.tp) == (2, 1)
    with pytest.raises(vescale.NoPlanFitsError, match="derive: expected inputs with which the model, a Net, runs"):
        vescale.generate_plan(Net(), cluster, constraints(tp=2))
    assert vescale.generate_plan(Net(), cluster, constraints(tp=2), module_plan=PLAN).tp == 2


class Block(nn.Module):
    """A feed-forward of which two ranks take halves, and a gate of an odd width, which stays whole."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(width, 64), nn.Linear(64, width), nn.Linear(width, 3)

    def forward(self, x):
        return x + self.down(self.up(x).relu()) * self.gate(x).mean(-1, keepdim=True)


class Runs(nn.Module):
    """Blocks that run, of no known family."""

    def __init__(self, num_blocks=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Counts(Runs):
    def forward(self, x):
        assert len(self.layers) == 5
        return super().forward(x)


class Norms(nn.Module):
    """Nothing that ranks could share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x).square().mean()


def test_a_derived_plan_decides_what_is_counted():
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    plan = vescale.generate_plan(Runs(), cluster, constraints(tp=2))
    assert (plan.tp, plan.sequence_parallel) == (2, True)
    halves, whole = 64 * 16 + 64 + 16 * 64, 16 + 3 * 16 + 3
    assert plan.memory[0].parameters == 4 * 3 * (halves // 2 + whole)
    with pytest.raises(vescale.NoPlanFitsError, match="derived for Norms shards no parameter over tp = 2"):
        vescale.generate_plan(Norms(), cluster, constraints(tp=2))


def test_blocks_that_repeat_others_are_sharded_as_these_are():
    """A plan is derived for one block of each kind, and for the model itself where its code counts the blocks."""
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    expected = vescale.generate_plan(Counts(5), cluster, constraints(tp=2)).memory
    assert vescale.generate_plan(Runs(5), cluster, constraints(tp=2)).memory == expected
    assert vescale.generate_plan(Runs(4), cluster, constraints(tp=2)).memory != expected


def test_degrees_are_derived_only_where_nothing_before_fits(monkeypatch):
    asked = []
    derive = _generate._resolve_module_plan
    monkeypatch.setattr(
        _generate, "_resolve_module_plan", lambda plan, *rest: asked.append(plan.tp) or derive(plan, *rest)
    )
    roomy = vescale.generate_plan(Runs(), vescale.Cluster(4, memory_bytes=GIB), constraints(sequence_parallel=False))
    assert roomy.tp == 1
    derived = asked.count(2), asked.count(4)
    assert "so its tensor parallelism was not examined" in roomy.explain()
    assert roomy == vescale.Plan.from_json(roomy.to_json())
    assert derived[1] == 0
    vescale.generate_plan(Runs(), vescale.Cluster(4, memory_bytes=GIB), constraints(tp=4))
    assert asked.count(4) == 1


class Flat(Block):
    """The rows of batch and sequence as one dim, in a matrix of which ranks have shards."""

    def forward(self, x):
        return x + self.down(self.up(x.flatten(0, 1)).relu()).view_as(x)


def test_what_a_derived_plan_cannot_do_is_not_proposed():
    """Sequence parallelism, though the sequence divides; where it is asked for the reason is that of `parallelize`."""
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    model = Runs()
    model.layers = nn.ModuleList(Flat() for _ in range(3))
    assert not vescale.generate_plan(model, cluster, constraints(tp=2)).sequence_parallel
    with pytest.raises(ValueError, match=r"got a Runs with activations that cannot \(no sum over ranks of shape"):
        vescale.generate_plan(model, cluster, constraints(tp=2, sequence_parallel=True))


class Held(Runs):
    """A parameter outside of modules that stages are made of."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return super().forward(x * self.scale)


def test_stages_that_cannot_be_cut_are_not_proposed():
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    assert vescale.generate_plan(Runs(), cluster, constraints(pp=2)).pp == 2
    with pytest.raises(ValueError, match="expected parameters in modules of one stage, got `scale` held directly"):
        vescale.generate_plan(Held(), cluster, constraints(pp=2))


def test_example_inputs_have_the_length_of_the_run():
    cluster = vescale.Cluster(2, memory_bytes=GIB, device="cpu")
    given = {"x": torch.zeros(1, 16, 16)}
    assert vescale.generate_plan(Runs(), cluster, constraints(tp=2), example_inputs=given).tp == 2
    with pytest.raises(ValueError, match="expected example_inputs of 16 tokens, as the constraints have, got 8 in 'x'"):
        vescale.generate_plan(
            Runs(), cluster, constraints(tp=2), example_inputs={"x": torch.zeros(1, 8, dtype=torch.long)}
        )
    with pytest.raises(ValueError, match=r"expected example_inputs with which Runs runs without data, got \['y'\]"):
        vescale.generate_plan(Runs(), cluster, constraints(), example_inputs={"y": torch.zeros(1, 16, 16)})


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
