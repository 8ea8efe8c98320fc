"""Solvers on stacks of matrices give the values of one device, however the stacks and their batches are placed."""

import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks, run_ranks


def stack(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    made = torch.rand(*shape, dtype=torch.float64, generator=generator)
    return made + 4 * torch.eye(shape[-1], dtype=made.dtype) if shape[-1] == shape[-2] else made


def solve_triangular(a, b):
    return torch.linalg.solve_triangular(a, b, upper=False)


def solve_by_factors(a, b):
    factors, pivots = torch.linalg.lu_factor(a)
    return torch.linalg.lu_solve(factors, pivots, b)


def solve_symmetric(a, b):
    return torch.cholesky_solve(b, torch.linalg.cholesky(a @ a.mT))


FUNCTIONS = (solve_triangular, torch.linalg.solve, solve_by_factors, solve_symmetric)
SHAPES = [
    ((4, 3, 3), (4, 3, 2)),
    ((3, 3), (4, 3, 2)),
    ((4, 3, 3), (3, 2)),
    ((1, 3, 3), (4, 3, 2)),
    ((4, 3, 3), (2, 4, 3, 2)),
    ((2, 1, 4, 4), (3, 4, 2)),
]


def check_equal_one_device(assert_equals_one_device):
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for of_a, of_b in SHAPES if world == 2 else SHAPES[:2]:
        for function in FUNCTIONS if world == 2 else FUNCTIONS[:2]:
            operands = [stack(*of_a).requires_grad_(), stack(*of_b).requires_grad_()]
            num_cases = assert_equals_one_device(function, operands, mesh, partial=False)
            assert num_cases == (1 + len(of_a)) * (1 + len(of_b)), (function.__name__, of_a, of_b)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_equal_one_device(world_size, assert_equals_one_device):
    run_ranks(check_equal_one_device, world_size, assert_equals_one_device)


@ranks(2)
def test_stacks_sharded_alike_stay_so():
    mesh = init_device_mesh("cpu", (2,))
    a, b = stack(4, 3, 3), stack(4, 3, 2)
    for of_a, of_b in ((Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate())):
        result = solve_triangular(distribute_tensor(a, mesh, [of_a]), distribute_tensor(b, mesh, [of_b]))
        assert result.placements == (Shard(0),)
        assert torch.allclose(result.full_tensor(), solve_triangular(a, b))


@ranks(2)
def test_stock_stops():
    mesh = init_device_mesh("cpu", (2,))
    a = distribute_tensor(stack(4, 3, 3), mesh, [Replicate()])
    b = distribute_tensor(stack(4, 3, 2), mesh, [Shard(0)])
    with disabled("operators"), pytest.raises(RuntimeError, match="size of tensor a"):
        solve_triangular(a, b)
