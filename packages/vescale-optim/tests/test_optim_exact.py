"""DDP sees the rows of its rank alone, so inside of `exact` it is refused by name."""

import pytest
import torch
from torch import nn

from vescale.dtensor import UnsupportedOperator, exact, init_device_mesh
from vescale.optim import DDP
from vescale_testing import ranks


@ranks(2)
def test_ddp_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for zero in range(4):
        model = DDP(nn.Linear(4, 4), mesh, zero=zero)
        with exact(), pytest.raises(UnsupportedOperator, match=r"DDP of Linear.*axis one of the mesh"):
            model(torch.ones(2, 4))
        assert model(torch.ones(2, 4)).shape == (2, 4)
