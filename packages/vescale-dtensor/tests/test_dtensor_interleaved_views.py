"""Merging dims of an interleaved tensor equals one device, also where the ranks do not divide its parts."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import InterleavedShard, Replicate, disabled, distribute_tensor, init_device_mesh
from vescale_testing import ranks

SHAPES = [(4, 8, 7), (2, 16, 2), (16, 7, 16), (12, 1, 3), (6, 2, 3)]


def merged(shape, mesh):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    sharded = distribute_tensor(whole, mesh, [InterleavedShard(0, 2)]).requires_grad_()
    result = sharded.reshape(-1, shape[-1])
    result.square().sum().backward()
    assert torch.equal(result.full_tensor(), whole.reshape(-1, shape[-1]))
    assert torch.equal(sharded.grad.full_tensor(), 2 * whole)
    return result


@ranks(3)
def test_any_shape():
    mesh = init_device_mesh("cpu", (3,))
    for shape in SHAPES:
        merged(shape, mesh)


@ranks(3)
def test_even_parts_stay_where_they_are():
    mesh = init_device_mesh("cpu", (3,))
    sharded = distribute_tensor(torch.zeros(12, 2, 5), mesh, [InterleavedShard(0, 2)])
    with CommDebugMode() as counts:
        result = sharded.reshape(-1, 5)
    assert counts.get_total_counts() == 0
    assert result.placements != (Replicate(),)


@ranks(3)
def test_stock_torch_fails():
    with disabled("operators"), pytest.raises(RuntimeError, match="is invalid for input of size"):
        merged((4, 8, 7), init_device_mesh("cpu", (3,)))
