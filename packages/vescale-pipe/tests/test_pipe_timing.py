"""Measured steps: their actions, what the simulator predicts from their costs, pictures, schedules made from them."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan, draw, simulate, to_trace
from vescale_testing import ranks, run_ranks

FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0.04, 0.06, 0.02  # seconds


class Sleeps(torch.autograd.Function):
    """The identity; the gradient of ``x`` and that of ``weight`` take time, and so does the forward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds[1])
        return gradient, None


class Block(nn.Module):
    """A layer whose actions take known times."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(4)), factor

    def forward(self, x):
        weight = Sleeps.apply(self.weight, (0.0, self.factor * WEIGHT_GRAD))
        return Sleeps.apply(x, (self.factor * FORWARD, self.factor * INPUT_GRAD)) * weight


def engine_for(mesh_of, plan, factors=None):
    num_stages = plan.actions(dist.get_world_size()).num_stages
    blocks = [Block(factor) for factor in factors or [1.0] * num_stages]
    return PipelineEngine(nn.Sequential(*blocks), mesh_of(), plan, loss_fn=torch.mean)


def measure(engine, num_steps=1):
    x = torch.ones(2 * engine.plan.num_microbatches, 4)
    with engine.timing() as timing:
        assert timing.steps == ()
        for _ in range(1 + num_steps):  # the first is recorded
            engine(x).backward()
    return timing


PLANS = [
    (3, PipelinePlan("1f1b", 4), None),
    (2, PipelinePlan("zb_h1", 4), (1.0, 2.0)),
    (2, PipelinePlan("zb_v", 4), None),
]


def steps_of(mesh_of, plan, factors):
    engine = engine_for(mesh_of, plan, factors)
    timing = measure(engine, 4)
    costs = timing.costs()
    return [(dict(step.starts), step.makespan, step.bubble) for step in timing.steps], costs, engine.schedule


@pytest.mark.parametrize(("world_size", "plan", "factors"), PLANS)
def test_steps_are_those_of_the_simulator(pipeline_mesh, world_size, plan, factors):
    """On stages that sleep, a step takes what the simulator predicts, within 5%, unless others use the processor."""
    of_ranks = run_ranks(steps_of, world_size, pipeline_mesh, plan, factors, timeout=100)
    (steps, costs, schedule), *others = of_ranks
    assert all(other == of_ranks[0] for other in others)
    expected = simulate(schedule, costs)
    assert len(steps) == 4
    assert all(starts.keys() == expected.starts.keys() for starts, _, _ in steps)
    nearest = min(steps, key=lambda step: abs(step[1] - expected.makespan))
    assert nearest[1] == pytest.approx(expected.makespan, rel=0.05)
    assert nearest[2] == pytest.approx(expected.bubble, abs=0.05)
    for stage, factor in enumerate(factors or [1.0] * schedule.num_stages):
        assert costs.forward[stage] == pytest.approx(factor * FORWARD, rel=0.3)
        backward = costs.input_grad[stage] + costs.weight_grad[stage]
        assert backward == pytest.approx(factor * (INPUT_GRAD * (stage > 0) + WEIGHT_GRAD), rel=0.3)
    assert costs.latency < FORWARD


@ranks(2)
def test_a_wait_is_no_work(pipeline_mesh):
    """The second stage is idle most of the time, beside a first one that takes ten times as long."""
    timing = measure(engine_for(pipeline_mesh, PipelinePlan("1f1b", 4), (2.0, 0.2)))
    first, second = timing.steps[-1].busy
    assert second < 0.3 * first
    assert timing.steps[-1].span_bubbles[1] > 0.5


@ranks(2)
def test_pictures_and_plans(pipeline_mesh, tmp_path):
    pytest.importorskip("matplotlib")
    timing = measure(engine_for(pipeline_mesh, PipelinePlan("zb_h1", 4)))
    step, picture, trace = timing.steps[0], *(tmp_path / f"{dist.get_rank()}.{kind}" for kind in ("svg", "json"))
    draw(step, picture)
    assert "time, s" in picture.read_text()
    to_trace(step, trace)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    found = {event["name"]: (event["pid"], event["ts"] / 1e6) for event in events}
    assert found == {str(action): (rank, pytest.approx(start)) for rank, action, start, _ in step.events}
    for function in (draw, to_trace):
        with pytest.raises(ValueError, match="expected no costs with a timeline, which has its own times"):
            function(step, picture, costs=timing.costs())
    assert PipelinePlan("auto", 4, costs=timing.costs()).actions(2).num_microbatches == 4


@ranks(2)
def test_steps_without_a_backward(pipeline_mesh):
    engine = engine_for(pipeline_mesh, PipelinePlan("1f1b", 4))
    with torch.no_grad(), engine.timing() as timing:
        for _ in range(2):
            engine(torch.ones(8, 4))
    assert {action.kind for action in timing.steps[0].starts} == {"F"}
    with pytest.raises(ValueError, match=r"measured steps with a backward, got 1 steps of \['F'\]; run at least two"):
        timing.costs()


@ranks(2)
def test_one_measurement_at_a_time(pipeline_mesh):
    engine = engine_for(pipeline_mesh, PipelinePlan("1f1b", 2))
    with engine.timing() as timing:
        with (
            pytest.raises(ValueError, match=r"expected one measurement at a time, got engine\.timing\(\) inside"),
            engine.timing(),
        ):
            pass
        engine(torch.ones(4, 4))
    assert timing.steps == ()  # it was recorded
    with pytest.raises(ValueError, match=r"got 0 steps of \[\]"):
        timing.costs()
    with pytest.raises(KeyError, match="of the user"), engine.timing() as timing:  # leaves nothing behind
        raise KeyError("of the user")
    engine(torch.ones(4, 4))


@ranks(1)
def test_one_stage(pipeline_mesh):
    timing = measure(engine_for(pipeline_mesh, PipelinePlan("1f1b", 3)))
    assert len(timing.steps) == 2
    assert timing.steps[-1].bubble < 0.1
