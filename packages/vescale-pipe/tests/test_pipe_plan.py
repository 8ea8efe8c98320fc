"""A pipeline plan is data: frozen, comparable, JSON both ways; what it cannot mean is refused."""

import dataclasses
import json

import pytest

from vescale.pipe import (
    Costs,
    PipelinePlan,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    lower,
    one_f_one_b,
    search_schedule,
    simulate,
    zb_h1,
    zb_v,
)


@pytest.mark.parametrize("split", ["uniform", ["layers.2"], [["embed", "layers.0"], ["layers.1", "head"]]])
def test_json_round_trip(split):
    plan = PipelinePlan(schedule="gpipe", num_microbatches=4, split=split)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert json.loads(json.dumps(dataclasses.asdict(plan))) == json.loads(plan.to_json())
    assert PipelinePlan.from_json(plan.to_json()) != dataclasses.replace(plan, num_microbatches=5)
    assert hash(plan) == hash(PipelinePlan.from_json(plan.to_json()))


def test_plan_gives_its_schedule():
    assert PipelinePlan("1f1b", 8).actions(4) == one_f_one_b(4, 8)
    assert PipelinePlan("gpipe", 8).actions(4) == gpipe(4, 8)
    assert PipelinePlan("zb_h1", 8).actions(4) == zb_h1(4, 8)
    assert PipelinePlan("zb_v", 8).actions(4) == PipelinePlan("zb_v", 8, stages_per_rank=2).actions(4) == zb_v(4, 8)
    assert PipelinePlan("interleaved_1f1b", 8).actions(4) == interleaved_1f1b(4, 8, 2)
    assert PipelinePlan("looped_bfs", 8, stages_per_rank=3).actions(4) == looped_bfs(4, 8, 3)


def test_a_given_schedule():
    schedule = search_schedule(2, 4, stages_per_rank=2, effort=1000)
    plan = PipelinePlan(schedule, 4)
    assert plan.actions(2) == PipelinePlan(lower(schedule), 4).actions(2) == schedule
    assert PipelinePlan.from_json(plan.to_json()) == PipelinePlan(str(schedule), 4) == plan
    assert PipelinePlan.from_json(plan.to_json()) != PipelinePlan("gpipe", 4)
    assert hash(plan) == hash(PipelinePlan.from_json(plan.to_json()))


def test_the_best_schedule_for_given_costs():
    """The search runs when the number of ranks is known, and every rank finds the same."""
    costs = Costs([1, 1, 1, 2.5], 1.2, 0.8, latency=0.05)
    plan = PipelinePlan("auto", 6, costs=costs, activations=5)
    assert hash(plan) == hash(PipelinePlan.from_json(plan.to_json()))
    assert PipelinePlan.from_json(plan.to_json()) == plan != dataclasses.replace(plan, costs=None)
    found = plan.actions(4)
    assert (
        found == PipelinePlan.from_json(plan.to_json()).actions(4) == search_schedule(4, 6, costs=costs, activations=5)
    )
    assert simulate(found, costs).makespan < min(simulate(build(4, 6), costs).makespan for build in (zb_h1, gpipe))
    assert max(simulate(found, costs).peak_activations) <= 5
    folded = PipelinePlan("auto", 2, stages_per_rank=2, placement="V").actions(2)
    assert [rank for stage in range(4) for rank, action in folded if str(action) == f"{stage}F0"] == [0, 1, 1, 0]
    with pytest.raises(ValueError, match=r"expected a number for each of 3 stages as costs.forward, got 4"):
        plan.actions(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelinePlan("1f1b", placement="V"), "expected placement=None, since only schedule='auto' takes it, "),
        (
            lambda: PipelinePlan("zb_h1", costs=Costs()),
            "expected costs=None, since only schedule='auto' takes it, got C",
        ),
        (
            lambda: PipelinePlan("gpipe", activations=2),
            "expected activations=None, since only schedule='auto' takes it",
        ),
        (lambda: PipelinePlan("auto", placement="U"), "expected 'loop' or 'V' for placement, got 'U'"),
        (lambda: PipelinePlan("auto", activations=-1), "expected a number of 0 or more for activations, got -1"),
        (
            lambda: PipelinePlan("auto", costs=[1, 2]),
            r"expected Costs for costs, got \[1, 2\]; pass vescale.pipe.Costs",
        ),
        (lambda: PipelinePlan(gpipe(2, 4), 2), "expected num_microbatches=4, as in the given schedule, got 2"),
        (lambda: PipelinePlan(gpipe(2, 4), 4).actions(3), "expected a schedule of 3 ranks, .* got one of 2"),
        (lambda: PipelinePlan("zb_v", 2, stages_per_rank=3), "expected stages_per_rank=None for 'zb_v', .* got 3; cho"),
        (lambda: PipelinePlan("1f1b", 2, stages_per_rank=2), "expected stages_per_rank=None for '1f1b', .* got 2; cho"),
        (lambda: PipelinePlan(gpipe(2, 4), 4, stages_per_rank=1), "expected stages_per_rank=None for a given schedule"),
        (lambda: PipelinePlan("looped_bfs", stages_per_rank=0), "expected an integer >= 1 for stages_per_rank, got 0"),
        (lambda: PipelinePlan("0F0 forward"), "expected an action like '2F0'"),
    ],
)
def test_numbers_that_do_not_fit_the_schedule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_invalid_schedule():
    with pytest.raises(ScheduleError):
        PipelinePlan(Schedule.parse("0F0 0B0; 1B0 1F0"), 1).actions(2)


def test_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelinePlan().num_microbatches = 2


def test_unknown_schedule():
    with pytest.raises(ValueError, match=r"expected one of '1f1b', 'gpipe', .* or a Schedule for schedule, got 'zbv'"):
        PipelinePlan(schedule="zbv")


@pytest.mark.parametrize("count", [0, -1, 2.0, "4", True])
def test_bad_number_of_microbatches(count):
    with pytest.raises(ValueError, match="expected an integer >= 1 for num_microbatches, got"):
        PipelinePlan(num_microbatches=count)


def test_a_name_alone_is_not_a_split():
    with pytest.raises(ValueError, match=r"for two stages write split=\['layers.2'\]"):
        PipelinePlan(split="layers.2")


@pytest.mark.parametrize("split", [3, [1, 2], [["a"], "b"], [[1]]])
def test_other_forms_of_split(split):
    with pytest.raises(ValueError, match="expected split 'uniform', a list of the modules that begin stages"):
        PipelinePlan(split=split)
