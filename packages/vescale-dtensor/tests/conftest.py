"""Cut whole tensors into shards, independently of the code under test."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard


def _shard_of(tensor, mesh, placements):
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = tensor.chunk(mesh.size(axis), placement.dim)
            index = mesh.get_local_rank(axis)
            tensor = chunks[index] if index < len(chunks) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def _shard(tensor, mesh, placements):
    local = _shard_of(tensor, mesh, placements).detach().clone()
    size = {"shape": tensor.shape, "stride": tensor.stride()}
    made = DTensor.from_local(local, mesh, placements, run_check=False, **size).detach()
    return made.requires_grad_(tensor.requires_grad)


@pytest.fixture(scope="session")
def shard_of():
    """`shard_of(tensor, mesh, placements)`: this rank's part, as `torch.chunk` cuts it, one mesh axis after another."""
    return _shard_of


@pytest.fixture(scope="session")
def shard():
    """`shard(tensor, mesh, placements)`: a whole tensor as a DTensor, a leaf, without communication."""
    return _shard


@pytest.fixture(scope="session")
def assert_drawn_alike():
    """`assert_drawn_alike(draw, tensor, mesh, placements)`: `draw` of the shards is the shards of `draw`, bit for bit.

    The generator ends in the same state, which the next draw confirms. Returns what `draw` gave for the sharded tensor.
    """

    def check(draw, tensor, mesh, placements, **kwargs):
        where = (tuple(tensor.shape), tensor.dtype, placements)
        sharded = _shard(tensor, mesh, placements)
        torch.manual_seed(7)
        expected = draw(tensor.clone(), **kwargs)
        state, follow_up = torch.get_rng_state(), torch.randn(3)
        torch.manual_seed(7)
        actual = draw(sharded, **kwargs)
        assert torch.equal(torch.get_rng_state(), state), where
        assert torch.equal(torch.randn(3), follow_up), where
        assert isinstance(actual, DTensor), where
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual.to_local(), _shard_of(expected, mesh, actual.placements)), where
        return actual

    return check
