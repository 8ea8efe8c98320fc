"""A bad argument is named where it was given: what was expected, what came, and what to pass."""

import contextlib
import dataclasses
import inspect
import re
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vescale.pipe as public
from vescale.pipe import (
    Action,
    Costs,
    PipelineEngine,
    PipelinePlan,
    Schedule,
    from_csv,
    gpipe,
    one_f_one_b,
    simulate,
    split_units,
    validate,
)
from vescale_testing import ranks, run_ranks
from vescale_testing.bad_arguments import Call, check_calls, check_table

MODEL, PLAN = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), PipelinePlan()
EXAMPLE = {"input": torch.ones(2, 2)}
ANY_EXAMPLE = {
    "None",
    "()",
    "[]",
    "[None]",
    "[0]",
    "[text]",
    "{}",
    "{text: 0}",
    "another key",
}  # arguments of any module

ROWS = {
    "gpipe, too many": (lambda: gpipe(2, 10**9), "expected num_stages x num_microbatches of at most 8388608, got num_"),
    "gpipe": (lambda: gpipe("a", 2), "gpipe: expected int for num_stages, got 'a'"),
    "gpipe, True": (lambda: gpipe(True, 2), "gpipe: expected int for num_stages, got True"),
    "1f1b": (lambda: one_f_one_b(2, 2.5), "one_f_one_b: expected int for num_microbatches, got 2.5"),
    "gpipe, -1": (lambda: gpipe(2, -1), "gpipe: expected an integer of 1 or more for num_microbatches, got -1"),
    "actions": (lambda: PLAN.actions(None), "PipelinePlan.actions: expected int for num_ranks, got None"),
    "schedule": (lambda: PipelinePlan(schedule=[]), "or a Schedule for schedule, got []"),
    "split": (lambda: PipelinePlan(split=None), "expected split 'uniform', a list of the modules"),
    "units, model": (lambda: split_units(None, PLAN, 2), "split_units: expected Module for model, got None"),
    "units, plan": (lambda: split_units(MODEL, None, 2), "split_units: expected PipelinePlan for plan, got None"),
    "units, stages": (lambda: split_units(MODEL, PLAN, "a"), "split_units: expected int for num_stages, got 'a'"),
    "units, no stage": (
        lambda: split_units(MODEL, PLAN, 0),
        "split_units: expected an integer of 1 or more for num_stages, got 0",
    ),
    "validate": (lambda: validate(None), "validate: expected Schedule for schedule, got None"),
    "simulate": (lambda: simulate(3), "simulate: expected Schedule for schedule, got 3"),
    "from_csv": (lambda: from_csv(3), "from_csv: expected str or PathLike for path, got 3"),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


RESULTS = ("Simulation", "StageSplit", "Stub", "Timeline", "Timing", "Transfer")  # which users do not construct
TEXTS = {"no text", "text", "misspelled"}
PATHS = {"text", "misspelled"}
NUMBERS = {"0", "0.5", "huge"}
PER_STAGE = ("forward", "input_grad", "weight_grad", "activations", "unshard", "reduce_grad", "message", "parameters")
LOOPED = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")


def calls():
    """Return the public calls."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    schedule = gpipe(2, 2)
    sizes = {"num_stages": 2, "num_microbatches": 2}
    of_ranks = {"num_ranks": 2, "num_microbatches": 2}
    return {
        "Action": Call(
            Action, lambda: {"stage": 0, "kind": "F", "microbatch": 0}, {"stage": {"True"}, "microbatch": {"True"}}
        ),
        "Action.parse": Call(Action.parse, lambda: {"text": "0F0"}),
        "Costs": Call(
            Costs,
            lambda: dict.fromkeys(PER_STAGE, 1.0) | {"input_grad": (1.0, 2.0), "latency": 0.0, "overlap": 0.0},
            dict.fromkeys(PER_STAGE, NUMBERS | {"()", "[]", "[0]"})
            | {
                "input_grad": NUMBERS | {"()", "[]", "[0]", "longer", "shorter"},
                "latency": NUMBERS,
                "overlap": {"0", "0.5"},
            },
        ),
        "Overlap": Call(public.Overlap, lambda: {"forward": Action(0, "F", 1), "backward": Action(1, "B", 0)}),
        "PipelinePlan": Call(
            PipelinePlan,
            lambda: {
                "schedule": "auto",
                "num_microbatches": 2,
                "split": (("a",), ("b",)),
                "stages_per_rank": 2,
                "placement": "V",
                "costs": Costs(),
                "activations": 2.5,
            },
            {
                "split": {"()", "[]", "[text]", "longer", "shorter"},
                **{name: {"None"} for name in ("stages_per_rank", "placement", "costs")},
                "activations": {"None", "0", "0.5", "huge"},
            },
        ),
        "PipelinePlan.actions": Call(PLAN.actions, lambda: {"num_ranks": 2}),
        "PipelinePlan.from_json": Call(PipelinePlan.from_json, lambda: {"text": PLAN.to_json()}),
        "Schedule": Call(
            Schedule,
            lambda: sizes | {"ranks": schedule.ranks},
            {"num_stages": {"0"}, "num_microbatches": {"0"}, "ranks": {"()", "[]", "longer", "shorter"}},
        ),
        "Schedule.parse": Call(
            Schedule.parse,
            lambda: sizes | {"text": str(schedule)},
            {
                "num_stages": {"None", "0"},
                "num_microbatches": {"None", "0"},
                "text": {"no text", "()", "[]", "{}", "iterator"},
            },
        ),
        "Schedule.of": Call(
            Schedule.of,
            lambda: sizes | {"ranks": schedule.ranks},
            {
                "num_stages": {"None", "0"},
                "num_microbatches": {"None", "0"},
                "ranks": {"()", "[]", "longer", "shorter"},
            },
        ),
        "gpipe": Call(gpipe, lambda: sizes),
        "one_f_one_b": Call(one_f_one_b, lambda: sizes),
        **{name: Call(getattr(public, name), lambda: of_ranks) for name in ("zb_h1", "zb_h2", "zb_v", "dual_pipe_v")},
        **{name: Call(getattr(public, name), lambda: of_ranks | {"stages_per_rank": 2}) for name in LOOPED},
        **{
            name: Call(getattr(public, name), lambda: of_ranks | {"costs": Costs(), "effort": 100}, {"costs": {"None"}})
            for name in ("v_half", "v_min")
        },
        "search_schedule": Call(
            public.search_schedule,
            lambda: (
                of_ranks | {"stages_per_rank": 2, "costs": Costs(), "activations": 2.0, "placement": "V", "effort": 100}
            ),
            {"costs": {"None"}, "activations": {"None", "huge"}, "stages_per_rank": set()},
        ),
        "lower": Call(
            public.lower,
            lambda: {
                "schedule": schedule,
                "costs": Costs(),
                "unshard": True,
                "max_unsharded": 2,
                "reduce_grad": True,
            },
            {"costs": {"None"}},
        ),
        "validate": Call(validate, lambda: {"schedule": schedule, "buffers": 2}, {"buffers": {"None"}}),
        "simulate": Call(simulate, lambda: {"schedule": schedule, "costs": Costs()}, {"costs": {"None"}}),
        "format_table": Call(public.format_table, lambda: {"schedule": schedule}),
        "from_csv": Call(from_csv, lambda: {"path": "schedule.csv", "lowered": True}),
        "to_csv": Call(public.to_csv, lambda: {"schedule": schedule, "path": "schedule.csv"}, {"path": PATHS}),
        "to_trace": Call(
            public.to_trace,
            lambda: {"schedule": schedule, "path": "step.json", "costs": Costs(), "microseconds": 2.0},
            {"path": PATHS, "costs": {"None"}, "microseconds": {"None", "0.5", "huge"}},
        ),
        "balanced_split": Call(
            public.balanced_split,
            lambda: {"costs": {"a": 1.0, "b": 2.0}, "num_stages": 2},
            {"costs": {"another key"}},
        ),
        "split_units": Call(
            split_units,
            lambda: {"model": MODEL, "plan": PLAN, "num_stages": 2, "example_inputs": EXAMPLE},
            {"example_inputs": ANY_EXAMPLE},
        ),
        "PipelineEngine": Call(
            PipelineEngine,
            lambda: {
                "model": nn.Sequential(nn.Linear(2, 2)),
                "axis": mesh,
                "plan": PLAN,
                "loss_fn": torch.sum,
                "meshes": (mesh,),
                "per_microbatch": False,
                "row_wise": (),
                "example_inputs": EXAMPLE,
                "timeout": timedelta(seconds=60),
                "forward_context": contextlib.nullcontext,
            },
            {
                "model": {"module"},
                "loss_fn": {"None", "class", "function", "module"},
                "meshes": {"()", "[]", "longer", "shorter"},
                "row_wise": {"[]"},
                "example_inputs": ANY_EXAMPLE,
                "timeout": {"None"},
                "forward_context": {"class", "function", "module"},
            },
        ),
    }


def test_the_table_has_every_public_name():
    (names,) = run_ranks(lambda: list(calls()), 1)
    check_table({"": public}, [*names, "draw"], RESULTS)


def test_drawing_refuses(tmp_path):
    with pytest.raises(TypeError, match="draw: expected Schedule or Timeline for schedule, got None"):
        public.draw(None, tmp_path / "schedule.png")
    with pytest.raises(ValueError, match="draw: expected a path that is not empty for path, got ''"):
        public.draw(gpipe(2, 2), "")


def test_bad_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    public.to_csv(gpipe(2, 2), "schedule.csv")
    run_ranks(lambda: check_calls(calls()), 1)


@ranks(1)
def test_a_function_without_its_checks_is_found():
    call = calls()["validate"]
    bare = dataclasses.replace(call, function=inspect.unwrap(call.function))
    with pytest.raises(AssertionError, match=r"\d+ calls end badly"):
        check_calls({"validate": bare})


def test_costs_of_another_number_of_stages():
    with pytest.raises(ValueError, match=r"simulate: expected a number for each of 2 stages as costs.forward, got 3"):
        simulate(gpipe(2, 2), Costs(forward=(1.0, 2.0, 3.0)))
    assert simulate(gpipe(2, 2), Costs(0.0, 0.0, 0.0)).bubble == 0


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
