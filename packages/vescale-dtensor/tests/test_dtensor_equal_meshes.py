"""Equal meshes: a result is on the mesh of its operands, and communicates in the groups of that mesh."""

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import DTensor, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks


def two_equal_meshes(*shape):
    names = ("a", "b")[: len(shape)]
    return [init_device_mesh("cpu", shape, mesh_dim_names=names) for _ in range(2)]


def doubled(mesh):
    return DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)] * mesh.ndim).t() * 2


@ranks(4)
def test_results_are_on_the_mesh_of_their_operands():
    first, second = two_equal_meshes(2, 2)
    assert first == second
    assert first.get_group(0) is not second.get_group(0)
    for mesh in (first, second, first, second):
        for _ in range(3):  # decided, then from a cache
            assert doubled(mesh).device_mesh is mesh
    for mesh in (first["a"], second["a"]):  # a slice is made anew each time; its groups are those of its mesh
        assert doubled(mesh).device_mesh.get_group() is mesh.get_group()


@ranks(4)
def test_stock_gives_results_on_an_older_mesh():
    first, second = two_equal_meshes(2, 2)
    with disabled("operators"):
        doubled(first)
        assert doubled(second).device_mesh is first


@pytest.mark.parametrize("on_one_rank", [0, 1])
@ranks(3)
def test_one_rank_alone_ran_the_operator_before(on_one_rank):
    """On a mesh of two of three ranks: with the older mesh's decision, the ranks would wait in different groups."""
    first, second = two_equal_meshes(2)
    if dist.get_rank() == 2:
        return
    if dist.get_rank() == on_one_rank:
        doubled(first)
    whole = doubled(second).redistribute(placements=[Replicate()])
    assert torch.equal(whole.to_local(), torch.full((3, 4), 2.0))
