"""The first call of an operator on a mesh of two axes takes few steps, and decides as with all of them."""

import contextlib
import cProfile
import itertools
import pstats

import torch
import torch.distributed as dist

from vescale.dtensor import DTensor, Partial, Replicate, Shard, disabled, init_device_mesh
from vescale.dtensor._install import ROWS
from vescale.dtensor._torch.decisions import forget_decisions
from vescale_testing import run_ranks

LAYOUTS = list(itertools.product((Replicate(), Shard(0), Partial()), (Replicate(), Shard(1), Partial())))
CALLS = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "in place": lambda x, y: x.add_(y),
    "cat": lambda x, y: torch.cat([x, y]),
    "lists": lambda x, y: torch._foreach_add([x, y], [y, y])[0],
    "softmax": lambda x, y: x.softmax(-1) + y,
    "mean": lambda x, y: (x - y).mean(0),
}


def of_four_ranks(function):
    """Return a function that runs on one of four ranks, the others of which need not be there."""

    def run():
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=4)
        function()

    return run


def first_scores(*axes):
    """Return attention scores of rows over one axis and heads over the other, and how many functions ran."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    query, key = (DTensor.from_local(torch.rand(2, 2, 6, 8), mesh, [Shard(0), Shard(1)]) for _ in range(2))
    profile = cProfile.Profile()
    with profile:
        scores = query @ key.transpose(-1, -2)
    return scores, pstats.Stats(profile).total_calls


def test_scores_of_sharded_rows_and_heads():
    @of_four_ranks
    def on_a_rank():
        scores, calls = first_scores("dp", "tp")
        with disabled():
            stock, stock_calls = first_scores("rows", "heads")
        assert scores.placements == stock.placements
        assert torch.equal(scores.to_local(), stock.to_local())
        assert calls < stock_calls / 2, (calls, stock_calls)

    run_ranks(on_a_rank, 1)


def test_a_sum_of_sharded_operands_is_decided_at_once():
    @of_four_ranks
    def on_a_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        x, y = (DTensor.from_local(torch.rand(4, 4), mesh, [Shard(0), Shard(1)]) for _ in range(2))
        found = []
        for context in (contextlib.nullcontext, all_ways_priced):
            with context():
                forget_decisions()
                profile = cProfile.Profile()
                with profile:
                    assert (x + y).placements == x.placements
                found.append(pstats.Stats(profile).total_calls)
        assert found[0] < found[1] / 2, found

    run_ranks(on_a_rank, 1)


@contextlib.contextmanager
def all_ways_priced():
    (row,) = (row for row in ROWS if row.name == "operands as given")
    row.patch.remove()
    try:
        yield
    finally:
        row.patch.install()


def decisions(mesh, context):
    """Return the placements of the result of each call on each pair of layouts, or the kind of its error."""
    found = {}
    for name, first, second in itertools.product(CALLS, LAYOUTS, LAYOUTS):
        x, y = (DTensor.from_local(torch.ones(4, 4), mesh, layout) for layout in (first, second))
        with context():
            forget_decisions()
            try:
                found[name, first, second] = CALLS[name](x, y).placements
            except (RuntimeError, NotImplementedError) as error:
                found[name, first, second] = type(error)
    return found


def test_decisions_are_those_of_all_ways():
    @of_four_ranks
    def on_a_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        found, expected = (decisions(mesh, context) for context in (contextlib.nullcontext, all_ways_priced))
        assert {case for case in expected if found[case] != expected[case]} == set()
        assert len(set(expected.values())) > 10

    run_ranks(on_a_rank, 1, timeout=240)
