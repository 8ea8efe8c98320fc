"""A bad argument is named where it was given: what was expected, what came, and what to pass."""

import dataclasses
import functools
import inspect
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vescale
from vescale_testing import ranks, run_ranks
from vescale_testing.bad_arguments import Call, check_calls, check_table

# checked in the tests of their own packages
PARTS = ("Cluster", "Constraints", "Plan", "deferred_init", "load", "save")
RESULTS = (
    "Comparison",
    "ParallelModel",
    "StepOutput",
    "init_device_mesh",
)  # which users do not construct, and a function of torch
RUN = {"global_batch_size": 2, "sequence_length": 4}
CALLABLES = {"class", "function", "module"}  # what they raise is the user's
PLAN = {"parameter": {r"0\.weight": {"tp": vescale.dtensor.Shard(0)}}, "eager": ["0"]}


def build():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def arguments():
    return {
        "plan": vescale.Plan(),
        "model": build(),
        "optimizer_fn": functools.partial(torch.optim.SGD, lr=0.1),
        "clip_grad_norm": 1.0,
        "loss_fn": torch.sum,
        "param_groups": None,
        "module_plan": PLAN,
        "mesh": init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pp", "dp", "tp")),
        "per_rank": False,
        "row_wise": (),
        "example_inputs": {"input": torch.ones(2, 4)},
    }


def parallelize(
    plan,
    model,
    optimizer_fn,
    clip_grad_norm,
    loss_fn,
    param_groups,
    module_plan,
    mesh,
    per_rank,
    row_wise,
    example_inputs,
):
    """Call `parallelize`; what a function for groups or for the optimizer raises is the user's."""
    vescale.parallelize(
        plan,
        model,
        torch.optim.SGD if isinstance(optimizer_fn, types.FunctionType) else optimizer_fn,
        clip_grad_norm=clip_grad_norm,
        loss_fn=loss_fn,
        param_groups=None if callable(param_groups) else param_groups,
        module_plan=module_plan,
        mesh=mesh,
        per_rank=per_rank,
        row_wise=row_wise,
        example_inputs=example_inputs,
    )


def metrics_arguments(model, optimizer):
    return {
        "model": model,
        "optimizer": optimizer,
        "flops_per_token": 1e6,
        "peak_flops_per_device": 1e9,
        "every": 2,
        "progress": False,
        "num_steps": 3,
        "write": None,
        "over_ranks": False,
    }


def launch_arguments():
    return {
        "plan": vescale.Plan(dp=4),
        "script": "train.py",
        "to": "slurm",
        "hosts": 2,
        "arguments": ("--lr", "1e-3"),
        "name": "train",
        "port": 29500,
        "image": None,
    }


def record_arguments(folder):
    model = build()
    return {
        "path": folder,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "steps": [0, 2],
        "values": ["0"],
        "max_bytes": 2**20,
    }


def compare(a, b, bits, folder):
    """Call `compare`; what a function that is to record a run raises is the user's."""
    record = Path("right")
    with vescale.record(record, build()):
        pass
    a, b = (record if callable(each) else each for each in (a, b))
    vescale.compare(record if a == "record" else a, record if b == "record" else b, bits=bits, folder=folder)


def emulate(plan, function):
    """Call `emulate`; what the training function raises, and what it is given, is the user's."""
    vescale.emulate(plan, (lambda: None) if callable(function) else function)


def calls_of_one_process(folder):
    """Return the calls that need no process group, or a process without one."""
    return {
        "compare": Call(
            compare,
            lambda: {"a": "record", "b": "record", "bits": True, "folder": folder},
            {"a": CALLABLES, "b": CALLABLES, "bits": {"None"}, "folder": {"None", "text"}},
        ),
        "record": Call(
            vescale.record,
            lambda: record_arguments(folder),
            {
                "path": {"text"},
                "optimizer": {"None"},
                "steps": {"None", "()", "[]", "[0]", "longer", "shorter"},
                "values": {"()", "[]", "longer", "shorter"},
            },
        ),
        "emulate": Call(emulate, lambda: {"plan": vescale.Plan(dp=2), "function": build}, {"function": CALLABLES}),
    }


def calls():
    """Return the public calls."""
    model, optimizer = vescale.parallelize(vescale.Plan(), build(), torch.optim.SGD, module_plan={})
    metrics = vescale.Metrics(model, optimizer, every=2**31, write=None)
    batch = {"input": torch.ones(2, 4), "target": torch.ones(2, 4)}
    return {
        "Metrics": Call(
            vescale.Metrics,
            lambda: metrics_arguments(model, optimizer),
            {
                "optimizer": {"None"},
                "flops_per_token": {"None", "0.5", "huge"},
                "peak_flops_per_device": {"None", "0.5", "huge"},
                "num_steps": {"None"},
                "write": CALLABLES | {"None"},
            },
        ),
        "Metrics.step": Call(
            metrics.step, lambda: {"tokens": 8, "loss": torch.ones(())}, {"loss": {"None", "another dtype"}}
        ),
        "count_flops": Call(
            vescale.count_flops,
            lambda: {"model": build(), "batch": batch, "loss_fn": nn.functional.mse_loss},
        ),
        "launch_file": Call(
            vescale.launch_file,
            launch_arguments,
            {
                "script": {"text", "misspelled"},
                "arguments": {"()", "[]", "[text]", "longer", "shorter"},
                "name": {"text", "misspelled"},
                "image": {"None"},
            },
        ),
        "parallelize": Call(
            parallelize,
            arguments,
            {
                "optimizer_fn": {"function"},
                "clip_grad_norm": {"None", "0.5", "inf", "huge"},
                "loss_fn": CALLABLES | {"None"},
                "param_groups": CALLABLES,
                "module_plan": {"None", "{}"},
                "mesh": {"None"},
                "row_wise": {"[]"},
                "example_inputs": {"None", "{}", "{text: 0}", "another key"},
            },
            called={"model": "module", "module_plan": "plan"},  # by parallelize_module
        ),
        "MuonWithAdamW": Call(
            vescale.MuonWithAdamW,
            lambda: {"lr": 0.02, "adamw_lr": 3e-4, "adamw": (r".*embed.*",), "options": {"weight_decay": 0.0}},
            {
                "lr": {"0", "0.5", "huge"},
                "adamw_lr": {"0", "0.5", "huge"},
                "adamw": {"()", "[]", "[text]", "longer", "shorter"},
                "options": {"{}", "{text: 0}", "another key"},  # Muon knows its arguments
            },
        ),
        "generate_plan": Call(
            vescale.generate_plan,
            lambda: {
                "model": build(),
                "cluster": vescale.Cluster(1, memory_bytes=2**30, device="cpu"),
                "constraints": vescale.Constraints(**RUN),
                "module_plan": PLAN,
                "example_inputs": {"input": torch.ones(2, 4)},
            },
            {
                "module_plan": {"None", "{}", "{text: 0}", "another key"},  # `parallelize` knows the sections
                "example_inputs": {"None"},
            },
        ),
        "ParallelModel.local_batch": Call(
            model.local_batch, lambda: {"batch": {"input": torch.ones(2, 4)}}, {"batch": {"another key"}}
        ),
    }


def test_the_table_has_every_public_name():
    (names,) = run_ranks(lambda: list(calls()), 1)
    functions = [name for name in names if name not in ("ParallelModel.local_batch", "Metrics.step")]
    check_table({"": vescale}, [*functions, *calls_of_one_process(""), *PARTS], RESULTS)


@ranks(1)
def test_bad_arguments():
    assert check_calls(calls()) > 300


def test_bad_arguments_of_records_and_emulated_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for paths that are right
    assert check_calls(calls_of_one_process(tmp_path / "record")) > 150


@ranks(1)
def test_a_function_without_its_checks_is_found():
    call = calls()["generate_plan"]
    bare = dataclasses.replace(call, function=inspect.unwrap(call.function))
    with pytest.raises(AssertionError, match=r"\d+ calls end badly"):
        check_calls({"generate_plan": bare})
