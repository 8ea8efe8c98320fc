"""A bad argument is named where it was given: what was expected, what came, and what to pass."""

import functools
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vescale.optim as public
from vescale.optim import DDP, DistributedOptimizer, Muon, clip_grad_norm_
from vescale_testing import ranks, run_ranks
from vescale_testing.bad_arguments import Call, check_calls, check_table

NUMBERS = {"0", "0.5"}
DTYPES = {"None"}
NORMS = {"0.5", "inf", "huge"}
EMPTY = {"[]", "{}", "iterator"}
BIG = {"huge", *NUMBERS}


def mesh_of_one():
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def network():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def ddp_arguments():
    return {
        "module": network(),
        "mesh_axis": mesh_of_one(),
        "zero": 3,
        "bucket_bytes": 1024,
        "overlap": True,
        "reduction": "backend",
        "grad_dtype": torch.float32,
        "reduce_dtype": torch.float32,
        "param_dtype": torch.bfloat16,
        "find_unused_parameters": True,
        "units": ("0",),
        "reshard_after_forward": True,
        "prefetch": True,
        "granularity": {"0.weight": "rows", "1.weight": ("dim0", 1)},
        "offload": False,
        "watch_draws": False,
        "per_rank": False,
        "row_wise": ("1",),
    }


def optimizer_arguments():
    model = network()
    return {
        "optimizer_class_or_instance": torch.optim.AdamW,
        "model": model,
        "param_groups": [{"params": list(model.parameters()), "weight_decay": 0.1}],
        "clip_grad_norm": 1.0,
        "norm_axes": (),
        "master_dtype": torch.float32,
        "state_dtype": {"exp_avg": torch.bfloat16},
        "optimizer_kwargs": {"lr": 0.1, "betas": (0.9, 0.99)},
    }


def muon_arguments():
    return {
        "params": list(network().named_parameters()),
        "lr": 0.1,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "ns_coefficients": (3.0, -4.0, 2.0),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": "original",
        "adamw": ("1.weight",),
        "adamw_lr": 0.1,
        "adamw_betas": (0.9, 0.99),
        "adamw_eps": 1e-8,
        "adamw_weight_decay": 0.1,
        "matrices": None,
    }


def stepped():
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=nn.Linear(3, 3, bias=False), lr=0.1)
    optimizer.model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def a_setting(setting, make, right, accepted):
    """Return a call of an optimizer with one setting, as default or in a group."""

    def call(value):
        make(network(), **{setting: value})

    return Call(call, lambda: {"value": right}, {"value": accepted}, called={"value": setting})


def distributed(model, **settings):
    return DistributedOptimizer(torch.optim.AdamW, model=model, **settings)


def grouped(model, **settings):
    return DistributedOptimizer(
        torch.optim.AdamW, model=model, param_groups=[{"params": model.parameters(), **settings}]
    )


def distributed_muon(model, **settings):
    return DistributedOptimizer(Muon, model=model, **settings)


def muon_group(model, **settings):
    return Muon([{"params": list(model.named_parameters()), **settings}])


def calls():
    """Return the public calls."""
    model, optimizer = network(), stepped()
    return {
        "DDP": Call(
            DDP,
            ddp_arguments,
            {
                "grad_dtype": DTYPES,
                "reduce_dtype": DTYPES,
                "param_dtype": DTYPES,
                "units": {"None", "()", "[]", "{}", "iterator", "longer", "shorter"},
                "granularity": {"None", "{}"},
                "row_wise": {"()", "[]", "{}", "longer", "shorter", "iterator"},
            },
        ),
        "DDP.global_mean_scale": Call(
            DDP(network(), mesh_of_one()).global_mean_scale, lambda: {"count": 3}, {"count": {"0.5", "huge"}}
        ),
        "DistributedOptimizer": Call(
            DistributedOptimizer,
            optimizer_arguments,
            {
                "param_groups": {"None"},
                "clip_grad_norm": {"None", "0.5", "inf", "huge"},
                "norm_axes": EMPTY,
                "master_dtype": {"None"},
                "state_dtype": {"None", "{}"},
                "optimizer_kwargs": {"{}"},
            },
        ),
        **{
            f"lr by {make.__name__}": a_setting("lr", make, 0.1, BIG)
            for make in (distributed, grouped, distributed_muon, muon_group)
        },
        **{f"betas by {make.__name__}": a_setting("betas", make, (0.9, 0.99), ()) for make in (distributed, grouped)},
        "eps by distributed": a_setting("eps", distributed, 0.1, BIG | {"True", "inf"}),
        "DistributedOptimizer.load_state_dict": Call(
            lambda state_dict: stepped().load_state_dict(state_dict),
            lambda: {"state_dict": optimizer.state_dict()},
            {"state_dict": {"another key"}},
        ),
        "DistributedOptimizer.load_full_state_dict": Call(
            lambda state_dict: stepped().load_full_state_dict(state_dict),
            lambda: {"state_dict": optimizer.full_state_dict()},
            {"state_dict": {"another key"}},
        ),
        "Muon": Call(
            Muon,
            muon_arguments,
            {
                "lr": BIG,
                "weight_decay": BIG,
                "momentum": BIG,
                "eps": BIG,
                "ns_steps": {"0"},
                "adjust_lr_fn": {"None"},
                "adamw": {"()", "[]", "{}", "iterator", "longer", "shorter"},
                "params": {"longer", "shorter"},
                "adamw_lr": BIG | {"None"},
                "adamw_eps": BIG,
                "adamw_weight_decay": BIG,
            },
        ),
        "Muon.add_param_group": Call(
            lambda param_group: Muon([nn.Parameter(torch.ones(2, 2))]).add_param_group(param_group),
            lambda: {"param_group": {"params": list(model.parameters()), "lr": 0.1}},
            {"param_group": {"another key"}},
        ),
        "clip_grad_norm_": Call(
            clip_grad_norm_,
            lambda: {
                "model_or_parameters": list(model.parameters()),
                "max_norm": 1.0,
                "norm_type": 2.0,
                "norm_axes": (),
                "error_if_nonfinite": False,
            },
            {
                "max_norm": NORMS,
                "norm_type": NORMS,
                "norm_axes": EMPTY,
                "model_or_parameters": EMPTY | {"no text", "()", "module", "tensor", "integers", "longer", "shorter"},
            },
        ),
    }


def test_the_table_has_every_public_name():
    (names,) = run_ranks(lambda: list(calls()), 1)
    check_table({"": public}, names, ())


@ranks(1)
def test_bad_arguments():
    assert check_calls(calls()) > 1000


@ranks(1)
def test_a_function_without_its_checks_is_found():
    optimizer = stepped()
    load = functools.partial(inspect.unwrap(DistributedOptimizer.load_state_dict), optimizer)
    bare = Call(load, lambda: {"state_dict": optimizer.state_dict()}, {"state_dict": {"another key"}})
    with pytest.raises(AssertionError, match=r"load.state_dict not raised by a statement of the package: TypeError"):
        check_calls({"load": bare})


def optimizer_of(**changes):
    arguments = {"model": nn.Linear(2, 2), "lr": 0.1, **changes}
    return DistributedOptimizer(torch.optim.SGD, **arguments)


ROWS = {
    "model": (lambda: optimizer_of(model=None), "DistributedOptimizer: expected Module for model, got None"),
    "param_groups": (lambda: optimizer_of(param_groups=3), "expected Iterable or None for param_groups, got 3"),
    "a param group": (lambda: optimizer_of(param_groups=[3]), "expected dict for param_groups[0], got 3"),
    "norm_axes": (lambda: optimizer_of(norm_axes=3), "expected DeviceMesh or Iterable for norm_axes, got 3"),
    "lr": (lambda: optimizer_of(lr="a"), "expected a setting lr of SGD such as 0.001, got 'a'"),
    "a setting": (lambda: optimizer_of(speed=1), "got lr=0.1, speed=1 (SGD.__init__() got an unexpected keyword"),
    "lr of Muon": (lambda: Muon([], lr="a"), "Muon: expected float or Tensor for lr, got 'a'; pass such a value"),
    "lr of a distributed Muon": (
        lambda: DistributedOptimizer(Muon, model=nn.Linear(2, 2), lr="a"),
        "Muon: expected float or Tensor for lr, got 'a'",
    ),
    "state dict": (lambda: optimizer_of().load_state_dict(None), "expected dict for state_dict, got None"),
    "empty state dict": (lambda: optimizer_of().load_state_dict({}), "got no 'state' among []; pass what state_dict()"),
    "full state": (lambda: optimizer_of().load_full_state_dict({"state": {}}), "got no 'param_groups' among ['state']"),
    "parameters": (lambda: clip_grad_norm_(None, 1.0), "expected a module or parameters, got None; pass model.para"),
    "a parameter": (
        lambda: clip_grad_norm_([3], 1.0),
        "expected a module or parameters, got 3; pass model.parameters()",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


@ranks(1)
def test_ddp_refuses():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rows = [
        ((None, mesh), {}, "DDP: expected Module for module, got None"),
        ((nn.Linear(2, 2), mesh), {"bucket_bytes": "a"}, "DDP: expected int for bucket_bytes, got 'a'"),
        ((nn.Linear(2, 2), mesh), {"zero": []}, "zero must be 0, 1, 2 or 3, got []"),
        ((nn.Linear(2, 2), mesh), {"zero": 3, "units": 3}, "units must be a list of module names or regular expres"),
    ]
    for args, kwargs, message in rows:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            DDP(*args, **kwargs)
