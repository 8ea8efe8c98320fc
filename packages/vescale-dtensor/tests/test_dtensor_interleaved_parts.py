"""A merged matrix whose parts are interleaved over the ranks is split without communication."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import DTensor, InterleavedShard, Replicate, Shard, init_device_mesh
from vescale_testing import ranks


def interleaved(tensor, mesh, num_parts):
    """Cut dim 0 of a replicated tensor, independently of the code under test."""
    parts = tensor.detach().view(num_parts, -1, *tensor.shape[1:]).chunk(mesh.size(), 1)
    local = parts[mesh.get_local_rank()].flatten(0, 1).clone()
    size = {"shape": tensor.shape, "stride": tensor.stride()}
    placements = [InterleavedShard(0, num_parts)]
    return DTensor.from_local(local, mesh, placements, run_check=False, **size).detach().requires_grad_()


def tensors(num_parts):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 5, 6), (num_parts * 8, 6), (num_parts * 8,)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def parts_of(y, num_parts, how):
    if how == "chunk":
        return y.chunk(num_parts, dim=-1)
    return y.split(8 if how == "split" else [8] * num_parts, dim=2)


def assert_same_parts(shard, mesh, num_parts, how):
    x, weight, bias = tensors(num_parts)
    expected = parts_of(F.linear(x, weight, bias), num_parts, how)
    sum(part.square().sum() * (i + 1) for i, part in enumerate(expected)).backward()
    sharded = shard(x, mesh, (Replicate(),)), interleaved(weight, mesh, num_parts), interleaved(bias, mesh, num_parts)
    with CommDebugMode() as counts:
        actual = parts_of(F.linear(*sharded), num_parts, how)
    for one, other in zip(actual, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-12, atol=1e-14)
    sum(part.square().sum() * (i + 1) for i, part in enumerate(actual)).backward()
    for one, other in zip(sharded, (x, weight, bias), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-13)
    return actual, counts.get_total_counts()


@ranks(2)
def test_parts_stay_sharded(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for num_parts in (2, 3):
        for how in ("split", "sizes", "chunk"):
            actual, num_collectives = assert_same_parts(shard, mesh, num_parts, how)
            assert num_collectives == 0
            assert all(part.placements == (Shard(2),) for part in actual)


@ranks(3)
def test_parts_that_the_ranks_do_not_divide(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))  # 8 columns over 3 ranks
    assert_same_parts(shard, mesh, 3, "split")


@ranks(2)
def test_other_splits():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _, weight, _ = tensors(3)
    sharded = interleaved(weight, mesh, 3)
    for sizes in (6, 12, [8, 16], [4, 4, 16], 24):
        for one, other in zip(sharded.split(sizes), weight.split(sizes), strict=True):
            assert torch.equal(one.full_tensor(), other)
    for one, other in zip(sharded.split(2, dim=1), weight.split(2, dim=1), strict=True):
        assert torch.equal(one.full_tensor(), other)


@ranks(2)
def test_a_plain_cut_is_not_an_interleaved_one():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _, weight, _ = tensors(3)
    local = weight.detach().chunk(2)[mesh.get_local_rank()]
    mislabelled = DTensor.from_local(local, mesh, [InterleavedShard(0, 3)])
    assert not torch.equal(mislabelled.split(8)[0].full_tensor(), weight.split(8)[0])
