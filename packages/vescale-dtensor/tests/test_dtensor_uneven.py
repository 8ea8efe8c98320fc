"""Shards of different sizes, ranks without a shard: values and gradients equal one device, and no rank fails alone."""

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import Replicate, disabled, init_device_mesh
from vescale_testing import RankFailure, ranks

# 7 rows over 4 ranks are 2 + 2 + 2 + 1, 5 columns 2 + 2 + 1 + 0
FUNCTIONS = {
    "flatten": lambda x: x.flatten(),
    "split and cat": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split(3, 0))], 0),
    "chunk of columns": lambda x: x.chunk(2, 1),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean(1)),
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1, keepdim=True)),
    "var and std": lambda x: (x.var(), x.std(1)),
    "max": lambda x: (x.max(), x.amax(1), x.max(0).values),
    "norms": lambda x: (x.norm(), torch.linalg.vector_norm(x, float("inf")), x.norm(dim=1)),
    "argmax": lambda x: (x.argmax(), x.argmax(0)),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(1)),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "rms_norm": lambda x: F.rms_norm(x, (5,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "select and slice": lambda x: (x[:, 1], x[2], x[1:6], x[:, 1:4]),
    "cumsum and sort": lambda x: (x.cumsum(0), x.sort(1).values),
    "trapezoid": lambda x: torch.trapezoid(x, dim=1),
}


def operand(*shape):
    torch.manual_seed(9)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True)]


@pytest.mark.parametrize("half", [0, 1])
def test_equal_one_device(half, assert_equals_one_device):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        for name, function in list(FUNCTIONS.items())[half::2]:
            assert assert_equals_one_device(function, operand(7, 5), mesh, partial=False) == 3, name

    on_every_rank()


@ranks(2)
def test_heads_that_do_not_divide_the_axis(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def attend(x):  # 3 heads of 4 over 2 ranks: the cut at 6 is inside the second head
        heads = x.view(5, 3, 4).transpose(0, 1)
        return (heads @ heads.mT).softmax(-1).transpose(0, 1).flatten()

    assert assert_equals_one_device(attend, operand(5, 12), mesh) == 4


def test_stock_torch_fails_on_some_ranks_only(assert_equals_one_device):
    @ranks(4, timeout=20)
    def maximum_over_an_empty_shard():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with disabled("operators"):
            maximum = FUNCTIONS["argmax"]
            assert_equals_one_device(maximum, operand(5, 5), mesh, only=lambda p: p != (Replicate(),), partial=False)

    with pytest.raises(RankFailure):
        maximum_over_an_empty_shard()
