"""A tensor without elements takes another shape as on one device; stock torch's rule for it never ends."""

import pytest
import torch

from vescale.dtensor import Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import RankFailure, ranks

SHAPES = {
    "reversed": lambda x: x.reshape(x.shape[::-1]),
    "flattened": lambda x: x.flatten(),
    "view": lambda x: x.view(3, 0, 2),
    "split": lambda x: x.unflatten(0, (2, 2)),
    "then used": lambda x: x.reshape(0, 4).sum(0),
}


@ranks(2)
def test_equal_one_device(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,))
    for function in SHAPES.values():
        for sliced in (lambda x: x[:, :0], lambda x: x[:, 1:].narrow(1, 0, 0)):
            operand = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
            assert assert_equals_one_device(lambda x, f=function, s=sliced: f(s(x)), [operand], mesh) == 4


@ranks(2)
def test_the_same_shape_keeps_the_placements():
    x = distribute_tensor(torch.ones(0, 4, 3), init_device_mesh("cpu", (2,)), [Shard(1)])
    assert x.view_as(x).placements == (Shard(1),)


def test_stock_torch_does_not_end():
    @ranks(2, timeout=8)
    def reshape():
        x = distribute_tensor(torch.ones(4, 0), init_device_mesh("cpu", (2,)), [Shard(0)])
        with disabled("operators"):
            x.reshape(0, 4)

    with pytest.raises(RankFailure, match="did not end within 8 s"):
        reshape()
