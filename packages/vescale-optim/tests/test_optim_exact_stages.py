"""The gradient norm of a pipeline inside of `exact`: stages bring the norms of their parameters together in order."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.dtensor import UnsupportedOperator, exact
from vescale.dtensor.extension import gradient_receiver
from vescale.optim import DDP, clip_grad_norm_
from vescale.optim._norm.by_tree import norm_by_tree, of_all_stages
from vescale.optim._ranks.axis import Axis
from vescale_testing import ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
ORDER = [f"layers.{number}" for number in range(11)]


def gradient_norms():
    """Return a norm for each name but one, of many sizes and all dtypes."""
    numbers = torch.randn(len(ORDER), generator=torch.Generator().manual_seed(0)).exp()
    norms = {name: numbers[i].to(DTYPES[i % 4]) for i, name in enumerate(ORDER)}
    del norms["layers.5"]  # a parameter without a gradient
    return norms


@ranks(2)
def test_every_rank_has_the_norms_of_all_stages():
    expected = gradient_norms()
    axis = Axis.of(init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), role="test")
    mine = {name: norm for name, norm in expected.items() if (int(name[7:]) < 4) == (axis.coord == 0)}
    found = of_all_stages(mine, [axis], ORDER)
    assert [norm.dtype for norm in found] == [norm.dtype for norm in expected.values()]
    assert all(map(torch.equal, found, expected.values()))
    with exact():
        narrow = [norm.float() for norm in found]
        others = {norm_by_tree(narrow[k:] + narrow[:k], 2.0).item() for k in range(len(narrow))}
    assert len(others) > 1  # so the order counts


@ranks(2)
def test_parameters_of_unknown_order_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with exact(), pytest.raises(UnsupportedOperator, match=r"over the axis 'pp' inside .* vescale\.Plan\(exact=8\)"):
        clip_grad_norm_([weight], 1.0, norm_axes=(mesh,))


@ranks(2)
def test_a_step_of_a_pipeline_refuses_what_has_no_exact_form():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(nn.Linear(2, 2), mesh, reduce_dtype=torch.float64)
    parameters = list(model.parameters())
    begin = gradient_receiver(parameters[0]).reducer.begin
    with exact(), pytest.raises(UnsupportedOperator, match="leave reduce_dtype out"):
        begin([parameters])
