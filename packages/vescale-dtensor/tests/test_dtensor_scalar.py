"""The Python value of a DTensor is that of the whole tensor, on every rank."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    UnsupportedOperator,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks


@ranks(3)
def test_partial_values_are_reduced_first(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for rows in (6, 5, 1):
        whole = torch.arange(rows * 7.0).view(rows, 7)
        x = shard(whole, mesh, (Shard(0),))
        total = x.sum()
        assert total.placements == (Partial(),)
        assert total.item() == whole.sum().item()
        assert float(x.mean()) == whole.mean().item()
        if rows > 1:  # an empty shard has no maximum
            assert (x.max().item(), int(x.min())) == (whole.max().item(), 0)
        assert x.clamp(1, 2).prod().item() == whole.clamp(1, 2).prod().item()
        assert bool((x > rows * 7 - 3).any())  # true for elements of the last rank only
        assert not bool((x > 1).all())


@ranks(3)
def test_a_single_sharded_element_is_found_on_its_rank(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    assert shard(torch.tensor([5]), mesh, (Shard(0),)).item() == 5


@ranks(2)
def test_a_replicated_value_needs_no_communication(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(torch.tensor(2.5), mesh, (Replicate(),))
    with CommDebugMode() as counts:
        assert x.item() == 2.5
    assert counts.get_total_counts() == 0


@ranks(2)
def test_more_than_one_element_has_no_value(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        shard(torch.ones(2), mesh, (Shard(0),)).item()


@ranks(4)
def test_equal_is_decided_by_all_ranks_of_the_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    data = torch.arange(10.0).view(5, 2)
    other = data.clone()
    other[4, 1] = -1  # on the last rank alone
    for placement in (Shard(0), Shard(1), Replicate()):
        x, same, different = (distribute_tensor(t, mesh, [placement]) for t in (data, data.clone(), other))
        assert torch.equal(x, same)
        assert torch.equal(x, distribute_tensor(data, mesh, [Shard(1)]))
        assert not torch.equal(x, different)
        assert not torch.equal(x, x[:4])


@ranks(3)
def test_outside_the_mesh_there_is_no_value():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    above = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], src_data_rank=None) > 4
    if mesh.get_coordinate() is not None:
        assert above.any()
        assert not torch.equal(above, ~above)
        return
    for question in (lambda: bool(above.any()), lambda: torch.equal(above, ~above)):
        with pytest.raises(UnsupportedOperator, match="this rank is not in its mesh, so that it cannot know the value"):
            question()


@ranks(3)
def test_lists_of_values_are_those_of_one_device(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    whole = torch.arange(20.0).view(5, 4)
    x = shard(whole, mesh, (Shard(0),))
    assert x.tolist() == whole.tolist()
    assert x.sum(0).tolist() == whole.sum(0).tolist()
    assert x.sum().tolist() == whole.sum().item()
    assert x.to_local().tolist() != whole.tolist()
