"""A bad argument of any public function is named where it was given: what was expected, what came, and what to pass."""

import dataclasses
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale.dtensor as public
from vescale.dtensor import DTensor, Placement, RaggedShard, Replicate, Shard, debug, random
from vescale_testing import ranks, run_ranks
from vescale_testing.bad_arguments import VALUES, Call, check_calls, check_table

TORCHS = ("DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "init_device_mesh")
RESULTS = ("debug.CommLog", "debug.CommRecord")  # which users do not construct
TEXTS = {"no text", "text", "misspelled"}
CALLABLES = {"class", "function", "module"}  # what they raise is the user's
TENSORS = {"module", "tensor", "integers"}
SEEDS = {"0", "-1"}


def calls():
    """Return the public calls."""
    mesh = public.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = public.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    state = random.get_state()
    return {
        "InterleavedShard": Call(
            public.InterleavedShard, lambda: {"dim": 0, "k": 2, "split_factor": None}, {"split_factor": set(VALUES)}
        ),
        "RaggedShard": Call(
            RaggedShard,
            lambda: {"dims": (0,), "local_units": (1, 2)},
            {"dims": {"[0]"}, "local_units": {"longer", "shorter"}},
        ),
        "check_ranks": Call(public.check_ranks, lambda: {"every": 100}, {"every": {"0"}}),
        "deferred_init": Call(
            lambda ctor: public.deferred_init(nn.Identity if callable(ctor) else ctor),
            lambda: {"ctor": nn.Identity},
            {"ctor": CALLABLES},
        ),
        "is_deferred": Call(
            public.is_deferred, lambda: {"module_or_tensor": nn.Linear(1, 1)}, {"module_or_tensor": TENSORS}
        ),
        "disabled": Call(public.disabled, lambda: {"names": ("random",)}, {"names": {"()", "longer", "shorter"}}),
        "exact": Call(public.exact, lambda: {"num_blocks": 8}),
        "set_exact": Call(public.set_exact, lambda: {"num_blocks": None}, {"num_blocks": {"1", "2"}}),
        "distribute_tensor": Call(
            public.distribute_tensor,
            lambda: {"tensor": torch.ones(4), "device_mesh": mesh, "placements": [Shard(0)], "src_data_rank": 0},
            {
                "tensor": {"tensor", "integers", "another dtype", "another shape"},
                "placements": {"None"},
                "src_data_rank": {"None"},
            },
        ),
        "materialize": Call(
            materialized,
            lambda: {
                "module": public.deferred_init(nn.Linear, 1, 1),
                "mesh": mesh,
                "placements": {"weight": [Shard(0)]},
                "device": "cpu",
            },
            {"placements": {"None", "{}", *CALLABLES}, "device": {"None"}},
        ),
        "strict": Call(
            public.strict,
            lambda: {"mode": "raise", "free": True, "interleaved": False, "axes": ["tp"]},
            {"axes": {"None", "()", "[]", "[text]", "longer", "shorter", "misspelled"}},
        ),
        "random.stream": Call(random.stream, lambda: {"name": "torch", "seed": 0}, {"seed": SEEDS | {"None"}}),
        "random.set_stream": Call(random.set_stream, lambda: {"name": "torch", "seed": 0}, {"seed": SEEDS | {"None"}}),
        "random.manual_seed": Call(random.manual_seed, lambda: {"seed": 0}, {"seed": SEEDS}),
        "random.fork": Call(random.fork, lambda: {"seed": 0}, {"seed": SEEDS | {"None"}}),
        "random.set_state": Call(random.set_state, lambda: {"state": dict(state)}),
        "random.Streams.load_state_dict": Call(
            random.Streams().load_state_dict,
            lambda: {"state_dict": random.Streams().state_dict()},
            called={"state_dict": "state"},
        ),
        "random.local_batch": Call(random.local_batch, lambda: {"mesh_axis": mesh}),
        "random.micro_batches": Call(used_micro_batches, lambda: {"count": 2}),
        "random.forbidden": Call(random.forbidden, lambda: {"reason": "no"}, {"reason": TEXTS}),
        "debug.comm_log": Call(debug.comm_log, lambda: {"model": None, "mesh": None}, {"model": {"module"}}),
        "debug.explain": Call(debug.explain, lambda: {"tensor": x}),
        "debug.show": Call(debug.show, lambda: {"tensor": x, "max_elements": 10}, {"max_elements": {"0"}}),
    }


def materialized(module, mesh, placements, device):
    public.materialize(module, mesh, None if callable(placements) else placements, device=device)


def used_micro_batches(count):
    """Use every micro-batch, as the end of the context requires."""
    with random.micro_batches(count) as micro_batch:
        for m in range(count):
            with micro_batch(m):
                pass


def test_the_table_has_every_public_name():
    (names,) = run_ranks(lambda: list(calls()), 1)
    modules = {"": public, "random.": random, "debug.": debug}
    check_table(modules, [*names, "random.Streams", "random.current_stream", "random.get_state"], (*TORCHS, *RESULTS))


@ranks(1)
def test_bad_arguments():
    assert check_calls(calls()) > 700


@ranks(1)
def test_a_function_without_its_checks_is_found():
    call = calls()["random.manual_seed"]
    bare = dataclasses.replace(call, function=inspect.unwrap(call.function))
    with pytest.raises(AssertionError, match=r"\d+ calls end badly"):
        check_calls({"random.manual_seed": bare})


ROWS = {
    "dim": (
        lambda _: public.InterleavedShard("a", 2),
        "expects a dim counted from the front, got dim='a'; pass 0",
    ),
    "units": (lambda _: RaggedShard((0,), ("a",)), "RaggedShard: expected int for local_units[0], got 'a'"),
    "no mesh": (
        lambda _: public.distribute_tensor(torch.ones(2), None, [Shard(0)]),
        "expected a DeviceMesh for device_mesh, got None outside of `with mesh:`; pass the mesh",
    ),
    "a placement": (
        lambda mesh: public.distribute_tensor(torch.ones(2), mesh, ["Shard(0)"]),
        "distribute_tensor: expected Placement for placements[0], got 'Shard(0)'; pass such a value",
    ),
    "a dim": (
        lambda mesh: public.distribute_tensor(torch.ones(2), mesh, [Shard(1)]),
        "expected a dim of a tensor with 1 dims, got S(1); pass a dim in [-1, 1)",
    ),
    "too many": (
        lambda mesh: public.distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]),
        "expected placements, one for each axis of",
    ),
    "seed": (lambda _: random.manual_seed("a"), "manual_seed: expected int for seed, got 'a'; pass such a value"),
    "number": (lambda _: random.manual_seed(1, 2, 3), "manual_seed() takes 1 positional argument but 3 were given"),
    "axis": (lambda _: random.local_batch(3).__enter__(), "local_batch: expected DeviceMesh for mesh_axis, got 3"),
    "family": (lambda _: public.disabled(3).__enter__(), "disabled: expected names among random, operators"),
    "constructor": (lambda _: public.deferred_init(None), "deferred_init: expected Callable for ctor, got None"),
}


@ranks(1)
def test_texts():
    mesh = public.init_device_mesh("cpu", (dist.get_world_size(),))
    for function, message in ROWS.values():
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            function(mesh)


@ranks(1)
def test_right_arguments_pass():
    mesh = public.init_device_mesh("cpu", (1,))
    assert isinstance(public.distribute_tensor(torch.ones(2), mesh), DTensor)
    assert isinstance(public.distribute_tensor(torch.ones(2), mesh, (Shard(-1),)), DTensor)
    assert isinstance(RaggedShard([0], [1]), Placement)
    with mesh:
        assert public.distribute_tensor(torch.ones(2)).placements == (Replicate(),)
