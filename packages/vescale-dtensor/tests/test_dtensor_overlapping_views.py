"""An operator that reads elements which it writes, through another view, is refused, in its first run and later.

On one device such a program reads what it has just written, element by element. Here an operand that is moved is read
before anything is written. Views that have no element in common may be read and written.
"""

import pytest
import torch

from vescale.dtensor import (
    DTensor,
    Replicate,
    Shard,
    UnsupportedOperator,
    disabled,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks

OVERLAP = {
    "transposed": lambda x: x.copy_(x.t()),
    "a part of a transposed one": lambda x: x[:, 1:].add_(x.t()[:, 1:]),
    "the real parts of an adjoint": lambda x: _set_real(x.to(torch.complex128)),
    "a row, and a column": lambda x: x[1].copy_(x[:, 0]),
    "columns, and a row": lambda x: x[:, :2].mul_(x[0, :2]),
    "rows shifted by one": lambda x: x[1:].copy_(x[:-1]),
    "a product with itself": lambda x: x[0].addmv_(x, x[:, 1].clone()),
}

APART = {
    "another row": lambda x: x[0].copy_(x[2]),
    "two rows": lambda x: x[0:2].copy_(x[2:4]),
    "another column": lambda x: x[:, 0].mul_(x[:, 1]),
    "the same row": lambda x: x[1].mul_(x[1]),
    "a transposed copy": lambda x: x.copy_(x.t().clone()),
    "its largest": lambda x: x.sub_(x.amax(0)),
    "half a row": lambda x: x[1][2:4].copy_(x[1][:2]),
}


def _set_real(x):
    x.real = x.mH.real


def sharded(mesh, placement, size):
    values = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return values, distribute_tensor(values, mesh, [placement], src_data_rank=None)


@pytest.mark.parametrize("use", OVERLAP)
@ranks(2)
def test_overlapping_views_are_refused(use):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    for placement in (Shard(0), Shard(1)):
        for size in (4, 5):
            for _ in range(2):  # the second run takes a cached decision
                _, x = sharded(mesh, placement, size)
                with pytest.raises((UnsupportedOperator, RuntimeError)) as caught:
                    OVERLAP[use](x)
                assert "clone() the" in str(caught.value), (placement, size)


@ranks(2)
def test_a_decision_that_is_cached_for_other_tensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    _, x = sharded(mesh, Shard(0), 4)
    x.copy_(x.t().clone())
    with pytest.raises(UnsupportedOperator, match=r"through a view: clone\(\) the view first"):
        x.copy_(x.t())


@pytest.mark.parametrize("use", APART)
@ranks(2)
def test_other_views_are_those_of_one_device(use):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    for placement in (Shard(0), Shard(1), Replicate()):
        for size in (4, 5):
            values, x = sharded(mesh, placement, size)
            APART[use](values)
            APART[use](x)
            assert torch.equal(x.full_tensor(), values), (placement, size)


@ranks(2)
def test_stock_torch_gives_another_result():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    with disabled():
        values, x = sharded(mesh, Shard(0), 4)
        _set_real(values := values.to(torch.complex128))
        assert isinstance(x, DTensor)
        x.copy_(x.t())
        assert not torch.equal(x.full_tensor(), values.real)
