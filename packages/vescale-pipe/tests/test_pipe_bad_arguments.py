"""A wrong argument is named where it was given: expected, got."""

import re

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.pipe import PipelineEngine, PipelinePlan, from_csv, gpipe, one_f_one_b, simulate, split_units, validate
from vescale_testing import ranks

MODEL, PLAN = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), PipelinePlan()

ROWS = {
    "gpipe": (lambda: gpipe("a", 2), "gpipe: expected int for num_stages, got 'a'"),
    "gpipe, True": (lambda: gpipe(True, 2), "gpipe: expected int for num_stages, got True"),
    "1f1b": (lambda: one_f_one_b(2, 2.5), "one_f_one_b: expected int for num_microbatches, got 2.5"),
    "gpipe, -1": (lambda: gpipe(2, -1), "num_microbatches >= 1, got num_stages=2, num_microbatches=-1"),
    "actions": (lambda: PLAN.actions(None), "expected int for num_stages, got None"),
    "schedule": (lambda: PipelinePlan(schedule=[]), "expected one of '1f1b', 'gpipe' for schedule, got []"),
    "split": (lambda: PipelinePlan(split=None), "expected split 'uniform', a list of the modules"),
    "units, model": (lambda: split_units(None, PLAN, 2), "split_units: expected Module for model, got None"),
    "units, plan": (lambda: split_units(MODEL, None, 2), "split_units: expected PipelinePlan for plan, got None"),
    "units, stages": (lambda: split_units(MODEL, PLAN, "a"), "split_units: expected int for num_stages, got 'a'"),
    "units, no stage": (
        lambda: split_units(MODEL, PLAN, 0),
        "expected at least one pipeline stage, got num_stages = 0",
    ),
    "validate": (lambda: validate(None), "validate: expected Schedule for schedule, got None"),
    "simulate": (lambda: simulate(3), "simulate: expected Schedule for schedule, got 3"),
    "from_csv": (lambda: from_csv(3), "from_csv: expected str or Path for path, got 3"),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


@ranks(1)
def test_the_engine_refuses(pipeline_mesh):
    mesh = pipeline_mesh()
    assert isinstance(mesh, DeviceMesh)
    rows = [
        ((None, mesh, PLAN), {}, "expected Module for model, got None"),
        ((MODEL, None, PLAN), {}, "expected DeviceMesh for axis, got None"),
        ((MODEL, mesh, {"schedule": "gpipe"}), {}, "expected PipelinePlan for plan, got {"),
        ((MODEL, mesh, PLAN), {"loss_fn": 3}, "expected Callable or None for loss_fn, got 3"),
        ((MODEL, mesh, PLAN), {"timeout": 3}, "expected timedelta or None for timeout, got 3"),
    ]
    for args, kwargs, message in rows:
        with pytest.raises(TypeError, match=re.escape(f"PipelineEngine: {message}")):
            PipelineEngine(*args, **kwargs)
