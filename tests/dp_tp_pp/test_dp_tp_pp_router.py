"""The loss of a mixture's router, which Hugging Face models collect by hooks inside of layers, in pipelines."""

from functools import partial

import pytest
import torch

import vescale
from vescale import Plan
from vescale_testing import assert_same_training, keep_float64, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one

sgd = partial(torch.optim.SGD, lr=0.1)
ROUTER = (("output_router_logits", True), ("router_aux_loss_coef", 0.5))
WHOLE = {
    "eager": Plan(tp=2, pp=2),
    "static": Plan(tp=2, pp=2, mode="static"),
    "V": Plan(tp=2, pp=2, schedule="zb_v", mode="static"),
    "sequence_parallel": Plan(tp=2, pp=2, sequence_parallel=True, mode="static"),
}
PARTS = {
    "dp": Plan(dp=2, pp=2, num_microbatches=2),
    "zero3": Plan(dp=2, pp=2, zero=3, num_microbatches=2, schedule="zb_v"),
    "dp_tp": Plan(dp=2, tp=2, pp=2, num_microbatches=2, mode="static"),
}


@pytest.mark.parametrize("name", ["V", *(pytest.param(n, marks=pytest.mark.thorough) for n in WHOLE if n != "V")])
def test_training_with_one_micro_batch(name):
    training, plan = Training("mixtral", layers=4, overrides=ROUTER), WHOLE[name]
    expected = train_on_one(training)
    without = train_on_one(Training("mixtral", layers=4))
    with pytest.raises(AssertionError):
        assert_same_training(without, expected, rtol=1e-10)
    for record in run_ranks(train_in_parallel, plan.world_size, training, plan, timeout=240):
        assert_same_training(record, expected, rtol=1e-10)


def losses_on_one(training, parts):
    torch.manual_seed(0)
    model = training.build()
    optimizer, losses = sgd(model.parameters()), []
    with keep_float64():
        for step in range(3):
            rows = {name: each.chunk(parts) for name, each in training.global_batch(step).items()}
            each = [model(**{name: rows[name][i] for name in rows}).loss / parts for i in range(parts)]
            sum(each).backward()
            losses.append(sum(each).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def losses_in_parallel(training, plan):
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(plan, training.build(), sgd, per_rank=True)
    losses = []
    with keep_float64():
        for step in range(3):
            loss = model(**model.local_batch(training.global_batch(step))).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", ["dp_tp", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("dp", "zero3"))])
def test_losses_of_parts_of_a_batch(name):
    """Each micro-batch on each rank balances its own tokens, as in Megatron."""
    training, plan = Training("mixtral", layers=4, overrides=ROUTER), PARTS[name]
    expected = losses_on_one(training, 4)
    every = run_ranks(losses_in_parallel, plan.world_size, training, plan, timeout=240)
    found = torch.tensor(every, dtype=torch.float64).mean(0)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)
    assert abs(losses_on_one(training, 1)[-1] - expected[-1]) > 1e-6


def test_parts_of_a_batch_are_refused_by_default():
    training, plan = Training("mixtral", layers=4, overrides=ROUTER), PARTS["dp"]
    match = "expected that MixtralForCausalLM treats every row alone, .* pass per_microbatch=True"
    with pytest.raises(AssertionError, match=match):
        run_ranks(train_in_parallel, plan.world_size, training, plan, timeout=120)
