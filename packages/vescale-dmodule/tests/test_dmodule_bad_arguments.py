"""A bad argument of any public function is named where it was given: what was expected, what came, and what to pass."""

import dataclasses
import functools
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vescale.dmodule as public
from vescale.dmodule import plans
from vescale.dtensor import Replicate, Shard
from vescale_testing import ranks
from vescale_testing.bad_arguments import Call, check_calls, check_table

# what functions return, protocols, aliases of types, and what the library calls
RESULTS = (
    "BoundaryTraffic",
    "Collective",
    "Report",
    "TensorLayout",
    "ExpertAllocator",
    "TokenDispatcher",
    "AllToAll",
    "plans.DerivedPlan",
)
ALIASES = ("plans.Plan",)
PLAN = {
    "parameter": {r"up\.weight": {"tp": Shard(0)}, r"down\.weight": [Shard(1)]},
    "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [[Replicate()]]},
    "attribute": {r"up\.out_features": 4},
    "local_attribute": {r"down\.in_features": public.Divided("tp")},
    "eager": ["up"],
    "local": {"down": {"input": [{"tp": Replicate()}], "output": [[Replicate()]]}},
}
EXPERT_PLAN = {"expert": {"experts": public.Experts({"tp": Shard(0)})}}
TEXTS = {"no text", "text"}
CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, model_type="llama", num_hidden_layers=2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.down(self.up(x))


class Stack(nn.Module):
    num_experts = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


def mesh_of_one():
    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def parallel():
    return public.parallelize_module(Model(), mesh_of_one(), {})


def parallelize_experts(plan):
    """Call `parallelize_module` with a plan of experts."""
    model = nn.ModuleDict({"experts": Stack()})
    public.parallelize_module(model, mesh_of_one(), plan)


def with_config(make):
    """Return a family with its config, whose attributes can be bad, too."""
    family = {"config": CONFIG, "axis": "tp", "degree": 2, "sequence_parallel": False, "replicate_attention": False}
    accepts = {"config": {"None"}, "axis": TEXTS | {"misspelled"}, "degree": {"None"}}
    if "expert_axis" in inspect.signature(make).parameters:
        family["expert_axis"] = "ep"
        accepts["expert_axis"] = {"None", "misspelled", *TEXTS}
    return Call(make, lambda: family, accepts)


def calls():
    """Return the public calls."""
    axis = {"axis": {"misspelled", *TEXTS}}
    name = {"name": {"misspelled", *TEXTS}}
    experts = {
        "placements": {"tp": Shard(0)},
        "parameters": {"weight": {"tp": Shard(1)}},
        "once": ("bias",),
        "arguments": ("a", "b", "c"),
        "skips_absent": False,
        "partial_output": False,
        "allocator": public.StaticAllocator(),
        "dispatcher": public.AllToAll(),
    }
    return {
        "Divided": Call(public.Divided, lambda: {"axis": "tp", "number": 4}, {**axis, "number": {"None", "0", "-1"}}),
        "Experts": Call(
            public.Experts,
            lambda: experts,
            {
                "placements": {"another key", "{}", "[]", "()"},
                "parameters": {"{}", "another key"},
                "once": {"()", "[]", "[text]", "longer", "shorter"},
                "arguments": {"None"},
                "skips_absent": {"None"},
            },
        ),
        "LoadBalancingAllocator": Call(
            public.LoadBalancingAllocator,
            lambda: {"threshold": 0.1, "needs_loads": True},
            {"threshold": {"0", "0.5", "huge"}},
        ),
        "StaticAllocator": Call(public.StaticAllocator, lambda: {"needs_loads": False}),
        "Repeat": Call(
            public.Repeat,
            lambda: {"entry": {"tp": Shard(-1)}, "dim": -1, "parts": (2, 2), "times": (1, 2)},
            {"dim": {"0"}, "entry": {"another key"}},
        ),
        "describe": Call(
            public.describe,
            lambda: {"module": Model(), "axes": {"tp": 2}, "plan": PLAN, "allow_empty": False},
            {"plan": {"{}"}},
        ),
        "no_sync": Call(public.no_sync, lambda: {"module": parallel()}),
        "report": Call(public.report, lambda: {"module": parallel(), "num_steps": 1}),
        "rebalance_experts": Call(
            public.rebalance_experts, lambda: {"model": parallel(), "optimizer": None}, {"model": {"module"}}
        ),
        "restore_experts": Call(
            public.restore_experts, lambda: {"model": parallel(), "optimizer": None}, {"model": {"module"}}
        ),
        "set_mode": Call(
            public.set_mode,
            lambda: {"module": parallel(), "mode": "static", "parts": ("up",)},
            {"parts": {"()", "longer", "shorter"}},
        ),
        "parallelize_module": Call(
            public.parallelize_module,
            lambda: {
                "module": Model(),
                "mesh": mesh_of_one(),
                "plan": PLAN,
                "mode": "eager",
                "allow_implicit": False,
                "allow_empty": False,
            },
            {"plan": {"{}"}},
        ),
        "parallelize_module of experts": Call(parallelize_experts, lambda: {"plan": EXPERT_PLAN}, {"plan": {"{}"}}),
        **{f"plans.{make.__name__}": with_config(make) for make in dict.fromkeys(plans.FAMILIES.values())},
        "plans.plan_for": Call(
            plans.plan_for,
            lambda: {
                "model": named(nn.Identity()),
                "axis": "tp",
                "degree": 2,
                "sequence_parallel": False,
                "replicate_attention": False,
                "expert_axis": None,
                "family": "llama",
            },
            axis | {"degree": {"None"}, "family": {"None"}},
        ),
        "plans.derive": Call(
            plans.derive,
            lambda: {
                "model": Model(),
                "inputs": {"x": torch.ones(2, 4)},
                "degree": 2,
                "axis": "tp",
                "expert_axis": None,
                "batch_axis": None,
                "sequence_parallel": False,
            },
            axis | {"inputs": {"None"}, "expert_axis": TEXTS, "batch_axis": TEXTS},
        ),
        "plans.merge": Call(
            plans.merge,
            lambda: {"plans": ({"parameter": {"a": {}}}, {"eager": ["b"]})},
            {"plans": {"()", "{}", "longer", "shorter"}},
        ),
        "plans.column": Call(
            plans.column,
            lambda: {"name": "up", "axis": "tp", "parts": 2, "transposed": False, "output": Replicate()},
            name | axis | {"output": {"None"}},
        ),
        "plans.row": Call(
            plans.row,
            lambda: {"name": "up", "axis": "tp", "transposed": False, "output": Replicate()},
            name | axis | {"output": {"None"}},
        ),
        "plans.vocab": Call(
            plans.vocab,
            lambda: {"embedding": "up", "head": "down", "axis": "tp"},
            axis | {"embedding": {"misspelled", *TEXTS}, "head": {"None", "misspelled", *TEXTS}},
        ),
        "plans.sequence": Call(
            plans.sequence,
            lambda: {"first": "up", "last": "down", "axis": "tp"},
            axis | {"first": {"misspelled", *TEXTS}, "last": {"misspelled", *TEXTS}},
        ),
        "plans.block": Call(
            plans.block,
            lambda: {"name": "up", "axis": "tp", "output": Replicate()},
            name | axis | {"output": {"None"}},
        ),
        "plans.experts": Call(plans.experts, lambda: {"name": "up", "axis": "tp"}, name | axis),
    }


def named(model):
    model.config = CONFIG
    return model


def test_the_table_has_every_public_name():
    check_table({"": public, "plans.": plans}, calls(), (*RESULTS, *ALIASES))


@ranks(1)
def test_bad_arguments():
    assert check_calls(calls()) > 1000


@ranks(1)
def test_a_function_without_its_checks_is_found():
    call = calls()["report"]
    bare = dataclasses.replace(call, function=inspect.unwrap(call.function))
    with pytest.raises(AssertionError, match=r"\d+ calls end badly"):
        check_calls({"report": bare})


@ranks(1)
def test_texts():
    mesh, module = mesh_of_one(), nn.Linear(2, 2)
    call = functools.partial
    parallelize = public.parallelize_module
    rows = [
        (call(parallelize, None, mesh, {}), "parallelize_module: expected Module for module, got None"),
        (call(parallelize, module, None, {}), "parallelize_module: expected DeviceMesh for mesh, got None"),
        (call(parallelize, module, mesh, None), "parallelize_module: expected Mapping for plan, got None"),
        (
            call(parallelize, module, mesh, {"parameter": 3}),
            "expected a dict of patterns in section 'parameter' of the plan, got 3",
        ),
        (
            call(parallelize, module, mesh, {}, mode="statc"),
            "expected 'eager', 'static' or 'compile' for mode, got 'statc'; did you mean 'static'",
        ),
        (call(plans.llama, degree=0), "llama: expected an integer of 1 or more for degree, got 0"),
    ]
    for fails, message in rows:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            fails()
