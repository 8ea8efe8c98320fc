"""Code outside of stage modules may read plain attributes of other stages, which stay as they are; None is one, too."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import halved, ranks


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)
        self.gain = 0.5


class Block(nn.Module):
    """Its attributes have names that a stub could need itself; a part may be None, as the last `down` of a Swin is."""

    def __init__(self, *, down, changes):
        super().__init__()
        self.inner, self.changes = Inner(), changes
        self.down = nn.Linear(6, 6) if down else None
        self.register_buffer("offset", None)
        self.scale, self.stage, self.fqn, self.constants, self.cache = 2.0, 3, 7, 0.25, None

    def forward(self, x):
        if self.changes == "scale":
            self.scale *= 2
        elif self.changes == "cache":
            self.cache = x.detach()
        elif self.changes == "gain":
            self.inner.gain = self.inner.gain + 1
        h = torch.tanh(self.inner.linear(x))
        return h if self.down is None else self.down(h)


class Net(nn.Module):
    """Reads the attributes of all blocks after each."""

    def __init__(self, changes="nothing"):
        super().__init__()
        self.blocks = nn.ModuleList(Block(down=number != 3, changes=changes) for number in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            for other in self.blocks:
                shift = 0 if other.down is None else 1
                shift += other.stage + other.fqn + other.constants + other.inner.gain
                shift += (other.offset is None) + (other.inner.linear.bias is None)
                x = x * other.scale + shift
                x = x if other.cache is None else x + 1
        return x.square().mean()


def build(**options):
    torch.manual_seed(0)
    return Net(**options).double(), torch.randn(8, 6, dtype=torch.float64)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@ranks(2)
def test_training_is_that_of_one_process(schedule, train_one_process, pipeline_mesh, differences):
    model, x = build()
    reference = copy.deepcopy(model)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, 4))
    for number in range(5):  # recorded, run, taken down, run from the tape
        if number == 3:
            for each in (model, reference):  # set on all ranks
                each.blocks[0].scale, each.blocks[3].scale, each.blocks[2].inner.gain = 1.5, 1, 0.125
        model.zero_grad()
        expected = train_one_process(reference, lambda model, x: model(x), {"x": x}, 4)
        loss = engine(x)
        loss.backward()
        assert torch.equal(loss.detach(), expected.losses[0]), number
        assert not differences(model, expected)


@halved
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ("scale", r"attribute `blocks\.\d\.scale` .* got \d+\.0 in place of 2\.0"),
        ("cache", r"expected the same program on every stage"),  # it decides what runs
        ("gain", r"attribute `blocks\.\d\.inner\.gain` .* got 1\.5 in place of 0\.5"),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@ranks(2)
def test_a_change_in_a_forward_is_refused(changes, what, schedule, pipeline_mesh):
    model, x = build(changes=changes)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, 1), per_microbatch=True)

    def two_steps():
        engine(x)
        engine(x)

    with pytest.raises((PipelineError, RuntimeError), match=f"(?s){what}"):
        two_steps()


@ranks(2)
def test_a_change_of_an_earlier_step_is_refused(pipeline_mesh):
    """In a step with other inputs, of which nothing is read elsewhere."""
    model, x = build()
    forward, model.forward = model.forward, lambda x: model.blocks[3](model.blocks[0](x)).square().mean()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 1, ["blocks.2"]), per_microbatch=True)
    model.blocks[0].changes = "scale"
    engine(x)
    model.blocks[0].changes, model.forward = "nothing", forward
    with pytest.raises((PipelineError, RuntimeError), match=r"attribute `blocks\.0\.scale` to stay as it is"):
        engine(x[:4])


@ranks(2)
def test_a_change_of_what_nobody_reads_is_fine(pipeline_mesh):
    model, x = build(changes="scale")
    model.forward = lambda x: model.blocks[3](model.blocks[2](model.blocks[1](model.blocks[0](x)))).square().mean()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    for _ in range(3):
        engine(x)
    assert model.blocks[2 * dist.get_rank()].scale > 4
