"""Batch and model sharded over two axes of one mesh: the same training, dropout included, in both orders of the axes."""

import dataclasses

import pytest
import torch

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


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids="-".join)
def test_training_equals_one_process(names, build, train, assert_same_pass):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for family in ("mixtral", "llama") if names[0] == "dp" else ("gpt2",):
            model = build(family, dropout=0.1)
            plan = plans.plan_for(model, degree=2, sequence_parallel=True)
            forward = {key: with_batch(entry) for key, entry in plan["forward"].items()}
            forward["input"] = {"input_ids": BATCH, "labels": BATCH}
            parallelize_module(model, mesh, {**plan, "forward": forward})
            actual = train(model)
            assert isinstance(actual.logits, DTensor)  # still sharded over the batch
            actual = dataclasses.replace(actual, logits=actual.logits.full_tensor())
            assert_same_pass(actual, train(build(family, dropout=0.1)))
            assert all(p.grad.placements == p.placements for p in model.parameters())

    on_every_rank()


@ranks(4)
def test_labels_that_some_ranks_ignore(build):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.randint(0, 255, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0] = labels[1, 3:] = -100
    model = build("llama")
    plan = plans.plan_for(model, degree=2)
    forward = {key: with_batch(entry) for key, entry in plan["forward"].items()}
    forward["input"] = {"input_ids": BATCH, "labels": BATCH}
    parallelize_module(model, mesh, {**plan, "forward": forward})
    expected = build("llama")(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, expected, rtol=1e-6, atol=0)
