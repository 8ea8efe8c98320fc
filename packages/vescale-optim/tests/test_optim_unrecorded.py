"""DDP refuses calls of a module that nothing can run on the rows of all ranks as one device does."""

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale.optim import DDP
from vescale_testing import ranks


def model(mesh, *, planned=(), compiled=False):
    """Return two linear layers; those named have a plan, "" for both."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for fqn in planned:
        parallelize_module(net.get_submodule(fqn), mesh["tp"], {"forward": {"input": [Replicate()]}})
    if compiled:
        net[1].compile(backend="eager")
    return net


def without_plan(mesh):
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].bias = nn.Parameter(distribute_tensor(net[0].bias.detach(), mesh["tp"], [Shard(0)]))
    return net


@ranks(4)
def test_calls_that_nothing_can_check_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    refused = {
        r"got Sequential: only a part of it has a plan, '0'; what mixes rows": lambda: model(mesh, planned=["0"]),
        r"it has DTensors without a plan, such as '0.bias'": lambda: without_plan(mesh),
        r"it has a plan, and it or a part of it is compiled": lambda: model(mesh, planned=[""], compiled=True),
    }
    for text, make in refused.items():
        ddp = DDP(make(), mesh["dp"])  # its state can be used: only calls cannot be checked
        with pytest.raises(RuntimeError, match=text + r".*whose plan may leave parts out, or pass per_rank=True"):
            ddp(torch.ones(2, 4))


@ranks(4)
def test_calls_that_can_be_checked_or_need_not_be():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for make in (lambda: model(mesh, planned=[""]), lambda: model(mesh), lambda: model(mesh, compiled=True)):
        DDP(make(), mesh["dp"])(torch.ones(2, 4)).mean().backward()
    DDP(model(mesh, planned=["0"]), mesh["dp"], per_rank=True)(torch.ones(2, 4)).mean().backward()
    alone = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    DDP(model(alone, planned=["0"]), alone["dp"])(torch.ones(2, 4)).mean().backward()
