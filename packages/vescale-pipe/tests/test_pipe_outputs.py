"""Outputs of the model for a whole batch: evaluation and predictions."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import RankFailure, ranks, run_ranks


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
    loss: torch.Tensor


class Net(nn.Module):
    def __init__(self, num_stages=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_stages))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, x, scale=1.0):
        h = x
        for block in self.blocks:
            h = h + torch.tanh(block(h)) * scale
        logits = self.head(self.drop(h))
        return Output(logits, h, logits.square().mean())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def logits_of(output):
    return output.logits


def build():
    torch.manual_seed(0)
    return Net().double()


PLANS = [
    (1, PipelinePlan("1f1b", 3)),
    (2, PipelinePlan("1f1b", 4)),
    (2, PipelinePlan("zb_v", 3)),
    (3, PipelinePlan("gpipe", 2)),
    (4, PipelinePlan("1f1b", 1)),
]


def predict(mesh_of, plan):
    model, x = build(), torch.randn(12, 6, dtype=torch.float64)
    one = copy.deepcopy(model).eval()
    engine = PipelineEngine(model.eval(), mesh_of(), plan)
    for scale in (1.0, 1.0, 1.0, 0.5):
        found = engine.outputs(x, select=logits_of, scale=scale)
        parts = [one(rows, scale=scale).logits for rows in x.chunk(plan.num_microbatches)]
        assert not found.requires_grad
        assert torch.equal(found, torch.cat(parts).detach())
    # a kernel may add in another order for another number of rows
    torch.testing.assert_close(engine.outputs(x, select=logits_of), one(x).logits.detach(), rtol=1e-12, atol=1e-12)
    classes = engine.outputs(x, select=lambda output: output.logits.argmax(-1))
    assert classes.dtype == torch.int64
    assert torch.equal(classes, one(x).logits.argmax(-1))
    assert not torch.equal(classes, one(x.flip(0)).logits.argmax(-1))


@pytest.mark.parametrize(("world_size", "plan"), PLANS)
def test_predictions_are_those_of_one_process(pipeline_mesh, world_size, plan):
    """On every stage, with several selections and arguments."""
    run_ranks(predict, world_size, pipeline_mesh, plan, timeout=60)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@ranks(2)
def test_between_steps_of_training(pipeline_mesh, schedule, train_one_process, differences):
    """A forward leaves nothing behind, and sees the parameters of the last step."""
    model, x = build(), torch.randn(8, 6, dtype=torch.float64)
    model.drop.p = 0.0
    one = copy.deepcopy(model)
    expected = train_one_process(one, lambda model, x: model(x).loss, {"x": x}, 4, steps=3, make_optimizer=sgd)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, 4))
    optimizer = sgd(model.parameters())
    before = engine.outputs(x, select=logits_of)
    for step in range(3):
        optimizer.zero_grad()
        loss = engine(x)
        loss.backward()
        assert torch.equal(loss.detach(), expected.losses[step])
        if step < 2:
            optimizer.step()
            assert torch.equal(engine.outputs(x, select=logits_of), engine.outputs(x, select=logits_of))
    assert not differences(model, expected)
    assert not torch.equal(engine.outputs(x, select=logits_of), before)


@ranks(2)
def test_dropout_in_training_mode(pipeline_mesh):
    """A call of its own for each micro-batch draws as a loop does."""
    model, x = build(), torch.randn(8, 6, dtype=torch.float64)
    one = copy.deepcopy(model)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2), per_microbatch=True)
    for _ in range(2):
        torch.manual_seed(3)
        found = engine.outputs(x, select=logits_of)
        torch.manual_seed(3)
        expected = [one(rows).logits for rows in x.chunk(2)]
        assert torch.equal(found, torch.cat(expected).detach())


@ranks(2)
def test_what_is_refused(pipeline_mesh):
    engine = PipelineEngine(build().eval(), pipeline_mesh(), PipelinePlan("1f1b", 2))
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises((TypeError, PipelineError), match=r"expected a tensor in the model's output, got Output; pass "):
        engine.outputs(x)
    with pytest.raises(
        (ValueError, PipelineError), match=r"expected an output of 2 rows .* got a tensor of shape \[\];"
    ):
        engine.outputs(x, select=lambda output: output.loss)
    with pytest.raises(
        (ValueError, PipelineError), match=r"expected an output of 2 rows .* got a tensor of shape \[3, 2\]"
    ):
        engine.outputs(x, select=lambda output: output.logits.t())
    with pytest.raises(TypeError, match=r"PipelineEngine\.outputs: expected .* for select, got 3"):
        engine.outputs(x, select=3)
    assert engine(x).dim() == 0


@ranks(2)
def test_functions_of_one_place(pipeline_mesh):
    """A function that is gone may have had the identity of the next one."""
    model, x = build().eval(), torch.randn(8, 6, dtype=torch.float64)
    one = torch.cat([copy.deepcopy(model)(rows).logits for rows in x.chunk(4)])
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 4))
    for _ in range(4):
        found = [engine.outputs(x, select=eval(f"lambda output: output.logits * {factor}")) for factor in (1, 2)]
        assert torch.equal(found[0], one)
        assert torch.equal(found[1], 2 * one)


class Early(nn.Module):
    """Returns what its first module computes, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.first(x)
        return h, self.last(h)


def select_another(mesh_of):
    """The number of columns is not that of the recorded selection."""
    engine = PipelineEngine(build().eval(), mesh_of(), PipelinePlan("1f1b", 2))
    x = torch.randn(4, 6, dtype=torch.float64)
    for width in (3, 2):
        engine.outputs(x, select=lambda output, width=width: output.logits[:, :width])


def test_selections(pipeline_mesh):
    with pytest.raises(
        RankFailure, match=r"expected a result of shape \[4, 3\] and dtype .*, as recorded, got \[4, 2\]"
    ):
        run_ranks(select_another, 2, pipeline_mesh, timeout=60)


@ranks(2)
def test_a_value_of_an_early_stage(pipeline_mesh):
    engine = PipelineEngine(Early(), pipeline_mesh(), PipelinePlan("1f1b", 2, split=["last"]))
    x = torch.randn(4, 6)
    with pytest.raises(
        PipelineError, match=r"expected a result of the last stage 1, got output 0 of `(first|mean)` \(stage 0\)"
    ):
        engine.outputs(x, select=lambda output: output[0])
    assert engine.outputs(x, select=lambda output: output[1]).shape == (4, 6)
