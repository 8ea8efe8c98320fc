"""`any` and `all` over shards are one truth value, whatever is done with it: True on two ranks is not 2."""

import itertools

import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks, torch_is_before

USES = {
    "as a number": lambda mask: mask.double(),
    "counted": lambda mask: mask.sum(),
    "times a number": lambda mask: mask * 1.5,
    "plus itself": lambda mask: mask.int() + mask,
    "negated": lambda mask: ~mask,
    "bits": lambda mask: mask.view(torch.uint8),
    "as a mask": lambda mask: torch.where(mask, 2.0, -1.0),
    "reduced again": lambda mask: (mask.any(), mask.all()),
}
REDUCTIONS = {
    "any of rows": lambda x: (x > 0).any(0),
    "any of columns": lambda x: (x > 0).any(-1, keepdim=True),
    "any": lambda x: (x > 2).any(),
    "all of rows": lambda x: (x > -2).all(0),
    "all of columns": lambda x: (x > -1).all(-1),
    "all": lambda x: (x > -9).all(),
    "of numbers": lambda x: x.round().any(1),
}


def operand():
    return [torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equal_one_device(reduction, assert_equals_one_device):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (4,))
        for use in USES.values():
            assert assert_equals_one_device(lambda x, use=use: use(REDUCTIONS[reduction](x)), operand(), mesh) == 4

    on_every_rank()


@ranks(4)
def test_two_axes():
    mesh = init_device_mesh("cpu", (2, 2))
    (whole,) = operand()
    for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        x = distribute_tensor(whole, mesh, placements)
        for reduction in REDUCTIONS.values():
            assert torch.equal(reduction(x).double().full_tensor(), reduction(whole).double()), placements


@ranks(2)
def test_stock_torch_counts_ranks():
    x = distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (2,)), [Shard(1)])
    with disabled("operators"):
        assert (x > 0).any(1).sum().full_tensor() == (6 if torch_is_before("2.14") else 3)
