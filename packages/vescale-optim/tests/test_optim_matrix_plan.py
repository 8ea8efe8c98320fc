"""Every part of a matrix goes to its owner once, and back to each rank that needs it (simulated ranks)."""

import itertools
import time
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import InterleavedShard, RaggedShard
from vescale.optim._muon.layout import MatrixLayout, Part
from vescale.optim._muon.plan import assign_owners, matrix_cost, share_matrices


@dataclass(frozen=True)
class Axis:
    """An axis as one of its ranks sees it."""

    name: str
    size: int
    coord: int
    ranks: tuple[int, ...]


def axes_of(rank, shape):
    """Return the axes of a mesh (copies, shards, tp) for one rank."""
    grid = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    place = tuple(int(c) for c in (grid == rank).nonzero()[0])
    found = []
    for dim, name in enumerate(("copies", "shards", "tp")):
        line = grid[tuple(slice(None) if d == dim else c for d, c in enumerate(place))]
        found.append(Axis(name, shape[dim], place[dim], tuple(line.tolist())))
    return found


#: Shape, placement over tp, start of the parameter in its buffer and elements after it.
PARAMETERS = {
    "rows": ((7, 5), Shard(0), 0, 12),
    "columns": ((5, 7), Shard(1), 3, 9),
    "fused": ((12, 5), InterleavedShard(0, 3), 8, 20),
    "thin": ((4, 1), Shard(1), 1, 2),
    "replicated": ((6, 4), Replicate(), 2, 13),
    "ragged rows": ((6, 4), RaggedShard((0,), (1, 2)), 5, 11),
    "ragged": ((4, 3), RaggedShard((0, 1), (1, 3)), 0, 6),
    "empty": ((0, 3), Shard(1), 0, 4),
    "stack": ((4, 3), Shard(1), 7, 10),
    "experts": ((4, 3), "passes by", 4, 9),
}
COUNTS = {"stack": (3, 3), "experts": (2, 1)}


def layouts_of(rank, shape, zero, names=PARAMETERS):
    copies, shards, tp = axes_of(rank, shape)
    found = []
    for name in names:
        matrix, placement, start, _ = PARAMETERS[name]
        over_tp = placement != "passes by" and tp.size > 1
        cuts = over_tp and placement != Replicate()
        copying = [axis for axis in (copies, *(() if zero else (shards,))) if axis.size > 1]
        found.append(
            MatrixLayout(
                name,
                matrix,
                COUNTS.get(name, (1, 1))[tp.coord],
                (tp.size,),
                (tp.ranks,),
                (placement if over_tp else Replicate(),),
                cutting=(tp,) if cuts else (),
                copying=(*copying, *([tp] if over_tp and not cuts else [])),
                part=Part(shards, start, shard_numel(name, shards.size)) if zero and shards.size > 1 else None,
                is_alone=name not in COUNTS,
            )
        )
    return found


def shard_numel(name, num_shards):
    (rows, cols), _, start, after = PARAMETERS[name]
    return -(-(start + rows * cols * max(COUNTS.get(name, (1,))) + after) // num_shards)


SHAPES = [(1, 1, 2), (1, 2, 2), (1, 3, 2), (2, 2, 2), (2, 1, 2), (2, 3, 1), (1, 4, 1)]


def elements(span):
    """Return the flat indices, in the whole matrix, of the elements of a span."""
    rows, cols = span.job.layout.shape
    index = torch.arange(rows * cols).view(rows, cols)
    return span.cell.take(index)[span.start : span.stop].tolist()


def what(spans):
    return [(span.job.tensor, span.job.index, elements(span)) for span in spans]


def plan_of(rank, shape, zero, used=range(10), names=PARAMETERS):
    alone, sharings = share_matrices(layouts_of(rank, shape, zero, names))
    return alone, [(sharing, sharing.routes(frozenset(used))) for sharing in sharings]


def mesh_rank(sharing, place, rank, shape):
    """Return the global rank at a place of a sharing's grid, for the one that this rank is in."""
    by_ranks = {axis.ranks: dim for dim, axis in enumerate(axes_of(rank, shape))}
    here = [axis.coord for axis in axes_of(rank, shape)]
    for ranks, coord in sharing.grid.coords[place].items():
        here[by_ranks[ranks]] = coord
    return (here[0] * shape[1] + here[1]) * shape[2] + here[2]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_make_whole_matrices_and_come_back(shape, zero):
    world = shape[0] * shape[1] * shape[2]
    for used in (range(len(PARAMETERS)), (0, 4, 9), ()):
        plans = [plan_of(rank, shape, zero, used) for rank in range(world)]
        for rank, (_, shared) in enumerate(plans):
            for number, (sharing, routes) in enumerate(shared):
                me = sharing.grid.place
                for place in range(len(sharing.grid.coords)):
                    other = plans[mesh_rank(sharing, place, rank, shape)][1][number][1]
                    if place != me:
                        assert what(routes.sent[place]) == what(other.held[me])
                        assert what(routes.returned[place]) == what(other.awaited[me])
                for job in routes.owned:
                    held = [element for spans in routes.held for s in spans if s.job is job for element in elements(s)]
                    assert sorted(held) == list(range(job.layout.shape[0] * job.layout.shape[1]))
                assert what([]) == what(routes.sent[me]) == what(routes.returned[me])
                awaited = Counter((s.job.tensor, s.job.index) for spans in routes.awaited for s in spans)
                assert set(awaited.values()) <= {1}


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_matrix_has_one_owner_or_is_there_alone(shape, zero):
    world = shape[0] * shape[1] * shape[2]
    owned = Counter()
    for rank in range(world):
        alone, shared = plan_of(rank, shape, zero)
        tp = axes_of(rank, shape)[2].coord
        owned.update(
            (job.layout.fqn, job.index, tp if job.layout.fqn == "experts" else None)
            for job in [*alone, *(job for _, routes in shared for job in routes.owned)]
        )
    experts = [("experts", i, tp) for tp in range(shape[2]) for i in range(COUNTS["experts"][tp])]
    others = [(name, i, None) for name in PARAMETERS if name != "experts" for i in range(COUNTS.get(name, (1,))[0])]
    expected = Counter([*experts, *others])
    if not zero and shape[1] * shape[0] == 1:  # experts have no home then, and nobody else has them
        assert all(job.layout.fqn == "experts" for job in plan_of(0, shape, zero)[0])
    assert owned == expected


def test_positions_lie_in_the_local_tensor():
    """What ranks hold of all matrices of a parameter, position by position, is its flat local tensor."""
    for rank, name in itertools.product(range(6), PARAMETERS):
        layout = layouts_of(rank, (1, 3, 2), 1, [name])[0]
        _, shards, tp = axes_of(rank, (1, 3, 2))
        start = PARAMETERS[name][2]
        found = []
        for coord in range(shards.size):
            at = {shards.ranks: coord, tp.ranks: tp.coord}
            for index in range(layout.count):
                first, last = layout.position(index, at)
                assert last - first == layout.held(index, at)[1] - layout.held(index, at)[0]
                assert all((start + e) // shard_numel(name, 3) == coord for e in range(first, last))
                found += range(first, last)
        rows, cols = layout.cell(at).shape
        parts = {"ragged rows": (8, 16), "ragged": (3, 9)}.get(name, (rows * cols * layout.count,) * 2)
        assert found == list(range(parts[tp.coord]))


def test_the_busiest_rank_has_nearly_the_mean_and_experts_count():
    """Matrices of a layer with experts that stay on their tensor-parallel rank, over 2 copies x 2 shards x 2."""
    world, shape = 8, (2, 2, 2)
    many = ["rows", "columns", "replicated", "fused", "stack"] * 6 + ["experts"] * 8
    loads = []
    for rank in range(world):
        _, shared = plan_of(rank, shape, 1, range(len(many)), many)
        assert len(shared) == 1  # homes of experts lie within those of the others
        loads.append(sum(matrix_cost(*job.layout.shape) for _, routes in shared for job in routes.owned))
    assert max(loads) / (sum(loads) / world) < 1.1


def test_experts_go_to_ranks_that_have_less_to_do():
    """The rank (dp 0, tp 0) has the large matrix, so both experts of tp 0 are with dp 1; that of tp 1 is with dp 0."""
    owned = {}
    for rank in range(4):
        _, [(_, routes)] = plan_of(rank, (1, 2, 2), 1, (0, 1), ["rows", "experts"])
        owned[rank] = [(job.layout.fqn, job.index) for job in routes.owned]
    assert owned == {0: [("rows", 0)], 1: [("experts", 0)], 2: [("experts", 0), ("experts", 1)], 3: []}


def test_a_single_matrix_that_all_have_is_repeated():
    alone, shared = plan_of(0, (1, 2, 2), 0, (0,), ["replicated"])
    assert ([job.layout.fqn for job in alone], shared) == (["replicated"], [])
    assert plan_of(0, (1, 2, 2), 0, (0,), ["replicated", "replicated"])[0] == []
    for zero, name in ((1, "replicated"), (0, "rows"), (0, "experts")):  # in parts, or perhaps several
        assert plan_of(0, (1, 2, 2), zero, (0,), [name])[0] == []


def test_who_broadcasts_and_who_brings():
    def kinds(zero, names):
        return [(s.brings, s.is_copied) for s, _ in plan_of(0, (1, 2, 2), zero, (0, 1, 2), names)[1]]

    assert kinds(0, ["replicated", "replicated"]) == [(False, True)]
    assert kinds(0, ["replicated", "rows"]) == [(True, False)]
    assert kinds(0, ["replicated", "replicated", "experts"]) == [
        (False, False)
    ]  # a sharing of all, in which homes are smaller
    assert kinds(1, ["replicated", "replicated"]) == [(True, False)]


# ------------------------------------------------------------------------------------------- balance of owners


def loads(costs, owners, num_owners):
    return [sum(c for c, o in zip(costs, owners, strict=True) if o == owner) for owner in range(num_owners)]


@pytest.mark.parametrize("num_owners", [1, 2, 3])
def test_the_largest_load_is_near_the_best_of_all_assignments(num_owners):
    for costs in itertools.product([0, 1, 2, 3, 5, 7], repeat=5):
        owners = assign_owners(costs, num_owners)
        assert len(owners) == 5
        assert set(owners) <= set(range(num_owners))
        if list(costs) == sorted(costs):  # the best is the same for every order
            every = itertools.product(range(num_owners), repeat=5)
            best = min(max(loads(costs, each, num_owners)) for each in every)
            assert 3 * num_owners * max(loads(costs, owners, num_owners)) <= best * (4 * num_owners - 1)


def test_jobs_that_cost_nothing_are_spread_too():
    assert sorted(assign_owners([0] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_a_model_of_many_layers_is_balanced_and_quick():
    layer = [(4096, 4096)] * 4 + [(14336, 4096)] * 2 + [(4096, 14336)]
    costs = [matrix_cost(*shape) for shape in layer * 80] + [matrix_cost(2048, 768)] * 4096
    start = time.process_time()
    found = loads(costs, assign_owners(costs, 64), 64)
    assert time.process_time() - start < 0.5
    assert max(found) / (sum(found) / 64) < 1.02


def test_the_cost_of_an_iteration():
    assert matrix_cost(3, 5) == matrix_cost(5, 3) == 4 * 9 * 5 + 2 * 27


def test_owners_go_on_from_what_they_have_to_do_already():
    assert assign_owners([4, 3, 2], 3, loads=[0, 5, 9]) == (0, 0, 1)
    assert assign_owners([0, 0, 0], 2, loads=[1, 0]) == (1, 1, 1)
    for costs in itertools.product([0, 1, 3], repeat=4):
        assert assign_owners(costs, 3, loads=[0, 0, 0]) == assign_owners(costs, 3)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"num_owners must be positive and costs not negative, got 0 and \[1\]"):
        assign_owners([1], 0)
    with pytest.raises(ValueError, match=r"got 2 and \[-1\]"):
        assign_owners([-1], 2)
