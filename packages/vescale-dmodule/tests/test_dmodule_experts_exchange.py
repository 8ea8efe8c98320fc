"""The exchange of tokens, planned for all ranks at once in one process: every pair arrives once, and comes back."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from vescale.dmodule._experts import axes as _axes
from vescale.dmodule._experts import dispatch as _exchange
from vescale.dmodule._experts import migrate as _migrate
from vescale.dmodule._experts.allocate import (
    LoadBalancingAllocator,
    StaticAllocator,
    check_allocation,
    from_ranks,
    imbalance,
    initial_allocation,
)

TOKENS = {Shard: Shard(0), Replicate: Replicate()}
SHAPES = [(4,), (2, 2), (2, 3), (2, 1, 2)]


def coords(shape):
    return itertools.product(*map(range, shape))


def roles(num_axes):
    """Return (expert axes, inner axes, tokens) of every kind of layout."""
    for kinds in itertools.product(("experts", "inner", None), repeat=num_axes):
        for tokens in itertools.product(TOKENS.values(), repeat=num_axes):
            held = [axis for axis in range(num_axes) if kinds[axis] == "experts"]
            if held:
                yield held, [axis for axis in range(num_axes) if kinds[axis] == "inner"], tokens


def owners(slot, num_slots, shape, held):
    """Return the coordinates on the expert axes of the rank that holds a slot, by counting through all of them."""
    blocks = list(itertools.product(*(range(shape[axis]) for axis in held)))
    return dict(zip(held, blocks[slot * len(blocks) // num_slots], strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_lane_leads_to_the_expert(shape):
    num_experts = 12
    slots = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0)).tolist()
    for held, inner, tokens in roles(len(shape)):
        axes = _axes.axes_of(held, inner, tokens)
        reached = dict.fromkeys(itertools.product(range(num_experts), coords(shape)), 0)
        for here in coords(shape):
            table = _axes.lane_table(slots, axes=axes, shape=shape, coord=here)
            group = [c for c in coords(shape) if all(c[a] == here[a] for a in range(len(shape)) if a not in axes.group)]
            num_blocks = torch.tensor([shape[axis] for axis in held]).prod().item()
            num_local = num_experts // num_blocks
            nowhere = len(group) * num_local
            assert set(table[num_experts]) == {nowhere}
            for expert, slot in enumerate(slots):
                for lane in table[expert]:
                    if lane != nowhere:
                        rank, local = divmod(lane, num_local)
                        owner = owners(slot, num_experts, shape, held)
                        assert all(group[rank][axis] == coord for axis, coord in owner.items())
                        assert local == slot % num_local
                        reached[expert, group[rank]] += 1
        for (expert, where), times in reached.items():
            owner = owners(slots[expert], num_experts, shape, held)
            sources = 1  # ranks whose tokens this rank computes: those that differ in an axis of the all-to-all
            for axis in axes.group:
                sources *= shape[axis]
            assert times == (sources if all(where[axis] == coord for axis, coord in owner.items()) else 0)


def exchanged(index, table, *, num_ranks, num_local):
    """Carry out the exchange of all ranks with lists, and return what each expert got and what came back."""
    routes = [_exchange.route(part, table, group_size=num_ranks, num_local=num_local) for part in index]
    counts = [way.counts.tolist() for way in routes]
    plans = [_exchange.plan_exchange(counts[rank], [sent[rank] for sent in counts]) for rank in range(num_ranks)]
    travels = [
        list(
            torch.tensor([(rank, pair) for pair in way.order.tolist()]).reshape(-1, 2)[: plan.num_sent].split(plan.send)
        )
        for rank, (way, plan) in enumerate(zip(routes, plans, strict=True))
    ]
    got = {}
    for rank, plan in enumerate(plans):
        rows = torch.cat([travels[source][rank] for source in range(num_ranks)]).tolist()
        assert len(rows) == plan.num_received
        experts = [expert for counts in plan.experts for expert, count in enumerate(counts) for _ in range(count)]
        for expert, row in zip(experts, rows, strict=True):
            got.setdefault((rank, expert), []).append(tuple(row))
    return plans, got


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_pair_of_every_routing_arrives(num_ranks):
    num_local, num_tokens = 2, 2
    num_experts = num_ranks * num_local
    table = torch.tensor(_axes.lane_table(range(num_experts), axes=_axes.Axes((0,)), shape=[num_ranks], coord=[0]))
    choices = list(itertools.combinations(range(num_experts + 1), 2))  # the last one is no expert
    generator = torch.Generator().manual_seed(num_ranks)
    for _ in range(200):
        index = torch.tensor(choices)[torch.randint(len(choices), (num_ranks, num_tokens), generator=generator)]
        plans, got = exchanged(index, table, num_ranks=num_ranks, num_local=num_local)
        for expert in range(num_experts):
            pairs = index.reshape(num_ranks, -1)
            expected = [(r, p) for r in range(num_ranks) for p in range(pairs.shape[1]) if pairs[r, p] == expert]
            assert got.get(divmod(expert, num_local), []) == expected  # in the order of the batch
        assert sum(plan.num_sent for plan in plans) == (index < num_experts).sum()
        for here, there in itertools.product(range(num_ranks), repeat=2):
            assert plans[here].send[there] == plans[there].receive[here]


def test_allocations():
    assert from_ranks([1, 0, 0, 1], 2) == (2, 0, 1, 3)
    assert check_allocation([2, 0, 1, 3], 4, 2) == (2, 0, 1, 3)
    for wrong, text in (
        ([0, 0, 1, 3], "expected a permutation of the slots of 4 experts, got [0, 0, 1, 3]; use each slot once"),
        ([1, 0, 2, 3], "expected experts of one rank in ascending order, got (1, 0, 2, 3); use from_ranks"),
    ):
        with pytest.raises(ValueError) as error:
            check_allocation(wrong, 4, 2)
        assert str(error.value) == text
    with pytest.raises(ValueError, match=r"expected 4 / 2 experts on every rank, got \[3, 1\]; use"):
        from_ranks([0, 0, 0, 1], 2)


def test_load_balancing_is_at_least_as_good_and_moves_only_if_it_pays():
    generator = torch.Generator().manual_seed(0)
    allocator, better = LoadBalancingAllocator(), 0
    for num_ranks in (1, 2, 4):
        current = initial_allocation(8)
        for _ in range(100):
            loads = torch.randint(0, 50, (8,), generator=generator).tolist()
            chosen = check_allocation(allocator.allocate(loads, current, num_ranks), 8, num_ranks)
            before, after = (imbalance(loads, allocation, num_ranks) for allocation in (current, chosen))
            assert chosen == current or before - after > allocator.threshold
            better += chosen != current
            current = chosen
    assert better > 50
    assert LoadBalancingAllocator(threshold=9).allocate([9, 9, 0, 0], (0, 1, 2, 3), 2) == (0, 1, 2, 3)
    assert allocator.allocate([0, 0, 0, 0], (2, 0, 1, 3), 2) == (2, 0, 1, 3)
    assert StaticAllocator().allocate([9, 9, 0, 0], (2, 0, 1, 3), 2) == (0, 1, 2, 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_move_between_allocations(num_ranks):
    per_rank = 2
    allocations = {
        from_ranks(ranks, num_ranks)
        for ranks in itertools.product(range(num_ranks), repeat=num_ranks * per_rank)
        if all(ranks.count(rank) == per_rank for rank in range(num_ranks))
    }
    assert len(allocations) == {1: 1, 2: 6, 3: 90}[num_ranks]
    for current, new in itertools.islice(itertools.product(allocations, repeat=2), 2000):
        held = [[None] * per_rank for _ in range(num_ranks)]
        for expert, slot in enumerate(current):
            held[slot // per_rank][slot % per_rank] = expert
        moves = [_migrate.plan_moves(current, new, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]
        for rank, move in enumerate(moves):
            for source, slots in enumerate(move.receive):
                sent = [held[source][slot] for slot in moves[source].send[rank]]
                assert [new[expert] for expert in sent] == [rank * per_rank + slot for slot in slots]
        assert all(sorted(itertools.chain(*move.receive)) == list(range(per_rank)) for move in moves)
