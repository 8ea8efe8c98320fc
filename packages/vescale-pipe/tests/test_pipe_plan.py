"""A pipeline plan is data: frozen, comparable, JSON both ways; what it cannot mean is refused."""

import dataclasses
import json

import pytest

from vescale.pipe import PipelinePlan, gpipe, one_f_one_b


@pytest.mark.parametrize("split", ["uniform", ["layers.2"], [["embed", "layers.0"], ["layers.1", "head"]]])
def test_json_round_trip(split):
    plan = PipelinePlan(schedule="gpipe", num_microbatches=4, split=split)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert json.loads(json.dumps(dataclasses.asdict(plan))) == json.loads(plan.to_json())
    assert hash(plan) == hash(PipelinePlan.from_json(plan.to_json()))


def test_plan_gives_its_schedule():
    assert PipelinePlan("1f1b", 8).actions(4) == one_f_one_b(4, 8)
    assert PipelinePlan("gpipe", 8).actions(4) == gpipe(4, 8)


def test_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelinePlan().num_microbatches = 2


def test_unknown_schedule():
    with pytest.raises(ValueError, match="expected one of '1f1b', 'gpipe' for schedule, got 'zbv'"):
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
