"""A wrong argument of `parallelize_module` is named where it was given."""

import re

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.dmodule import parallelize_module
from vescale_testing import ranks


@ranks(1)
def test_refused():
    mesh, module = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), nn.Linear(2, 2)
    rows = [
        ((None, mesh, {}), "parallelize_module: expected Module for module, got None"),
        ((module, None, {}), "parallelize_module: expected DeviceMesh for mesh, got None"),
        ((module, mesh, None), "parallelize_module: expected Mapping for plan, got None"),
        ((module, mesh, {"parameter": 3}), "expected a dict of patterns in section 'parameter' of the plan, got 3"),
    ]
    for args, message in rows:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            parallelize_module(*args)
