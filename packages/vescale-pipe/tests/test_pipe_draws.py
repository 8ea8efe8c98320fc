"""Positions of generators, and random operators on stages: those of a loop of gradient accumulation in one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale.pipe._run import draws
from vescale.pipe._run.generators import Distance, Generators, UnknownDistanceError
from vescale_testing import ranks

GENERATORS = Generators(torch.device("cpu"), None)


def moved_by(draw):
    before = GENERATORS.read()
    draw()
    after = GENERATORS.read()
    moved = GENERATORS.distance(before, after)
    assert GENERATORS.moved(before, moved) == after
    return moved


@pytest.mark.parametrize("count", [0, 1, 5, 618, 619, 620, 623, 624, 625, 1248, 10**5, 10**6])
def test_words_are_counted(count):
    torch.manual_seed(3)
    for before in (0, 5, 619):
        torch.empty(before, dtype=torch.int32).random_()
        assert moved_by(lambda: torch.empty(count, dtype=torch.int32).random_()) == Distance(words=count)


def test_draws_of_all_kinds_are_counted():
    x = torch.ones(40, 5)
    for draw in (
        lambda: F.dropout(x, 0.5),
        lambda: torch.randn(3, 17),
        lambda: torch.randperm(50),
        lambda: x.multinomial(2),
        lambda: torch.rand(7, dtype=torch.float64),
    ):
        assert moved_by(draw)


def test_positions_that_no_draw_leads_to():
    torch.manual_seed(3)
    with pytest.raises(UnknownDistanceError):
        moved_by(lambda: torch.manual_seed(4))
    torch.randn(100)
    with pytest.raises(UnknownDistanceError):
        moved_by(lambda: torch.randn(3))  # the second of a pair is left


def test_a_position_is_restored():
    start = GENERATORS.read()
    drawn = torch.rand(5)
    GENERATORS.write(start)
    assert torch.equal(torch.rand(5), drawn)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1 * n)) for n in range(1, 5))

    def forward(self, x):
        x = F.dropout(x, 0.1)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2)
        return x.square().mean()


def build():
    torch.manual_seed(0)
    return Net()


def call(model, x):
    return model(x)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def check_equal(plan, helpers, *, per_microbatch):
    train_one_process, pipeline_mesh, differences = helpers
    x, reference, model = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), build(), build()
    torch.manual_seed(5)
    expected = train_one_process(reference, call, {"x": x}, plan.num_microbatches, steps=3, make_optimizer=adam)
    following = torch.rand(3)
    engine = PipelineEngine(model, pipeline_mesh(), plan, per_microbatch=per_microbatch)
    optimizer, losses = adam(list(model.parameters())), []
    torch.manual_seed(5)
    for _ in range(3):
        model.zero_grad()
        loss = engine(x)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    assert torch.equal(torch.rand(3), following)
    assert all(map(torch.equal, losses, expected.losses))
    assert differences(model, expected) == {}


@pytest.fixture
def helpers(train_one_process, pipeline_mesh, differences, monkeypatch):
    monkeypatch.setattr(draws, "_package", lambda: None)  # what this package does alone
    return train_one_process, pipeline_mesh, differences


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v"])
@ranks(2)
def test_a_loop_of_gradient_accumulation(schedule, helpers):
    check_equal(PipelinePlan(schedule, 4), helpers, per_microbatch=True)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_one_micro_batch(num_ranks, helpers):
    ranks(num_ranks)(check_equal)(PipelinePlan("1f1b", 1), helpers, per_microbatch=False)


@ranks(2)
def test_draws_that_are_not_skipped_are_found(helpers, monkeypatch):
    monkeypatch.setattr(draws.Course, "skip", lambda *_: None)
    with pytest.raises((AssertionError, RuntimeError)):
        check_equal(PipelinePlan("1f1b", 4), helpers, per_microbatch=True)
