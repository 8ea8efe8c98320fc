"""Every schedule, number of stages and number of micro-batches gives the gradients of one process, bit for bit."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan, one_f_one_b, simulate
from vescale_testing import ranks

STAGES_AND_MICROBATCHES = [(2, 1), (2, 3), (2, 8), (3, 2), (3, 4), (4, 1), (4, 5), (4, 8)]


class Residual(nn.Module):
    """Blocks with the residual additions between them, in the container."""

    def __init__(self, num_blocks=5):
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_blocks))
        self.head = nn.Linear(6, 2)

    def forward(self, x, target):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - target).square().mean()


def build():
    torch.manual_seed(0)
    return Residual().double()


def data(rows):
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (rows, 3), "target": (rows, 2)}
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def loss_of(model, **batch):
    return model(**batch)


def check_equal(num_microbatches, schedule, helpers):
    train_one_process, pipeline_mesh, differences = helpers
    batch = data(2 * num_microbatches)
    expected = train_one_process(build(), loss_of, batch, num_microbatches)
    model = build()
    loss = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, num_microbatches))(**batch)
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}


@pytest.fixture
def helpers(train_one_process, pipeline_mesh, differences):
    return train_one_process, pipeline_mesh, differences


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages, num_microbatches", STAGES_AND_MICROBATCHES)
def test_equal_to_one_process(num_stages, num_microbatches, schedule, helpers):
    ranks(num_stages)(check_equal)(num_microbatches, schedule, helpers)


class Changing:
    """A receive whose values are changed when they have come."""

    def __init__(self, work, change):
        self.work, self.change = work, change

    def wait(self):
        self.work.wait()
        self.change()


def change_received(monkeypatch, change, *, later_stage):
    """Change the float64 values of two rows that this rank receives from one side."""
    receive = dist.irecv

    def receive_changed(buffer, source, **kwargs):
        work = receive(buffer, source, **kwargs)
        if (source > dist.get_rank()) == later_stage and buffer.nbytes == 2 * 6 * 8:
            return Changing(work, lambda: change(buffer.view(torch.float64)))
        return work

    monkeypatch.setattr(dist, "irecv", receive_changed)


@ranks(2)
def test_a_wrong_gradient_on_the_wire_is_seen(helpers, monkeypatch):
    """The sibling that breaks it: gradients received from later stages are doubled."""
    train_one_process, pipeline_mesh, differences = helpers
    change_received(monkeypatch, lambda values: values.mul_(2), later_stage=True)
    batch = data(4)
    expected = train_one_process(build(), loss_of, batch, 2)
    model = build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    engine(**batch).backward()
    assert bool(differences(model, expected)) == (engine.stage == 0)


@ranks(2)
def test_a_wrong_value_on_the_wire_is_seen(helpers, monkeypatch):
    """The sibling that breaks it: values received from earlier stages are zero."""
    train_one_process, pipeline_mesh, differences = helpers
    change_received(monkeypatch, torch.Tensor.zero_, later_stage=False)
    batch = data(4)
    expected = train_one_process(build(), loss_of, batch, 2)
    model = build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    loss = engine(**batch)
    loss.backward()
    assert not torch.equal(loss, expected.losses[0])
    assert differences(model, expected)


class Watched(nn.Module):
    """A block that counts how many of its outputs are alive."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.alive = weakref.WeakSet()
        self.peak = 0

    def forward(self, x):
        marker = nn.Identity()  # kept by the graph of the output, and so by the micro-batch's activations
        output = Marked.apply(self.linear(x), marker)
        self.alive.add(marker)
        self.peak = max(self.peak, len(self.alive))
        return output


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        del ctx.marker
        return gradient, None


@ranks(3)
def test_activations_live_from_forward_to_backward(pipeline_mesh):
    model = nn.Sequential(Watched(), Watched(), Watched())
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 8), loss_fn=torch.mean)
    engine(torch.randn(8, 6))
    mine = model[engine.stage]
    assert mine.peak == simulate(one_f_one_b(3, 8)).peak_activations[engine.stage] == 3 - engine.stage
    assert len(mine.alive) == 0
