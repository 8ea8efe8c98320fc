"""Predictions of stages, before and after a step of training, are those of one process."""

from functools import partial

import pytest
import torch

import vescale
from vescale import Plan
from vescale_testing import keep_float64, run_ranks
from vescale_testing.training import Training

sgd = partial(torch.optim.SGD, lr=0.1)
PLANS = {
    "v_static": Plan(tp=2, pp=2, num_microbatches=2, schedule="zb_v", mode="static"),
    "zero3": Plan(dp=2, pp=2, zero=3, num_microbatches=2),
    "sequence_parallel": Plan(tp=2, pp=2, num_microbatches=4, sequence_parallel=True),
}


def logits_of(output):
    return output.logits


def on_one(training):
    model, found = training.build(), []
    optimizer = sgd(model.parameters())
    with keep_float64():
        for step in range(2):
            with torch.no_grad():
                found.append(model(input_ids=training.global_batch(0)["input_ids"]).logits)
            model(**training.global_batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def in_parallel(training, plan):
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(plan, training.build(), sgd)
    rows = model.local_batch({"input_ids": torch.arange(training.batch)})["input_ids"]
    found = []
    with keep_float64():
        for step in range(2):
            local = model.local_batch(training.global_batch(0))
            found.append(model.engine.outputs(input_ids=local["input_ids"], select=logits_of))
            again = model.engine.outputs(input_ids=local["input_ids"], select=logits_of)
            torch.testing.assert_close(again, found[-1], rtol=0, atol=1e-12)
            model(**model.local_batch(training.global_batch(step))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return rows, found


@pytest.mark.parametrize("name", ["zero3", "sequence_parallel", pytest.param("v_static", marks=pytest.mark.thorough)])
def test_predictions(name):
    training, plan = Training("llama", layers=4), PLANS[name]
    torch.manual_seed(0)
    expected = on_one(training)
    assert (expected[0] - expected[1]).abs().max() > 1e-4
    for rows, found in run_ranks(in_parallel, plan.world_size, training, plan, timeout=120):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs[rows]).abs().max() < 1e-10
