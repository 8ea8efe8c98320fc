"""What offload refuses, before the first collective, and what it survives."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import deferred_init
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks


class Net(nn.Module):
    """Two layers; the second fails when it is told to."""

    fails = False

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))

    def forward(self, x):
        x = self.layers[0](x)
        if self.fails:
            raise ZeroDivisionError
        return self.layers[1](x)


def wrapped(**settings):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(Net().double(), mesh["dp"], **{"zero": 3, "offload": True, **settings})


def never(*_args, **_kwargs):
    raise AssertionError("a collective")


@ranks(2)
def test_settings_that_do_not_fit_are_refused_before_any_collective(monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with monkeypatch.context() as patch, CommDebugMode() as comm:
        patch.setattr(dist, "new_group", never)
        for zero in (0, 1, 2):
            with pytest.raises(
                ValueError,
                match=rf"offload=True keeps shards of parameters, gradients and state in host memory between uses, "
                rf"which needs zero=3, got zero={zero}$",
            ):
                DDP(Net(), mesh["dp"], zero=zero, offload=True)
        with pytest.raises(
            ValueError, match=r"offload must be True \(shards are kept in host memory\) or False, got 'cpu'"
        ):
            DDP(Net(), mesh["dp"], zero=3, offload="cpu")
    assert comm.get_total_counts() == 0


def test_a_module_elsewhere_than_the_mesh_is_refused():
    mesh = SimpleNamespace(device_type="cuda")
    with pytest.raises(
        ValueError,
        match=r"expected every parameter on a device of type 'cuda', as the mesh given to DDP, but 'layers.0.weight' "
        r"is on cpu; call module.to\('cuda'\) before DDP, or construct the module by vescale.dtensor.deferred_init",
    ):
        DDP(Net(), mesh, zero=3, offload=True)
    for settings in (
        {"module": Net(), "mesh_axis": mesh, "offload": False},
        {"module": deferred_init(Net), "mesh_axis": mesh, "offload": True},
        {"module": Net(), "mesh_axis": SimpleNamespace(device_type="cpu"), "offload": True},
    ):
        with pytest.raises(ValueError, match="expects a 1-D DeviceMesh"):  # which is checked next
            DDP(**settings, zero=3)


@ranks(2)
def test_ranks_that_differ_are_told():
    with pytest.raises(
        ValueError, match=r"setting, differs .*: rank 0 has '.*offload=True', rank 1 has '.*offload=False'"
    ):
        wrapped(offload=dist.get_rank() == 0)


@ranks(2)
def test_after_an_exception_training_goes_on():
    models = wrapped(), wrapped()
    x = torch.ones(2, 3, dtype=torch.float64)
    for fails, model in zip((False, True), models, strict=True):
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
        for _ in range(2):
            if fails:
                model.module.fails = True
                with pytest.raises(ZeroDivisionError):
                    model(x)
                model.module.fails = False
                optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with models[0].unsharded(), models[1].unsharded():
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one, other)
