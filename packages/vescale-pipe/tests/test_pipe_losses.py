"""A step gives the loss of every micro-batch, as the loss function gave it, on every stage."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import halved, ranks

NUM_MICROBATCHES = 3


def build():
    torch.manual_seed(0)
    widths = (4, 8, 8, 8, 5)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def losses_of(model, loss_fn, x, target):
    """Return what one process computes: each micro-batch on its own."""
    parts = zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
    return torch.stack([loss_fn(model(rows), wanted) for rows, wanted in parts]).detach()


@halved
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@ranks(2)
def test_losses_are_those_of_one_process(pipeline_mesh, schedule, reduction):
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    engine = PipelineEngine(build(), pipeline_mesh(), PipelinePlan(schedule, NUM_MICROBATCHES), loss_fn=loss_fn)
    assert engine.losses is None
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x, target = torch.randn(6, 4, generator=generator), torch.randint(5, (6,), generator=generator)
        expected = losses_of(build(), loss_fn, x, target)
        loss = engine(x, target=target)
        assert torch.equal(engine.losses, expected)
        assert not torch.equal(engine.losses, expected.flip(0))
        assert not engine.losses.requires_grad
        if reduction == "mean":
            torch.testing.assert_close(loss.detach(), expected.mean())


@ranks(1)
def test_one_stage_gives_them_as_well(pipeline_mesh):
    plan = PipelinePlan("1f1b", NUM_MICROBATCHES)
    x, target = torch.randn(6, 4), torch.randint(5, (6,))
    engine = PipelineEngine(build(), pipeline_mesh(), plan, loss_fn=nn.CrossEntropyLoss())
    with torch.no_grad():
        engine(x, target=target)
    assert torch.equal(engine.losses, losses_of(build(), nn.CrossEntropyLoss(), x, target))


@pytest.mark.parametrize("num_targets", [6, 3])
@ranks(2)
def test_ignored_targets_change_no_loss(pipeline_mesh, num_targets):
    """Whether numbers of targets differ travels beside the losses."""
    x, target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5
    target.view(NUM_MICROBATCHES, 2)[:, : 2 - num_targets // NUM_MICROBATCHES] = -100
    loss_fn = nn.CrossEntropyLoss()
    engine = PipelineEngine(build(), pipeline_mesh(), PipelinePlan("1f1b", NUM_MICROBATCHES), loss_fn=loss_fn)
    engine(x, target=target)
    assert torch.equal(engine.losses, losses_of(build(), loss_fn, x, target))
