"""An embedding whose vocabulary is sharded looks up what one device looks up, bit for bit, and may be read twice."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import implicit_replication

from vescale.dtensor import Partial, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def inputs(vocabulary=7, width=4):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator).requires_grad_()
    return weight, torch.randint(vocabulary, (4, 6), generator=generator)


def assert_same_lookup(shard, mesh, of_weight, of_indices, sizes=(7, 4), **options):
    weight, indices = inputs(*sizes)
    expected = F.embedding(indices, weight, **options)
    expected.square().sum().backward()
    sharded = shard(weight, mesh, of_weight)
    actual = F.embedding(shard(indices, mesh, of_indices), sharded, **options)
    where = (of_weight, of_indices, sizes, options)
    assert torch.equal(actual.full_tensor(), expected), where
    assert actual.stride() == expected.stride(), where
    actual.square().sum().backward()
    gradient = sharded.grad.full_tensor()
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-12, atol=1e-14, msg=lambda m: f"{m} {where}")
    return actual


@ranks(3)
def test_uneven_and_empty_shards(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for vocabulary in (2, 4, 7):
        actual = assert_same_lookup(shard, mesh, (ROWS,), (WHOLE,), (vocabulary, 4))
        assert actual.placements == (Partial(),)
    for of_weight, of_indices in itertools.product((ROWS, COLUMNS, WHOLE), (WHOLE, Shard(0), Shard(1))):
        assert_same_lookup(shard, mesh, (of_weight,), (of_indices,), padding_idx=2)


@ranks(4)
def test_two_axes(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for of_weight in ((ROWS, ROWS), (ROWS, COLUMNS), (COLUMNS, ROWS), (WHOLE, ROWS), (ROWS, WHOLE)):
        for of_indices in ((ROWS, WHOLE), (WHOLE, WHOLE), (WHOLE, ROWS)):
            assert_same_lookup(shard, mesh, of_weight, of_indices)
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    for of_weight in ((ROWS, ROWS), (WHOLE, ROWS)):
        assert_same_lookup(shard, mesh, of_weight, (ROWS, WHOLE))


@ranks(2)
def test_gradient_scaled_by_frequency(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for of_weight, of_indices in itertools.product((ROWS, COLUMNS, WHOLE), (WHOLE, Shard(0))):
        assert_same_lookup(shard, mesh, (of_weight,), (of_indices,), scale_grad_by_freq=True, padding_idx=1)


@ranks(2)
def test_plain_indices_and_wrong_indices(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight, indices = inputs()
    sharded = shard(weight, mesh, (ROWS,))
    with pytest.raises(
        RuntimeError, match=r"got mixed torch\.Tensor and DTensor; distribute the tensor of shape \(4, 6"
    ):
        F.embedding(indices, sharded)
    with implicit_replication():
        assert torch.equal(F.embedding(indices, sharded).full_tensor(), F.embedding(indices, weight))
    for wrong in (7, -1, 100):
        indices[0, 0] = wrong
        with pytest.raises(IndexError, match="index out of range in self"):
            F.embedding(shard(indices, mesh, (WHOLE,)), sharded)


@ranks(2)
def test_two_readers_and_two_lookups(shard):
    """Stock's placement keeps the mask of the last lookup, for its first reader."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight, indices = inputs()

    def norms(weight, first, second):
        one, two = F.embedding(first, weight), F.embedding(second, weight)
        return one * one.square().mean(-1, keepdim=True).rsqrt() + two.square()

    expected = norms(weight, indices, indices.flip(0))
    arguments = [shard(t, mesh, p) for t, p in ((weight, (ROWS,)), (indices, (WHOLE,)), (indices.flip(0), (WHOLE,)))]
    torch.testing.assert_close(norms(*arguments).full_tensor(), expected, rtol=1e-12, atol=0)
    with disabled(), pytest.raises((AssertionError, RuntimeError)):
        torch.testing.assert_close(norms(*arguments).full_tensor(), expected, rtol=1e-12, atol=0)
