"""A context around forwards: autocast in stages, and backward outside of it, with the bits of one process."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks

AUTOCAST = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Noting(nn.Module):
    """Notes whether autocast is on in its forward and in its backward."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(6, 6), seen

    def forward(self, x):
        self.seen.append(("forward", torch.is_autocast_enabled("cpu"), self.linear(x).dtype))
        y = self.linear(x).float()
        if y.requires_grad:
            y.register_hook(lambda _grad: self.seen.append(("backward", torch.is_autocast_enabled("cpu"), None)))
        return x + y.tanh()


def build(seen):
    torch.manual_seed(0)
    return nn.Sequential(*(Noting(seen) for _ in range(4)))


def mean_square(output):
    return output.square().mean()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("context", [AUTOCAST, contextlib.nullcontext], ids=["autocast", "none"])
@ranks(2)
def test_stages_run_in_it(pipeline_mesh, context):
    seen, x = [], torch.randn(8, 6)
    one = build([])
    for rows in x.chunk(2):
        with AUTOCAST():
            loss = mean_square(one(rows)) / 2
        loss.backward()
    engine = PipelineEngine(
        build(seen), pipeline_mesh(), PipelinePlan("1f1b", 2), loss_fn=mean_square, forward_context=context
    )
    engine(x).backward()
    engine.model.zero_grad()
    engine(x).backward()
    is_on = context is AUTOCAST
    assert {each[:2] for each in seen} == {("forward", is_on), ("backward", False)}
    expected = gradients(one)
    found = gradients(engine.model)
    assert found
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items()) == is_on
    engine.outputs(x)
    assert seen[-1][:2] == ("forward", is_on)
    assert seen[-1][2] == (torch.bfloat16 if is_on else torch.float32)
