"""A process group is made by its members alone, whatever other groups each of them knows."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import DeviceMesh, Shard, distribute_tensor
from vescale.dtensor.extension import group_of_ranks
from vescale_testing import ranks

MEMBERS = [0, 1, 3]


@ranks(4)
def test_members_that_know_different_groups():
    dist.new_group([0])  # torch counts it on rank 0 only, before 2.14
    dist.new_group([0], use_local_synchronization=True)  # and this one in every version
    if dist.get_rank() not in MEMBERS:
        return
    group = group_of_ranks([3, 0, 1])
    assert dist.get_process_group_ranks(group) == MEMBERS
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(MEMBERS)
    assert group_of_ranks(MEMBERS) is group


@ranks(3)
def test_members_in_an_order_of_their_own():
    group = group_of_ranks([2, 0, 1], keep_order=True)
    everyone = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(everyone, torch.tensor([dist.get_rank()]), group=group)
    assert torch.cat(everyone).tolist() == [2, 0, 1]
    assert group_of_ranks([2, 0, 1]) is dist.group.WORLD


@ranks(2)
def test_ranks_that_make_no_group_here():
    for wrong in ([1 - dist.get_rank()], [0, 1, 1], []):
        with pytest.raises(ValueError, match=rf"on rank {dist.get_rank()}: expected each rank once and this rank"):
            group_of_ranks(wrong)


@ranks(2)
def test_all_ranks_are_the_world():
    assert group_of_ranks([1, 0]) is dist.group.WORLD


@ranks(2)
def test_a_group_for_a_purpose():
    """Its collectives have no order among those of others: one rank begins with the one, the other with the other."""
    group = group_of_ranks([0, 1], purpose="gathers")
    assert group is not dist.group.WORLD
    assert group is group_of_ranks([1, 0], purpose="gathers")
    assert group is not group_of_ranks([0, 1], purpose="sums")
    ones, twos = torch.ones(1), torch.full((1,), 2.0)
    both = [(ones, dist.group.WORLD), (twos, group)]
    works = [dist.all_reduce(each, group=where, async_op=True) for each, where in both[:: 1 - 2 * dist.get_rank()]]
    for work in works:
        work.wait()
    assert (ones.item(), twos.item()) == (2, 4)


@ranks(4)
def test_stock_names_differ():
    """Stock makes the same group under two names, and its members wait for each other."""
    dist.new_group([0], use_local_synchronization=True)  # no version of torch counts it on the other ranks
    if dist.get_rank() in MEMBERS:
        with pytest.raises(RuntimeError):
            dist.new_group(MEMBERS, use_local_synchronization=True, timeout=timedelta(seconds=1))


@ranks(6)
def test_joint_moves_on_a_part_of_the_ranks():
    """Two axes are gathered at once, on a mesh beside which some ranks have meshes of their own."""
    DeviceMesh("cpu", [0, 3])
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    whole = torch.arange(20.0).view(10, 2)
    if mesh.get_coordinate() is not None:
        assert torch.equal(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).full_tensor(), whole)
        assert torch.equal(distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).full_tensor(), whole)


@ranks(3)
def test_outside_the_mesh_shapes_are_known():
    """Operators that gather give a rank outside the mesh the shape of the result, and write nothing there."""
    mesh = DeviceMesh("cpu", [0, 1])
    whole = torch.arange(12.0).view(3, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    for function in (torch.flatten, torch.logcumsumexp, torch.kron):
        arguments = [whole] if function is torch.flatten else [whole, 0 if function is torch.logcumsumexp else whole]
        given = [sharded if argument is whole else argument for argument in arguments]
        expected, actual = function(*arguments), function(*given)
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
        if mesh.get_coordinate() is None:
            assert actual.to_local().numel() == 0
        else:
            assert torch.equal(actual.full_tensor(), expected)
