"""Code outside of stage modules may read buffers of other stages that are no part of the state dict, as BERT's does."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import ranks


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Embed(nn.Module):
    def __init__(self, *, writes):
        super().__init__()
        self.linear, self.inner, self.writes = nn.Linear(4, 6), Inner(), writes
        self.register_buffer("ids", torch.arange(32)[None], persistent=False)
        self.register_buffer("state", torch.ones(6))
        self.register_buffer("large", torch.zeros(1 << 19), persistent=False)

    def forward(self, x):
        if self.writes:
            self.inner.scale.add_(1)
        return self.inner(self.linear(x))


class Net(nn.Module):
    """The ids and the scale are read before and after the blocks, on all stages."""

    def __init__(self, *, writes=False, reads="scale"):
        super().__init__()
        self.embed, self.reads = Embed(writes=writes), reads
        self.blocks = nn.ModuleList(Inner() for _ in range(4))

    def forward(self, x):
        ids = self.embed.ids[:, : x.shape[1]] / 10
        h = self.embed(x + ids.to(x.dtype))
        for block in self.blocks:
            h = block(h) + ids.sum() * self.blocks[2].scale
            h = h if self.reads == "nothing" else h * self.embed.inner.scale
        if self.reads == "state":
            h = h * self.embed.state[None]
        if self.reads == "large":
            h = h + self.embed.large[0]
        return h.square().mean()


def build(**options):
    torch.manual_seed(0)
    return Net(**options), torch.randn(8, 4, dtype=torch.float64)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@ranks(2)
def test_training_is_that_of_one_process(schedule, train_one_process, pipeline_mesh, differences):
    model, x = build()
    reference = copy.deepcopy(model).double()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, 4))
    model.double()
    for number in range(3):  # a changed constant is one of the next step
        model.zero_grad()
        expected = train_one_process(reference, lambda model, x: model(x), {"x": x}, 4)
        loss = engine(x)
        loss.backward()
        assert torch.equal(loss.detach(), expected.losses[0])
        assert not differences(model, expected)
        new = torch.full((1, 32), number)
        for each in (model, reference):
            each.embed.ids = new if number else each.embed.ids + 1


@pytest.mark.parametrize("is_earlier", [False, True])
@ranks(2)
def test_a_write_is_refused(is_earlier, pipeline_mesh):
    """Also one of a step with other inputs, in which nothing reads the buffer elsewhere."""
    model, x = build(writes=True, reads="nothing" if is_earlier else "scale")
    engine = PipelineEngine(model.double(), pipeline_mesh(), PipelinePlan("1f1b", 1), per_microbatch=True)
    if is_earlier:
        engine(x)
        model.reads = "scale"
        if dist.get_rank() == 0:
            model.embed.writes = False
        x = x[:4]
    with pytest.raises((PipelineError, RuntimeError)) as caught:
        engine(x)
    text = "expected buffer `embed.inner.scale` to stay as it is, since code outside of stage modules reads it on other"
    assert text in str(caught.value) or dist.get_rank() == 1


@pytest.mark.parametrize("name", ["state", "large"])
@ranks(2)
def test_other_buffers_are_refused(name, pipeline_mesh):
    """Those of the state dict may change with training; a large one would fill the memory of all stages."""
    model, x = build(reads=name)
    engine = PipelineEngine(model.double(), pipeline_mesh(), PipelinePlan("1f1b", 4))
    with pytest.raises(
        PipelineError, match=rf"expected values of this stage, got `embed\.{name}`, which is on pipeline"
    ):
        engine(x)
