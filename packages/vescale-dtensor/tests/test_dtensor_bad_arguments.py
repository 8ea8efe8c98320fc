"""A wrong argument of any public function is named where it was given: expected, got, and what to pass."""

import contextlib
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale.dtensor as public
from vescale.dtensor import DTensor, Placement, RaggedShard, Replicate, Shard, debug, random
from vescale_testing import ranks

TORCHS = {"DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "init_device_mesh"}
BAD = (None, 3, -1.5, "a", [], [3], {"a": 3}, object())


def functions():
    """Return the public functions and classes that take arguments, by name."""
    found = {}
    for prefix, module in (("", public), ("random.", random), ("debug.", debug)):
        for name in module.__all__:
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, Exception)
            if callable(value) and name not in TORCHS and not is_error and inspect.signature(value).parameters:
                found[prefix + name] = value
    for name in ("CommLog", "CommRecord"):  # results, which users do not construct
        found.pop(f"debug.{name}", None)
    return found


def right_arguments(mesh):
    """Return arguments for which each function works, by name."""
    x = public.distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    return {
        "InterleavedShard": {"dim": 0, "k": 2, "split_factor": None},
        "RaggedShard": {"dims": (0,), "local_units": (1, 2)},
        "check_ranks": {"every": 100},
        "deferred_init": {"ctor": nn.Identity},
        "disabled": {},
        "distribute_tensor": {
            "tensor": torch.ones(4),
            "device_mesh": mesh,
            "placements": [Shard(0)],
            "src_data_rank": 0,
        },
        "is_deferred": {"module_or_tensor": nn.Linear(1, 1)},
        "materialize": {"module": nn.Linear(1, 1), "mesh": mesh, "placements": {"weight": [Shard(0)]}},
        "strict": {"mode": "raise", "free": True, "interleaved": False},
        "random.stream": {"name": "torch", "seed": 0},
        "random.set_stream": {"name": "torch", "seed": None},
        "random.manual_seed": {"seed": 0},
        "random.fork": {"seed": 0},
        "random.set_state": {"state": random.get_state()},
        "random.local_batch": {"mesh_axis": mesh},
        "random.micro_batches": {"count": 2},
        "random.forbidden": {"reason": "no"},
        "debug.comm_log": {"model": None, "mesh": None},
        "debug.explain": {"tensor": x},
        "debug.show": {"tensor": x, "max_elements": 10},
    }


def call(function, arguments):
    positional = [
        arguments[name]
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY and name in arguments
    ]
    named = {
        name: value
        for name, value in arguments.items()
        if inspect.signature(function).parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    result = function(*positional, **named)
    if isinstance(result, contextlib.AbstractContextManager):
        with result:
            pass


def complaint(function, arguments):
    """Return the error of a call, or None."""
    try:
        call(function, arguments)
    except Exception as error:
        return error
    return None


@ranks(2)
def test_every_argument_of_every_function():
    mesh = public.init_device_mesh("cpu", (2,))
    rights, found = right_arguments(mesh), functions()
    assert set(rights) == set(found)
    num_refused = 0
    for name, arguments in rights.items():
        if name not in ("random.micro_batches", "strict"):
            assert complaint(found[name], arguments) is None, name
        for argument in arguments:
            for bad in BAD:
                error = complaint(found[name], {**arguments, argument: bad})
                if error is None:
                    continue
                where = f"{name}({argument}={bad!r}): {error!r}"
                assert isinstance(error, ValueError | TypeError), where
                assert re.search("expect", str(error)), where
                assert re.search("got", str(error)), where
                num_refused += 1
    assert num_refused > 120


ROWS = {
    "dim": (
        lambda _: public.InterleavedShard("a", 2),
        "expects a dim counted from the front, got dim='a'; pass 0",
    ),
    "units": (lambda _: RaggedShard((0,), ("a",)), "RaggedShard expects integers as numbers of units, got ('a',)"),
    "no mesh": (
        lambda _: public.distribute_tensor(torch.ones(2), None, [Shard(0)]),
        "expected a DeviceMesh for device_mesh, got None outside of `with mesh:`; pass the mesh",
    ),
    "a placement": (
        lambda mesh: public.distribute_tensor(torch.ones(2), mesh, ["Shard(0)"]),
        "expected placements such as Shard(0) or Replicate(), got 'Shard(0)'; pass one for each mesh axis",
    ),
    "a dim": (
        lambda mesh: public.distribute_tensor(torch.ones(2), mesh, [Shard(1)]),
        "expected a dim of a tensor with 1 dims, got S(1); pass a dim in [-1, 1)",
    ),
    "too many": (
        lambda mesh: public.distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]),
        "expected one placement for each axis of",
    ),
    "seed": (lambda _: random.manual_seed("a"), "manual_seed: expected int for seed, got 'a'; pass such a value"),
    "number": (lambda _: random.manual_seed(1, 2, 3), "manual_seed() takes 1 positional argument but 3 were given"),
    "axis": (lambda _: random.local_batch(3).__enter__(), "local_batch: expected DeviceMesh for mesh_axis, got 3"),
    "family": (lambda _: public.disabled(3).__enter__(), "disabled: expected families among random, operators"),
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
