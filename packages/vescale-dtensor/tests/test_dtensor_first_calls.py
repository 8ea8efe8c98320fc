"""The first call of an operator on a mesh of two axes searches redistributions in few steps, and finds the same."""

import cProfile
import pstats

import torch
import torch.distributed as dist

from vescale.dtensor import DTensor, Shard, disabled, init_device_mesh
from vescale_testing import run_ranks


def first_scores(*axes):
    """Return attention scores of rows over one axis and heads over the other, and how many functions ran."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    query, key = (DTensor.from_local(torch.rand(2, 2, 6, 8), mesh, [Shard(0), Shard(1)]) for _ in range(2))
    profile = cProfile.Profile()
    with profile:
        scores = query @ key.transpose(-1, -2)
    return scores, pstats.Stats(profile).total_calls


def scores_of_one_rank():
    """Nothing communicates, so the other ranks need not be there."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4)
    scores, calls = first_scores("dp", "tp")
    with disabled():
        stock, stock_calls = first_scores("rows", "heads")
    assert scores.placements == stock.placements
    assert torch.equal(scores.to_local(), stock.to_local())
    assert calls < stock_calls / 2, (calls, stock_calls)


def test_scores_of_sharded_rows_and_heads():
    run_ranks(scores_of_one_rank, 1)
