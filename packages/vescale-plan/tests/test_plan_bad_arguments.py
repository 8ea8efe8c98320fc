"""A bad argument is named where it was given: what was expected, what came, and what to pass."""

import dataclasses
import inspect
import math
import re

import pytest
import torch
from torch import nn

import vescale.plan as public
from vescale.plan import Cluster, Constraints, Layout, Plan, StateBytes, generate_plan, profile
from vescale_testing.bad_arguments import Call, check_calls, check_table

RUN = {"global_batch_size": 2, "sequence_length": 4}
INPUTS = {"input": torch.ones(1, 4, 2)}
CLUSTER, MODEL = Cluster(2, memory_bytes=2**30), nn.Linear(2, 2)

ROWS = {
    "axis_order, other types": (
        lambda: Plan(axis_order=(1, "dp", "tp")),
        "'pp', 'dp' and 'tp' once each in axis_order",
    ),
    "axis_order, a number": (lambda: Plan(axis_order=3), "once each in axis_order, got 3"),
    "zero, a list": (lambda: Plan(zero=[]), "expected one of 0, 1, 2, 3 for zero, got []"),
    "dp, nan": (lambda: Plan(dp=math.nan), "expected an integer >= 1 for dp, got nan"),
    "dp, huge": (lambda: Plan(dp=2**64), "expected an integer of 64 bits for dp, got 18446744073709551616"),
    "memory": (lambda: Plan(memory=3), "expected a tuple of StageMemory for memory, got 3"),
    "table": (lambda: Plan(table=(1,)), "expected a tuple of Candidate for table, got (1,)"),
    "limit_bytes": (lambda: Plan(limit_bytes="a"), "expected an integer >= 1 for limit_bytes, got 'a'"),
    "split": (
        lambda: Plan(split={}),
        "expected 'uniform', a list of FQNs or one list of FQNs per stage for split, got {}",
    ),
    "check_batch, text": (lambda: Plan().check_batch("a"), "expected an integer >= 1 for global_batch_size, got 'a'"),
    "check_batch, 0": (lambda: Plan().check_batch(0), "expected an integer >= 1 for global_batch_size, got 0"),
    "num_devices": (lambda: Cluster("a", memory_bytes=1), "expected an integer >= 1 for num_devices, got 'a'"),
    "num_devices, huge": (
        lambda: Cluster(2**62, memory_bytes=1),
        "an integer <= 16777216 for num_devices, got",
    ),
    "batch, huge": (
        lambda: Constraints(global_batch_size=2**62, sequence_length=4),
        "expected an integer <= 4294967296 for global_batch_size, got 4611686018427387904",
    ),
    "memory_fraction": (lambda: Constraints(**RUN, memory_fraction="a"), "(0, 1] for memory_fraction, got 'a'"),
    "memory_fraction, nan": (lambda: Constraints(**RUN, memory_fraction=math.nan), "for memory_fraction, got nan"),
    "state_bytes": (lambda: Constraints(**RUN, state_bytes=3), "expected StateBytes or None for state_bytes, got 3"),
    "negative bytes": (lambda: StateBytes(-1, 0, 0), "expected an integer >= 0 for params, got -1"),
    "model": (
        lambda: generate_plan(None, CLUSTER, Constraints(**RUN)),
        "generate_plan: expected an nn.Module, functools.partial(Model, ...), (Model, arguments...) or a config",
    ),
    "cluster": (lambda: generate_plan(MODEL, None, Constraints(**RUN)), "expected Cluster for cluster, got None"),
    "constraints": (lambda: generate_plan(MODEL, CLUSTER, None), "expected Constraints for constraints, got None"),
    "tp_sharded": (
        lambda: profile(MODEL, tp_sharded="weight"),
        "expected Sequence or None for tp_sharded, got 'weight'",
    ),
}


# which users do not construct
RESULTS = ("Candidate", "ModelProfile", "ParameterInfo", "StageMemory")
EMPTY = {"()", "[]"}
LAYOUT = {
    "dp": 1,
    "tp": 2,
    "pp": 1,
    "zero": 0,
    "num_microbatches": 1,
    "schedule": "auto",
    "stages_per_rank": 1,
    "sequence_parallel": False,
    "ep": 1,
    "etp": 2,
    "dp_replicate": 1,
    "recompute": 2,
    "param_dtype": "bfloat16",
    "grad_dtype": "float32",
    "reduce_dtype": "float32",
    "master_dtype": "float32",
    "state_dtype": "bfloat16",
    "reshard_after_forward": False,
    "offload": True,
}
PLAN = LAYOUT | {
    "pp": 2,
    "zero": 3,
    "cp": 1,
    "reduction": "ordered",
    "autocast": "bfloat16",
    "clip_grad_norm": 1.0,
    "units": ("layers",),
    "granularity": {"weight": ("dim0", 2)},
    "random_stream": "philox",
    "exact": None,
    "split": ("a",),
    "module_plan": "llama",
    "mode": "eager",
    "device": "cpu",
    "bucket_bytes": 1024,
    "axis_order": ("pp", "dp", "tp"),
    "memory": (),
    "limit_bytes": None,
    "table": (),
}
DTYPES = ("param_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype")
CHOICES = RUN | {
    "dp": None,
    "tp": None,
    "pp": None,
    "ep": None,
    "zero": None,
    "num_microbatches": None,
    "sequence_parallel": None,
    "recompute": "auto",
    "dp_replicate": 1,
    "param_dtype": None,
    "schedule": "1f1b",
    "stages_per_rank": None,
    "mode": "static",
    "max_microbatches": 32,
    "memory_fraction": 0.9,
    "state_bytes": None,
}
STATE, PATHS = StateBytes(2, 2, 12), {"text", "misspelled"}


def calls():
    """Return the public calls."""
    found, layout = profile(MODEL), Layout(dp=1, tp=1, pp=1)
    return {
        "Cluster": Call(
            Cluster, lambda: {"num_devices": 2, "memory_bytes": 2**30, "device": "cpu", "devices_per_host": 8}
        ),
        "Constraints": Call(
            Constraints,
            lambda: CHOICES,
            {
                "zero": {"0"},
                "sequence_parallel": {"True"},
                "memory_fraction": {"0.5"},
                "recompute": {"None"},
            },
        ),
        "Layout": Call(
            Layout,
            lambda: LAYOUT,
            {"recompute": {"None"}, "stages_per_rank": {"None"}, **{name: {"None"} for name in DTYPES}},
        ),
        "StateBytes": Call(
            StateBytes,
            lambda: {"params": 2, "grads": 2, "optimizer": 8},
            {"params": {"0"}, "grads": {"0"}, "optimizer": {"0"}},
        ),
        "StateBytes.for_dtype": Call(StateBytes.for_dtype, lambda: {"dtype": "float32"}),
        "Plan": Call(
            Plan,
            lambda: PLAN,
            {
                "split": {"[text]"},
                "stages_per_rank": {"None"},
                "module_plan": {"None", "text", "misspelled"},
                "recompute": {"None", "[text]"},
                "units": EMPTY | {"None", "[text]", "longer", "shorter"},
                "granularity": {"None", "{}", "another key"},
                "clip_grad_norm": {"None", "0.5", "huge"},
                **{name: {"None"} for name in (*DTYPES, "autocast")},
            },
        ),
        "Plan.check_batch": Call(Plan(dp=2).check_batch, lambda: {"global_batch_size": 2}),
        "Plan.check_world": Call(Plan(dp=2).check_world, lambda: {"world_size": 2}),
        "Plan.diff": Call(Plan().diff, lambda: {"other": Plan(dp=2)}),
        "Plan.explain": Call(
            Plan().explain, lambda: {"max_rows": 40, "devices_per_host": 8}, {"devices_per_host": {"None"}}
        ),
        "Plan.to_html": Call(Plan().to_html, lambda: {"devices_per_host": 8}, {"devices_per_host": {"None"}}),
        "Plan.from_json": Call(Plan.from_json, lambda: {"text": Plan().to_json()}),
        "Plan.load": Call(Plan.load, lambda: {"path": "plan.json"}),
        "Plan.save": Call(Plan().save, lambda: {"path": "plan.json"}, {"path": PATHS}),
        "Plan.explain_html": Call(
            Plan().explain_html,
            lambda: {"path": "plan.html", "devices_per_host": 8},
            {"path": PATHS, "devices_per_host": {"None"}},
        ),
        "repeated_blocks": Call(public.repeated_blocks, lambda: {"model": MODEL}, {"model": {"module"}}),
        "blocks_of": Call(public.blocks_of, lambda: {"model": MODEL, "every": 2}, {"model": {"module"}}),
        "count_flops": Call(
            public.count_flops,
            lambda: {
                "model": MODEL,
                "batch": {"input": torch.ones(2, 2), "target": torch.ones(2, 2)},
                "loss_fn": nn.functional.mse_loss,
            },
        ),
        "build_model": Call(public.build_model, lambda: {"model": MODEL}, {"model": {"module"}}),
        "estimate_memory": Call(
            public.estimate_memory,
            lambda: (
                RUN | {"profile": found, "layout": layout, "state": STATE, "bucket_bytes": 1024, "loss_parallel": True}
            ),
            {"state": {"None"}},
        ),
        "generate_plan": Call(
            generate_plan,
            lambda: {
                "model": MODEL,
                "cluster": CLUSTER,
                "constraints": Constraints(**RUN),
                "tensor_parallel": {2: found},
            },
            {"tensor_parallel": {"None", "{}", "class", "function", "module"}},
        ),
        "model_state_bytes": Call(
            public.model_state_bytes,
            lambda: {"num_params": 4, "state": STATE, "dp": 1, "zero": 1},
            {"num_params": {"0"}, "zero": {"0"}},
        ),
        "profile": Call(
            profile,
            lambda: {
                "model": MODEL,
                "sequence_length": 4,
                "inputs": INPUTS,
                "loss_fn": torch.mean,
                "tp_sharded": ["weight"],
                "fused_attention": True,
            },
            {
                "sequence_length": {"None"},
                "inputs": {"None"},
                "loss_fn": {"None"},
                "tp_sharded": EMPTY | {"None", "longer", "shorter"},
                "fused_attention": {"None"},
            },
        ),
    }


def test_the_table_has_every_public_name():
    check_table({"": public}, calls(), RESULTS)


def test_bad_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Plan().save("plan.json")
    assert check_calls(calls()) > 1000


def test_a_function_without_its_checks_is_found():
    call = calls()["model_state_bytes"]
    bare = dataclasses.replace(call, function=inspect.unwrap(call.function))
    with pytest.raises(AssertionError, match=r"\d+ calls end badly"):
        check_calls({"model_state_bytes": bare})


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


def test_the_largest_numbers_end():
    run = Constraints(global_batch_size=2**32, sequence_length=4, max_microbatches=2**62)
    assert generate_plan(MODEL, Cluster(2**24, memory_bytes=2**30), run).world_size == 2**24


def test_right_arguments_pass():
    assert profile(MODEL, tp_sharded=["weight"]).num_parameters == 6
