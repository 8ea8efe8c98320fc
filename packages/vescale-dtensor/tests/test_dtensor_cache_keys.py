"""A second call with other arguments on the same operands is not answered from the first."""

import torch

from vescale.dtensor import DTensor, Partial, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks


@ranks(2)
def test_arguments_that_decide_the_shape(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.rand(6, 8, generator=torch.Generator().manual_seed(1))
    for placements in ((Replicate(),), (Shard(0),)):
        x = shard(whole, mesh, placements)
        for count in (1, 3, 2, 1):
            for actual, expected in zip(torch.topk(x, count), torch.topk(whole, count), strict=True):
                assert actual.shape == expected.shape
                assert torch.equal(actual.full_tensor(), expected)
            assert torch.histc(x, count).shape == (count,)
            assert torch.equal(torch.histc(x, count, 0, 1).full_tensor(), torch.histc(whole, count, 0, 1))


@ranks(2)
def test_topk_of_two_counts_in_backward(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for count in (1, 2, 1):
        whole = torch.rand(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        x = shard(whole, mesh, (Replicate(),))
        for tensor in (whole, x):
            values = torch.topk(tensor, count).values
            (values / values.sum(-1, keepdim=True)).square().sum().backward()
        assert torch.equal(x.grad.to_local(), whole.grad)


@ranks(2)
def test_views_in_several_dtypes(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for placements in ((Replicate(),), (Shard(0),), (Shard(1),)):
        x = shard(whole, mesh, placements)
        for dtype in (torch.int32, torch.int64, torch.complex128, torch.int32):
            actual, expected = x.view(dtype), whole.view(dtype)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual.full_tensor(), expected), (dtype, placements)


@ranks(2)
def test_views_of_partial_sums_in_another_dtype():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    halves = DTensor.from_local(torch.full((2, 4), 0.75), mesh, [Partial()])
    assert torch.equal(halves.view(torch.int32).full_tensor(), torch.full((2, 4), 1.5).view(torch.int32))


@ranks(3)
def test_keywords_that_decide_which_dims_may_be_sharded(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    whole = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(1))
    x, y = (shard(each, mesh, (Shard(0),)) for each in (whole, whole.flip(0)))
    for dim in (1, 0, 2, -3, 0):
        actual, expected = torch.linalg.cross(x, y, dim=dim), torch.linalg.cross(whole, whole.flip(0), dim=dim)
        assert torch.equal(actual.full_tensor(), expected), dim


def test_stock_leaves_that_keyword_out():
    propagator = DTensor._op_dispatcher.sharding_propagator
    entries = propagator.op_to_schema_info | propagator.op_to_schema_info_for_single_dim_strategy
    cross = torch.ops.aten.linalg_cross.default
    assert entries[cross].static_kwargkey == ["dim"]
    with disabled("operators"):
        entries = propagator.op_to_schema_info | propagator.op_to_schema_info_for_single_dim_strategy
        assert not entries[cross].static_kwargkey
