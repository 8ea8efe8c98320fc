"""Lists, arrays and complex numbers are arguments of DTensors as they are of plain tensors."""

import numpy as np
import pytest
import torch

from vescale.dtensor import Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import half_of, in_halves, ranks, run_ranks

ROWS_MASK = [True, False, True, True, False]
INDICES = {
    "list": [0, 2],
    "one": [3],
    "negative": [-1, 0, -1],
    "range": range(1, 4),
    "bool list": ROWS_MASK,
    "array": np.array([4, 1]),
    "bool array": np.array(ROWS_MASK),
    "a list in the second dim": (slice(None), [2, 0]),
    "two lists": ([0, 1, 4], [2, 2, 0]),
    "list and number": ([0, 3], 1),
    "list of lists in a tuple": ([[0, 1], [2, 3]],),
    "after an ellipsis": (..., [1, 2]),
    "new dim": (None, [1, 2]),
    "slice and list": (slice(1, None, 2), [0, 2]),
    "empty list": [],
    "true": True,
    "false": False,
    "true in a row": (1, True),
}


def operand():
    return torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).add(0.5).requires_grad_()


def check_reads(names, assert_equals_one_device):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for (name,) in names:
        assert assert_equals_one_device(lambda x, index=INDICES[name]: x[index], [operand()], mesh) == 4, name


@in_halves
@pytest.mark.parametrize("world_size", [2, 4])
def test_reads(world_size, half, assert_equals_one_device):
    run_ranks(check_reads, world_size, half_of(half + world_size // 2, INDICES), assert_equals_one_device)


@ranks(2)
def test_one_truth_value(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,))

    def read_and_write(x):
        y, total = x * 1, x.sum()
        y[total > 0] = 5
        return x[total > 0], total[total > 0], total[total < 0], y

    assert assert_equals_one_device(read_and_write, [operand()], mesh) == 4


def check_writes(names, assert_equals_one_device):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def write(x, index):
        y, z = x * 1, x * 1
        y[index] = 7
        z[index] = x[index] * 2
        return y, z

    for (name,) in names:
        if name == "negative":  # the last of two writes to one place is not defined
            continue
        assert assert_equals_one_device(lambda x, index=INDICES[name]: write(x, index), [operand()], mesh) == 4, name


@in_halves
@pytest.mark.parametrize("world_size", [2, 4])
def test_writes(world_size, half, assert_equals_one_device):
    run_ranks(check_writes, world_size, half_of(half + world_size // 2, INDICES), assert_equals_one_device)


@ranks(2)
def test_plain_tensors_stay_refused():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(operand().detach(), mesh, [Shard(0)])
    for index in (torch.tensor([0, 2]), ([0, 2], torch.tensor([1, 2]))):
        with pytest.raises(RuntimeError, match="got mixed"):
            x[index]
    with pytest.raises(RuntimeError, match="got mixed"):
        x[[0, 2]] = torch.ones(2, 3, dtype=torch.float64)


@ranks(2)
def test_stock_refuses_lists_and_complex_numbers():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(operand().detach(), mesh, [Shard(0)])
    with disabled("operators"):
        with pytest.raises(RuntimeError, match="got mixed"):
            x[[0, 2]]
        with pytest.raises(RuntimeError, match="complex"):
            x**1j


NUMBERS = (1j, 2.0 - 0.5j, complex(3), 2, 2.5, True)
ARITHMETIC = {
    "x + n": lambda x, n: x + n,
    "n - x": lambda x, n: n - x,
    "x - n": lambda x, n: x - n,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "n / x": lambda x, n: n / x,
    "x ** n": lambda x, n: x**n,
    "n ** x": lambda x, n: n**x,
    "pow": lambda x, n: x.pow(n),
    "x == n": lambda x, n: x == n,
    "x != n": lambda x, n: x != n,
}


PLACEMENTS = (Replicate(), Shard(0), Shard(1))


def check_numbers_of_every_kind(half):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = operand().detach()
    dtypes = (whole, whole.float(), (whole * 4).long() + 1, whole + 1j * whole)
    for name, x, number, placement in half_of(half, ARITHMETIC, dtypes, NUMBERS, PLACEMENTS):
        if number is True and name in ("n - x", "x - n"):  # torch refuses it on one device
            continue
        expected = ARITHMETIC[name](x, number)
        actual = ARITHMETIC[name](distribute_tensor(x, mesh, [placement]), number)
        assert actual.dtype == expected.dtype, (name, x.dtype, number)
        torch.testing.assert_close(actual.full_tensor(), expected)  # by the dtype: 1e-7 for float64


@in_halves
@pytest.mark.parametrize("world_size", [2, 4])
def test_numbers_of_every_kind(world_size, half):
    run_ranks(check_numbers_of_every_kind, world_size, half + world_size // 2)


@ranks(2)
def test_complex_numbers_have_gradients(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (2,))
    for function in (lambda x: x**1j, lambda x: (0.5 + 1j) ** x, lambda x: 1j - x):
        num_cases = assert_equals_one_device(lambda x, f=function: torch.view_as_real(f(x)), [operand()], mesh)
        assert num_cases == 4
