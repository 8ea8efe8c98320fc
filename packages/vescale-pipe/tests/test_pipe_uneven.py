"""Rows that do not divide into micro-batches: the loss and the gradients are those of the batch in one process."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import ranks


def build():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise((4, 8, 8, 8, 5))]
    return nn.Sequential(*parts).double()


def batch(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (num_rows,), generator=generator)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(x, target, loss_fn):
    """Return the loss and the gradients of the whole batch in one process."""
    model = build()
    loss = loss_fn(model(x), target)
    loss.backward()
    return loss.detach(), gradients(model)


def check(engine, x, target, loss_fn):
    expected, wanted = trained(x, target, loss_fn)
    engine.model.zero_grad()
    loss = engine(x, target=target)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-12)
    for name, gradient in gradients(engine.model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("gpipe", 3), ("1f1b", 4), ("zb_v", 3), ("zb_h1", 5)])
@ranks(2)
def test_a_step_is_that_of_the_batch(pipeline_mesh, schedule, num_microbatches):
    """Numbers of rows alternate, so a micro-batch's program is recorded in one step and used in others."""
    plan = PipelinePlan(schedule, num_microbatches)
    engine = PipelineEngine(build(), pipeline_mesh(), plan, loss_fn=cross_entropy)
    for step, num_rows in enumerate((7, 2 * num_microbatches, 7, 8, num_microbatches, 7, 11)):
        check(engine, *batch(num_rows, seed=step), cross_entropy)


@ranks(4)
def test_a_step_of_four_stages(pipeline_mesh):
    engine = PipelineEngine(build(), pipeline_mesh(), PipelinePlan("1f1b", 6), loss_fn=cross_entropy)
    for step, num_rows in enumerate((6, 11, 7, 12, 11)):
        check(engine, *batch(num_rows, seed=step), cross_entropy)


@ranks(1)
def test_a_step_of_one_stage(pipeline_mesh):
    engine = PipelineEngine(build(), pipeline_mesh(), PipelinePlan("1f1b", 4), loss_fn=cross_entropy)
    for num_rows in (6, 8, 7):
        check(engine, *batch(num_rows), cross_entropy)


@ranks(2)
def test_losses_and_outputs_have_all_rows(pipeline_mesh):
    x, target = batch(7)
    engine = PipelineEngine(build(), pipeline_mesh(), PipelinePlan("1f1b", 3), loss_fn=cross_entropy)
    engine(x, target=target)
    model = build()
    parts = zip(x.tensor_split(3), target.tensor_split(3), strict=True)
    assert torch.equal(engine.losses, torch.stack([cross_entropy(model(rows), own) for rows, own in parts]).detach())
    assert engine.losses.mean() != engine(x, target=target)  # it is a mean over rows
    outputs = engine.outputs(x)
    torch.testing.assert_close(outputs, model(x).detach(), rtol=0, atol=1e-12)


@ranks(2)
def test_micro_batches_of_their_own_count_alike(pipeline_mesh):
    """As in a loop of gradient accumulation, which divides each loss by the number of micro-batches."""
    x, target = batch(7)
    engine = PipelineEngine(
        build(), pipeline_mesh(), PipelinePlan("1f1b", 3), loss_fn=cross_entropy, per_microbatch=True
    )
    engine(x, target=target).backward()
    model = build()
    for rows, own in zip(x.tensor_split(3), target.tensor_split(3), strict=True):
        (cross_entropy(model(rows), own) / 3).backward()
    wanted = gradients(model)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(engine.model).items())


@ranks(2)
def test_too_few_rows_are_refused(pipeline_mesh):
    engine = PipelineEngine(build(), pipeline_mesh(), PipelinePlan("1f1b", 4), loss_fn=cross_entropy)
    x, target = batch(3)
    with pytest.raises(ValueError, match=r"input #0: expected a row for each of num_microbatches=4, got 3 \(shape"):
        engine(x, target=target)
    check(engine, *batch(5), cross_entropy)


@ranks(2)
def test_a_step_after_one_that_failed_to_record(pipeline_mesh):
    """The program of the smaller micro-batches is refused; that of the others stays."""

    class OfSomeSizes(nn.Module):
        def forward(self, x):
            if x.shape[0] == 2:
                raise ValueError("two rows")
            return x

    model = nn.Sequential(build(), OfSomeSizes()).double()
    plan = PipelinePlan("1f1b", 3, split=[["0.0", "0.1"], ["0.2", "0.3"]])
    engine = PipelineEngine(model, pipeline_mesh(), plan, loss_fn=mse_loss)
    x, _ = batch(9)
    target = torch.zeros(9, 5, dtype=torch.float64)
    engine(x, target=target)
    with pytest.raises((PipelineError, ValueError), match="two rows"):
        engine(x[:8], target=target[:8])
    engine(x, target=target).backward()
