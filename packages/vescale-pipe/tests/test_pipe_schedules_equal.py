"""Every schedule, number of stages and number of micro-batches gives the gradients of one process, bit for bit."""

import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan, simulate
from vescale_testing import halved, ranks

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


@halved
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

    def receive_changed(buffer, *, group, group_src):
        work = receive(buffer, group=group, group_src=group_src)
        source = dist.get_global_rank(group, group_src)
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
    """A block that counts how many tensors all blocks of its rank keep for the gradients of weights."""

    kept: ClassVar[list[weakref.ref]] = []
    peak = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = x * 1.0
        Watched.kept.append(weakref.ref(x))
        Watched.peak = max(Watched.peak, Watched.num_alive())
        return self.linear(x)

    @staticmethod
    def num_alive():
        return sum(reference() is not None for reference in Watched.kept)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved_1f1b", "zb_v", "dual_pipe_v"])
@ranks(2)
def test_activations_live_from_forward_to_the_last_gradient(name, pipeline_mesh):
    plan = PipelinePlan(name, 8)
    schedule = plan.actions(2)
    blocks = [Watched() for _ in range(schedule.num_stages)]
    engine = PipelineEngine(nn.Sequential(*blocks), pipeline_mesh(), plan, loss_fn=torch.mean)
    engine(torch.randn(8, 6))
    Watched.peak = 0
    engine(torch.randn(8, 6))
    expected = simulate(schedule).peak_activations[engine._placement.rank]
    assert Watched.peak == expected * (schedule.num_stages // 2)
    assert Watched.num_alive() == 0
