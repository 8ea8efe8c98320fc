"""Boxes and views of every placement are what torch's own splitting gives, for every rank of every small mesh."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.dtensor import (
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    UnsupportedPlacement,
    init_device_mesh,
)
from vescale.dtensor.extension import local_shape, local_views, pieces
from vescale_testing import ranks


def split(whole, mesh_shape, coord, placements):
    """Cut a tensor with torch's own splitting, axis after axis; a ragged placement slices what the others leave."""
    ragged = None
    for placement, size, index in zip(placements, mesh_shape, coord, strict=True):
        if isinstance(placement, RaggedShard):
            ragged = placement, index
        elif not placement.is_replicate():
            shards, _ = placement._split_tensor(whole, size, with_padding=False, contiguous=False)
            whole = shards[index]
    if ragged is None:
        return whole
    (placement, index), num_dims = ragged, len(ragged[0].dims)
    rows = whole.flatten(0, num_dims - 1)
    unit = len(rows) // sum(placement.local_units)
    return rows.split([units * unit for units in placement.local_units])[index]


def assert_pieces_match(shape, mesh_shape, placements):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    copies = torch.zeros(shape, dtype=torch.int64)
    for coord in itertools.product(*map(range, mesh_shape)):
        local = split(whole, mesh_shape, coord, placements)
        assert local_shape(shape, mesh_shape, coord, placements) == tuple(local.shape)
        seen = torch.zeros(local.shape, dtype=torch.int64)
        stored = []
        for piece in pieces(shape, mesh_shape, coord, placements):
            index = tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))
            assert tuple(piece.view(local).shape) == piece.box[1]
            assert torch.equal(piece.view(local), whole[index])
            piece.view(seen).add_(1)
            copies[index] += 1
            stored.append(int(piece.view(torch.arange(local.numel()).reshape(local.shape)).flatten()[0]))
        assert seen.eq(1).all()
        assert stored == sorted(stored)
    replicas = 1
    for placement, size in zip(placements, mesh_shape, strict=True):
        replicas *= size if placement.is_replicate() else 1
    assert copies.eq(replicas).all()


STOCK = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_every_pair_of_placements(mesh_shape):
    for shape in [(6, 6), (5, 7), (1, 3), (0, 4), (12, 2)]:
        own = [InterleavedShard(d, k) for d in (0, 1) for k in (2, 3) if shape[d] % k == 0]
        for placements in itertools.product(STOCK + own, repeat=2):
            assert_pieces_match(shape, mesh_shape, placements)


@pytest.mark.parametrize("order", list(itertools.permutations([Shard(0), Shard(0), _StridedShard(0, split_factor=2)])))
def test_three_axes_on_one_dim_in_any_order(order):
    for size in (0, 1, 7, 8, 24):
        for mesh_shape in [(2, 2, 2), (2, 1, 3), (3, 2, 2)]:
            assert_pieces_match((size, 2), mesh_shape, order)


@pytest.mark.parametrize("other", [Replicate(), Shard(0), Shard(1), Shard(2), InterleavedShard(0, 2)])
@pytest.mark.parametrize("dims", [(0,), (0, 1), (0, 1, 2)])
def test_ragged_after_any_other_placement_on_either_side(other, dims):
    for units in [(1, 1), (0, 4), (3, 1), (2, 2)]:
        ragged = RaggedShard(dims, units)
        assert_pieces_match((8, 4, 2), (2, 2), (ragged, other))
        assert_pieces_match((8, 4, 2), (2, 2), (other, ragged))
        assert_pieces_match((8, 4, 2), (1, 2, 2), (Replicate(), other, ragged))


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_meshes_of_up_to_eight_ranks(data):
    mesh_shape = data.draw(st.sampled_from([(1,), (3,), (8,), (2, 3), (4, 2), (2, 2, 2), (1, 5)]))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    dims = st.integers(0, len(sizes) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(lambda dim, k: _StridedShard(dim, split_factor=k), dims, st.integers(1, 4)),
        st.builds(lambda dim: InterleavedShard(dim, 3 if sizes[dim] % 3 == 0 else 1), dims),
    )
    placements = data.draw(st.tuples(*[kinds for _ in mesh_shape]))
    assert_pieces_match(tuple(sizes), mesh_shape, placements)


@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_random_units(data):
    mesh_shape = data.draw(st.sampled_from([(4,), (2, 3), (3, 2), (2, 2, 2)]))
    axis = data.draw(st.integers(0, len(mesh_shape) - 1))
    units = data.draw(st.lists(st.integers(0, 3), min_size=mesh_shape[axis], max_size=mesh_shape[axis]).filter(any))
    num_dims = data.draw(st.integers(1, 3))
    shape = (4 * sum(units), 6, 2)  # every other placement leaves a multiple of the units
    others = st.sampled_from([Replicate(), Shard(1), Shard(2), InterleavedShard(1, 3)])
    placements = [data.draw(others) for _ in mesh_shape]
    placements[axis] = RaggedShard(range(num_dims), units)
    assert_pieces_match(shape, mesh_shape, tuple(placements))


def test_a_scalar_is_one_box():
    assert [piece.box for piece in pieces((), (2,), (1,), (Replicate(),))] == [((), ())]


def test_other_units_give_other_boxes():
    first = pieces((4, 2), (2,), (0,), (RaggedShard((0,), (1, 3)),))
    assert first != pieces((4, 2), (2,), (0,), (RaggedShard((0,), (3, 1)),))
    assert pieces((6,), (2,), (0,), (InterleavedShard(0, 3),)) != pieces((6,), (2,), (0,), (Shard(0),))


def test_what_does_not_fit_is_refused_for_every_coordinate():
    cases = [
        ((7, 2), (2,), [RaggedShard((0,), (1, 2))], "7 is not divisible by 3"),
        ((6, 2), (2,), [RaggedShard((0,), (1, 1, 1))], "names 3 ranks; its mesh axis has 2"),
        ((6,), (2,), [RaggedShard((0, 1), (1, 2))], "flattens 2 dims"),
        ((6,), (2, 2), [RaggedShard((0,), (1, 2))] * 2, "at most one RaggedShard"),
        ((5, 2), (2, 2), [Shard(0), RaggedShard((0,), (1, 2))], "2 is not divisible by 3"),  # parts of 3 and 2
        ((8,), (2,), [InterleavedShard(0, 3)], "dim made of 3 equal parts; dim 0 of shape .8,. has size 8"),
        ((8,), (2,), [Shard(1)], "names dim 1"),
        ((8,), (2,), [], r"expected one placement for each axis of a mesh of shape \(2,\), got \(\)"),
    ]
    for shape, mesh_shape, placements, message in cases:
        for coord in [None, *itertools.product(*map(range, mesh_shape))]:
            with pytest.raises(ValueError, match=message):
                pieces(shape, mesh_shape, coord, tuple(placements))
    with pytest.raises(UnsupportedPlacement, match=r"Partial\(sum\).*no rank holds its elements; redistribute"):
        pieces((4,), (2,), (0,), (Partial(),))


@ranks(4)
def test_views_of_real_shards_can_be_written():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(48.0).reshape(12, 4)
    for placements in [(RaggedShard((0,), (2, 1)), InterleavedShard(1, 2)), (InterleavedShard(0, 3), Shard(0))]:
        local = torch.zeros(local_shape((12, 4), (2, 2), tuple(mesh.get_coordinate()), placements))
        for box, view in local_views(local, (12, 4), mesh, placements):
            view.copy_(whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))])
        assert torch.equal(local, split(whole, (2, 2), mesh.get_coordinate(), placements))


@ranks(3)
def test_a_rank_outside_the_mesh_holds_nothing():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 2])
    held = local_views(torch.empty(2, 2), (4, 2), mesh, [Shard(0)])
    assert len(held) == (torch.distributed.get_rank() != 1)
