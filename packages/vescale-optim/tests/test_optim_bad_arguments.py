"""A wrong argument is named where it was given."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, Muon, clip_grad_norm_
from vescale_testing import ranks


def optimizer_of(**changes):
    arguments = {"model": nn.Linear(2, 2), "lr": 0.1, **changes}
    return DistributedOptimizer(torch.optim.SGD, **arguments)


ROWS = {
    "model": (lambda: optimizer_of(model=None), "DistributedOptimizer: expected Module for model, got None"),
    "param_groups": (lambda: optimizer_of(param_groups=3), "expected Iterable or None for param_groups, got 3"),
    "a param group": (lambda: optimizer_of(param_groups=[3]), "expected a dict with 'params' as param group 0, got 3"),
    "norm_axes": (lambda: optimizer_of(norm_axes=3), "expected DeviceMesh or Iterable for norm_axes, got 3"),
    "lr": (lambda: optimizer_of(lr="a"), "expected arguments that SGD takes, got lr='a' ('<' not supported"),
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
