"""Views of a tensor of which several mesh axes shard one dim: a dim may be merged or split where the shards are not."""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import half_of, in_halves, ranks

SHAPES = ((2, 2), (4,), (6,), (7, 2), (5, 3), (1, 4), (2, 3, 2))
VIEWS = {
    "flattened": lambda x: x.flatten(),
    "split in two": lambda x: x.unflatten(0, (2, -1)) if x.shape[0] % 2 == 0 else x,
    "split in ones": lambda x: x.unflatten(0, (-1, 1)),
    "last split": lambda x: x.unflatten(-1, (2, -1)) if x.shape[-1] % 2 == 0 else x,
    "first dims merged": lambda x: x.flatten(0, min(1, x.ndim - 1)),
}


def differs(mesh, whole, placements, view):
    x = distribute_tensor(whole, mesh, placements).requires_grad_()
    y = view(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    same = torch.equal(y.full_tensor(), view(whole)) and torch.equal(gradient.full_tensor(), 2 * whole)
    return not same


def check(mesh_shape, half):
    mesh = init_device_mesh("cpu", mesh_shape)
    for shape in SHAPES:
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        kinds = [Replicate(), *map(Shard, range(len(shape)))]
        for first, second, name in half_of(half, kinds, kinds, VIEWS):
            assert not differs(mesh, whole, (first, second), VIEWS[name]), (name, shape, first, second)


@in_halves
@ranks(4)
def test_two_by_two_ranks(half):
    check((2, 2), half)


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1])
@ranks(6)
def test_two_by_three_ranks(half):
    check((2, 3), half + 1)


@ranks(4)
def test_stock_torch_fails():
    mesh = init_device_mesh("cpu", (2, 2))
    with disabled("operators"), pytest.raises(RuntimeError, match="invalid for input of size"):
        differs(mesh, torch.ones(4, dtype=torch.float64), [Shard(0), Shard(0)], VIEWS["split in two"])
