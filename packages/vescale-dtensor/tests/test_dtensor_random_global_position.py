"""Random operators follow the memory of the global tensor: its strides, and gaps between its rows, on every shard."""

import itertools

import pytest
import torch
import torch.distributed as dist

from vescale.dtensor import DTensor, Partial, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh
from vescale_testing import ranks

DRAWS = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "random_": lambda x: x.random_(100),
}


def assert_drawn_in_memory_order(shard, shard_of, mesh, whole):
    """Fill a tensor in place, and its shards over every dim; `whole` itself, because a clone has no gaps."""
    for (name, draw), placement in itertools.product(DRAWS.items(), map(Shard, range(whole.ndim))):
        sharded = shard(whole, mesh, (placement,))
        torch.manual_seed(3)
        draw(whole)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        draw(sharded)
        where = (name, placement, tuple(whole.shape), whole.stride())
        assert torch.equal(sharded.to_local(), shard_of(whole, mesh, (placement,))), where
        assert torch.equal(torch.get_rng_state(), state), where


@ranks(2)
def test_permuted_tensors(shard, shard_of):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for order in itertools.permutations(range(3)):
        assert_drawn_in_memory_order(shard, shard_of, mesh, torch.empty(5, 3, 2).permute(order))


@ranks(2)
def test_memory_with_gaps(shard, shard_of):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for whole in (
        torch.empty(4, 40)[:, :20],  # columns
        torch.empty(40)[::2],
        torch.empty(4, 40)[:, :20].t(),
        torch.empty(3, 40, 5).transpose(0, 1)[1:],
    ):
        assert_drawn_in_memory_order(shard, shard_of, mesh, whole)


@ranks(2)
def test_dims_of_size_one_and_empty_tensors(shard, shard_of):
    """Their strides are arbitrary."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    memory = torch.empty(200)
    for shape, stride in [
        ((3, 1, 40), (40, 40, 1)),
        ((3, 1, 40), (40, 99, 1)),
        ((40, 1, 3), (1, 7, 40)),
        ((0, 3), (1, 9)),
        ((1, 40), (1, 1)),
    ]:
        assert_drawn_in_memory_order(shard, shard_of, mesh, memory.as_strided(shape, stride))


@ranks(2)
def test_elements_that_share_memory_are_refused(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    row = torch.empty(1, 3)
    with pytest.raises(UnsupportedRandomOperator, match=r"call \.contiguous\(\) first: several of its elements share"):
        shard(row.expand(4, 3), mesh, (Shard(0),)).normal_()
    assert shard(row.expand(1, 3), mesh, (Shard(0),)).normal_().shape == (1, 3)


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
def test_a_partial_tensor_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tensor = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    expected = (
        r"normal_\S* on a DTensor of shape \(4,\), placements \(Partial\(sum\),\).*redistribute to Shard or Replicate"
    )
    with pytest.raises(UnsupportedRandomOperator, match=expected):
        tensor.normal_()
    torch.manual_seed(3)
    expected = torch.empty(4).normal_()
    torch.manual_seed(3)
    assert torch.equal(tensor.redistribute(placements=[Replicate()]).normal_().to_local(), expected)
