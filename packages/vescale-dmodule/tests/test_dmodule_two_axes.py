"""Batch and model sharded over two axes of one mesh, in both orders: the same training, dropout included."""

import dataclasses

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import DTensor, Placement, Shard, init_device_mesh
from vescale_testing import ranks

BATCH = {"dp": Shard(0)}


def with_batch(entry):
    """The entry with every tensor's dim 0 sharded over dp, too."""
    if isinstance(entry, list):
        return [with_batch(inner) for inner in entry]
    if all(isinstance(placement, Placement) for placement in entry.values()):
        return {**entry, **BATCH}
    return {name: with_batch(inner) for name, inner in entry.items()}


@ranks(4)
def test_training_equals_one_process(build, train, assert_same_pass):
    # fused attention: torch's planner needs seconds for each matrix product of heads on two axes
    residual_dropout = {"dropout": 0.1, "attn_pdrop": 0.0, "n_layer": 1}
    for family, names, options in (("mixtral", ("dp", "tp"), {}), ("gpt2", ("tp", "dp"), residual_dropout)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = build(family, attention="sdpa", **options)
        plan = plans.plan_for(model, degree=2, sequence_parallel=True)
        forward = {key: with_batch(entry) for key, entry in plan["forward"].items()}
        forward["input"] = {"input_ids": BATCH, "labels": BATCH}
        parallelize_module(model, mesh, {**plan, "forward": forward})
        actual = train(model)
        assert isinstance(actual.logits, DTensor)  # still sharded over the batch
        actual = dataclasses.replace(actual, logits=actual.logits.full_tensor())
        assert_same_pass(actual, train(build(family, attention="sdpa", **options)))
        assert all(p.grad.placements == p.placements for p in model.parameters())
