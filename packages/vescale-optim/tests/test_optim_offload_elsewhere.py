"""Collectives of tensors that are not on the axis' devices: copies travel, and results come back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale.optim._ranks.axis import Axis, Pending
from vescale_testing import ranks


def train(reduction):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double(), mesh["dp"], zero=2, reduction=reduction)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=0.5)
    for step in range(3):
        x = torch.full((2, 3), 1.0 + step + dist.get_rank(), dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [value for entries in optimizer.full_state_dict()["state"].values() for value in entries.values()]
    return [*(p.detach().clone() for p in model.parameters()), *full]


def assert_equal(actual, expected):
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@ranks(2)
def test_every_collective_brings_its_result_back(monkeypatch):
    init = Pending.__init__

    def lost(self, work, name, axis, brings=None):
        """Leave the sums of gradients where they came."""
        init(self, work, name, axis, None if "bucket" in name else brings)

    for reduction in ("backend", "ordered"):
        expected = train(reduction)
        with monkeypatch.context() as patch:
            patch.setattr(Axis, "is_elsewhere", lambda _axis, _tensor: True)
            assert_equal(train(reduction), expected)
            patch.setattr(Pending, "__init__", lost)
            with pytest.raises(AssertionError):
                assert_equal(train(reduction), expected)


def test_a_tensor_is_elsewhere_by_its_device():
    axis = Axis("dp", 2, 0, None, "cpu")
    assert not axis.is_elsewhere(torch.zeros(1))
    assert axis.is_elsewhere(torch.zeros(1, device="meta"))
