"""Every rank knows its box of the global tensor, and the order in which one device fills that tensor's memory."""

import itertools

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import DTensor, Partial, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh
from vescale.dtensor._random.global_position import BatchWindow, fills_memory, memory_order, position_of
from vescale_testing import ranks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_memory_order_of_permuted_tensors(order):
    permuted = torch.empty([5, 3, 2]).permute(order)
    assert memory_order(tuple(permuted.shape), permuted.stride()) == tuple(order.index(d) for d in range(3))
    assert fills_memory(tuple(permuted.shape), permuted.stride())
    assert position_of("normal_", permuted, ()).is_contiguous == permuted.is_contiguous()


@pytest.mark.parametrize(
    "tensor, order",
    [
        (torch.empty(4, 4)[:, :2], (0, 1)),
        (torch.empty(4)[::2], (0,)),
        (torch.empty(4, 4)[:, :2].t(), (1, 0)),
        (torch.empty(3, 4, 5).transpose(0, 1)[1:], (1, 0, 2)),
    ],
    ids=["columns", "strided", "transposed columns", "slice of a transposed one"],
)
def test_memory_with_gaps_has_an_order_too(tensor, order):
    position = position_of("normal_", tensor, ())
    assert position.order == order
    assert not position.is_contiguous
    assert not fills_memory(tuple(tensor.shape), tensor.stride())


def test_elements_that_share_memory_have_no_position():
    with pytest.raises(UnsupportedRandomOperator, match=r"call \.contiguous\(\) first: several of its elements share"):
        position_of("normal_", torch.empty(1, 3).expand(4, 3), ())
    assert position_of("normal_", torch.empty(1, 3).expand(1, 3), ()).shape == (1, 3)


def test_dims_of_size_one_and_empty_tensors_keep_their_order():
    assert memory_order((3, 1, 4), (4, 4, 1)) == (0, 1, 2)
    assert memory_order((4, 1, 3), (1, 7, 4)) == (2, 1, 0)
    assert memory_order((0, 3), (1, 9)) == (0, 1)
    assert memory_order((), ()) == ()
    assert fills_memory((3, 1, 4), (4, 99, 1))


def test_windows_cut_the_batch_from_the_inside_out():
    position = position_of("dropout", torch.empty(2, 5), (BatchWindow(1, 3), BatchWindow(1, 2)))
    assert position.shape == (12, 5)
    assert position.boxes == (((8, 0), (2, 5)),)  # part 1 of 3 of 2 rows, in part 1 of 2 of 6 rows


def test_one_row_in_a_batch_must_tell_the_memory_order():
    window = (BatchWindow(1, 3),)
    assert position_of("dropout", torch.empty(1, 5), window).shape == (3, 5)
    assert position_of("dropout", torch.empty(1, 4, 5).transpose(1, 2), window).order == (0, 2, 1)
    for row in (torch.empty(5, 1).t(), torch.empty(1, 8)[:, :5]):  # the global batch is transposed, or has gaps
        with pytest.raises(UnsupportedRandomOperator, match="one row does not determine the memory order of the batch"):
            position_of("dropout", row, window)


@ranks(4)
def test_the_boxes_of_all_ranks_tile_the_tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Shard(1), Shard(1))]
    for shape, placements in itertools.product([(5, 3), (1, 2), (3, 1), (0, 4), (8, 8)], layouts):
        position = position_of("normal_", sharded(shape, mesh, placements), ())
        boxes = [None] * 4
        dist.all_gather_object(boxes, position.boxes)
        count = torch.zeros(shape, dtype=torch.int64)
        for offsets, sizes in itertools.chain(*boxes):
            count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert (count == 1).all(), (shape, placements, boxes)


@ranks(3)
def test_a_rank_outside_the_mesh_holds_nothing_but_draws_along():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    part = type(mesh)("cpu", [0, 1], mesh_dim_names=("tp",))
    local = torch.empty(3 if dist.get_rank() < 2 else 0, 4)
    tensor = DTensor.from_local(local, part, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1))
    torch.manual_seed(3)
    tensor.normal_()
    torch.manual_seed(3)
    expected = torch.empty(6, 4).normal_()
    if dist.get_rank() < 2:
        assert torch.equal(tensor.to_local(), expected.chunk(2)[dist.get_rank()])
    state = torch.get_rng_state()
    states = [torch.empty_like(state) for _ in range(3)]
    dist.all_gather(states, state)
    assert all(torch.equal(state, other) for other in states)


@ranks(2)
def test_a_partial_tensor_has_no_position():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tensor = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    expected = (
        r"normal_ on a DTensor of shape \(4,\), placements \(Partial\(sum\),\).*redistribute to Shard or Replicate"
    )
    with pytest.raises(UnsupportedRandomOperator, match=expected):
        position_of("normal_", tensor, ())
    assert position_of("normal_", tensor.redistribute(placements=[Replicate()]), ()).boxes == (((0,), (4,)),)


def sharded(shape, mesh, placements):
    """An uninitialised DTensor, cut without the code under test."""
    local = torch.empty(shape)
    for axis, placement in enumerate(placements):
        chunks = local.chunk(mesh.size(axis), placement.dim)
        index = mesh.get_local_rank(axis)
        local = chunks[index] if index < len(chunks) else local.narrow(placement.dim, 0, 0)
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
