"""What mixes rows is refused before there is a process group, where a plan computes the batch in parts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_testing import run_ranks

WIDTH = 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).double()


def parallelize(plan, model=None, **options):
    options = {"example_inputs": {"input": torch.ones(8, WIDTH).double()}, "loss_fn": torch.sum, **options}
    return vescale.parallelize(plan, build() if model is None else model, torch.optim.SGD, **options)


def refusal(plan, **options):
    with pytest.raises(ValueError) as found:
        parallelize(plan, **options)
    assert not dist.is_initialized()
    return str(found.value)


def test_statistics_of_a_batch_in_micro_batches():
    assert refusal(vescale.Plan(dp=2, num_microbatches=2)) == (
        "parallelize: expected that Sequential treats every row alone, since 2 micro-batches on each of 2 ranks are "
        "parts of one batch, got batch_norm in module '1'; use Plan(num_microbatches=1), leave the loss of a router "
        "out (output_router_logits=False), or name modules that treat every row alone in row_wise=[...], or pass "
        "per_rank=True if every micro-batch on every rank may be a batch of its own"
    )


def test_a_contrast_in_the_loss():
    def contrast(output, target):
        return ((output @ output.t()) * target).sum()

    batch = {"input": torch.ones(8, WIDTH).double(), "target": torch.ones(8, 8).double()}
    model = build()[0]
    text = refusal(vescale.Plan(pp=2, num_microbatches=2), model=model, loss_fn=contrast, example_inputs=batch)
    assert "2 micro-batches are parts of one batch, got matmul in the root module" in text
    assert "use Plan(pp=1, num_microbatches=1)" in text


@pytest.mark.parametrize(
    "options", [{"per_rank": True}, {"row_wise": ["1"]}, {"example_inputs": None}, {"model": build().eval()}]
)
def test_what_may_be_right_gets_to_the_processes(options):
    assert "= 2 processes, got 1" in refusal(vescale.Plan(dp=2, num_microbatches=2), **options)


def test_one_batch_is_not_looked_at():
    assert "= 2 processes, got 1" in refusal(vescale.Plan(dp=2))


def late():
    model, _ = parallelize(vescale.Plan(num_microbatches=2), example_inputs=None)
    with pytest.raises(RuntimeError, match="expected that Sequential treats every row alone"):
        model(input=torch.ones(8, WIDTH).double())


def test_without_an_example_the_first_step_refuses():
    run_ranks(late, 1)
