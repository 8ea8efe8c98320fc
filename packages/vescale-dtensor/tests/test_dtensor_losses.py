"""Losses with a reduction: the mean over a sharded tensor, and its gradient, count every element of it once.

Stock DTensor runs the loss on the local part: gradients come out multiplied by the number of ranks, and the mean over
uneven shards is a mean of means.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import disabled, init_device_mesh
from vescale_testing import ranks

LOSSES = {
    "mse": lambda x, y, **k: F.mse_loss(x, y, **k),
    "l1": lambda x, y, **k: F.l1_loss(x, y, **k),
    "smooth_l1": lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.7, **k),
    "huber": lambda x, y, **k: F.huber_loss(x, y, delta=0.6, **k),
    "binary_cross_entropy": lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **k),
    "with_logits": lambda x, y, **k: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **k),
    "soft_margin": lambda x, y, **k: F.soft_margin_loss(x, y.sign(), **k),
    "kl_div": lambda x, y, **k: F.kl_div(x, y.abs(), **k),
    "poisson_nll": lambda x, y, **k: F.poisson_nll_loss(x, y.abs(), **k),
}


def operands(*shape):
    torch.manual_seed(5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)]


@ranks(4)
def test_equal_one_device(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for number, loss in enumerate(LOSSES.values()):
        for reduction in ("mean", ("sum", "none")[number % 2]):
            # 6 rows over 4 ranks are 2 + 2 + 2 + 0, 5 columns 2 + 2 + 1 + 0
            assert_equals_one_device(functools.partial(loss, reduction=reduction), operands(6, 5), mesh, partial=False)


@ranks(2)
def test_partial_operands(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for name in ("mse", "huber"):
        assert_equals_one_device(LOSSES[name], operands(4, 3), mesh)


@ranks(2)
def test_stock_torch_gives_another_gradient(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with disabled("operators"), pytest.raises(AssertionError, match="not close"):
        assert_equals_one_device(lambda x, y: F.mse_loss(x, y), operands(8, 3), mesh)
