"""A save plan stores every element once, balanced over the ranks, and refuses ambiguous or incomplete states."""

import random

import pytest
import torch

from vescale.ckpt import Box, CheckpointError, TensorMeta
from vescale.ckpt._format.boxes import subtract
from vescale.ckpt._format.dtypes import ITEM_BYTES
from vescale.ckpt._save.balance import MIN_CUT_BYTES
from vescale.ckpt._save.holdings import Holding, Inventory, check_kinds, merge_held, merge_plain, split
from vescale.ckpt._save.shares import shares
from vescale.ckpt._save.written import Rows, describe_torn


def held_by(inventories):
    halves = [split(inventory) for inventory in inventories]
    tables = {table.digest(): table for table, _ in halves}
    table_of = [list(tables).index(table.digest()) for table, _ in halves]
    held = merge_held(list(tables.values()), table_of, [boxes for _, boxes in halves])
    leaves, _ = merge_plain(list(tables.values()), table_of)
    check_kinds(held, leaves)
    return held


class Plan:
    """What a save does with these inventories, one for each rank."""

    def __init__(self, inventories, *, min_cut_bytes=MIN_CUT_BYTES):
        held = held_by(inventories)
        self.tensors = held.tensors()
        self.ranks = list(shares(held, range(len(inventories)), min_cut_bytes=min_cut_bytes).values())
        # every rank derives its own share alone
        for rank, share in enumerate(self.ranks[:3]):
            assert shares(held, [rank], min_cut_bytes=min_cut_bytes) == {rank: share}


def rank_bytes(plan):
    return [
        sum(write.box.num_elements * ITEM_BYTES[plan.tensors[write.name].dtype] for write in share.writes)
        for share in plan.ranks
    ]


def everywhere(shapes: dict[str, tuple[int, ...]], world_size: int, dtype: str = "bfloat16") -> list[Inventory]:
    tensors = {name: Holding(TensorMeta(dtype, shape), (Box.full(shape),)) for name, shape in shapes.items()}
    return [Inventory(tensors, {})] * world_size


def transformer(*, layers: int, hidden: int, ffn: int, kv: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes = {"embed": (vocab, hidden), "head": (vocab, hidden), "norm": (hidden,)}
    for layer in range(layers):
        for name, rows, cols in (("q", hidden, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, hidden)):
            shapes[f"layers.{layer}.{name}"] = (rows, cols)
        shapes |= {f"layers.{layer}.{name}": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.down": (hidden, ffn), f"layers.{layer}.norm": (hidden,)}
    return shapes


LLAMA_8B = transformer(layers=32, hidden=4096, ffn=14336, kv=1024, vocab=128256)
ONE_B = transformer(layers=16, hidden=2048, ffn=8192, kv=512, vocab=128256)
MIXTRAL_LAYERS = {f"layers.{i}.experts.{part}": (8, 28672, 4096) for i in range(4) for part in ("gate_up", "down")}


def imbalance(plan) -> float:
    sizes = rank_bytes(plan)
    return max(sizes) * len(sizes) / sum(sizes)


@pytest.mark.parametrize("world_size", [8, 16, 64])
@pytest.mark.parametrize("shapes", [LLAMA_8B, ONE_B, MIXTRAL_LAYERS], ids=["llama-8b", "1b", "experts"])
def test_replicated_models_are_shared_out_evenly(shapes, world_size):
    plan = Plan(everywhere(shapes, world_size))
    assert imbalance(plan) <= 1.01
    # Cutting is no excuse for confetti: at most one cut per rank.
    assert sum(len(share.writes) for share in plan.ranks) < len(shapes) + world_size


def test_without_cuts_a_large_embedding_unbalances_the_plan():
    assert imbalance(Plan(everywhere(ONE_B, 64), min_cut_bytes=2**62)) > 2


def random_tiling(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    hole = Box(*zip(*((start := rng.randrange(size), rng.randint(1, size - start)) for size in shape), strict=True))
    return [hole, *subtract(Box.full(shape), hole)]


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_stored_once_by_a_rank_that_holds_it(seed):
    rng = random.Random(seed)
    world_size = rng.randint(1, 6)
    tables: list[dict[str, Holding]] = [{} for _ in range(world_size)]
    shapes = {f"t{i}": tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3))) for i in range(8)}
    for name, shape in shapes.items():
        boxes = random_tiling(shape, rng) if shape else [Box((), ())]
        holders = [rng.sample(range(world_size), rng.randint(1, world_size)) for _ in boxes]
        for rank in range(world_size):
            own = tuple(box for box, ranks in zip(boxes, holders, strict=True) if rank in ranks)
            if own:
                tables[rank][name] = Holding(TensorMeta("float32", shape), own)
    plan = Plan([Inventory(table, {}) for table in tables], min_cut_bytes=8)
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for table, share in zip(tables, plan.ranks, strict=True):
        for write in share.writes:
            assert write.held in table[write.name].boxes
            assert write.held.contains(write.box)
            counts[write.name][write.box.slices(inside=Box.full(shapes[write.name]))] += 1
    assert all((count == 1).all() for count in counts.values())


def test_load_of_unequal_holders_is_levelled():
    # Rank 0 alone holds "own"; the shared tensor then belongs mostly to rank 1.
    shared = Holding(TensorMeta("float32", (1000, 100)), (Box.full((1000, 100)),))
    own = Holding(TensorMeta("float32", (500, 100)), (Box.full((500, 100)),))
    plan = Plan([Inventory({"own": own, "shared": shared}, {}), Inventory({"shared": shared}, {})])
    assert rank_bytes(plan) == [300_000, 300_000]


def holding(*boxes: Box, shape=(4, 2), dtype="float32") -> Holding:
    return Holding(TensorMeta(dtype, shape), boxes)


UPPER, LOWER = Box((0, 0), (2, 2)), Box((2, 0), (2, 2))

REFUSED = {
    "missing": (
        [{"w": holding(UPPER)}, {"w": holding(UPPER)}],
        r"tensor 'w', global shape \(4, 2\): .* box \[2:4, 0:2\] is missing; the ranks hold \[0:2, 0:2\] \(ranks 0-1\)",
    ),
    "overlap": (
        [{"w": holding(UPPER)}, {"w": holding(LOWER, Box((1, 0), (1, 2)))}],
        r"boxes \[0:2, 0:2\] and \[1:2, 0:2\] overlap.*\(rank 0\).*\(rank 1\)",
    ),
    "shape": (
        [{"w": holding(UPPER, LOWER)}, {"w": holding(Box((0, 0), (4, 3)), shape=(4, 3))}],
        r"'w': .*, got float32 with global shape \(4, 2\) on rank 0 and float32 with global shape \(4, 3\) on rank 1",
    ),
    "dtype": (
        [{"w": holding(UPPER, LOWER)}, {"w": holding(UPPER, LOWER, dtype="float64")}],
        r"float32 with .* on rank 0 and float64 with .* on rank 1",
    ),
    "unknown dtype": (
        [{"w": holding(dtype="")}, {"w": holding(dtype="")}],
        r"'w': .*, got no box on any rank",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_whole_is_refused(case):
    tables, text = REFUSED[case]
    with pytest.raises(CheckpointError, match=text):
        Plan([Inventory(table, {}) for table in tables])


def test_the_dtype_comes_from_ranks_with_elements():
    plan = Plan([Inventory({"w": holding(UPPER, LOWER)}, {}), Inventory({"w": holding(dtype="")}, {})])
    assert plan.tensors["w"].dtype == "float32"


def test_plain_values_that_differ_between_ranks_are_refused():
    leaves = [{"lr": "0.1"}, {"lr": "0.1"}, {"lr": "0.2"}, {}]
    with pytest.raises(CheckpointError, match=r"'lr': expected equal .*, got 0.1 on ranks 0-1 and 0.2 on rank 2"):
        Plan([Inventory({}, own) for own in leaves])


def test_a_tensor_here_and_a_plain_value_there_are_refused():
    with pytest.raises(CheckpointError, match="a tensor on some ranks and a plain value on others: 'w'"):
        Plan([Inventory({"w": holding(UPPER, LOWER)}, {}), Inventory({}, {"w": "1"})])


def test_replicas_with_different_bytes_are_reported_with_their_ranks():
    same = {("w", UPPER): 7, ("w", LOWER): 8}
    assert describe_torn([same, same, {}]) is None
    torn = describe_torn([same, same, {("w", UPPER): 7, ("w", LOWER): 9}])
    assert "'w' [2:4, 0:2] (ranks 0-1 differ from rank 2)" in torn


def sharded_with_replicas(shapes, num_shards, num_replicas):
    """Rank ``i + num_shards * j`` has shard i of the rows of every tensor; the last shards may be smaller, or empty."""
    inventories = []
    for rank in range(num_shards * num_replicas):
        held = {}
        for name, shape in shapes.items():
            rows = -(-shape[0] // num_shards)
            first = min(rank % num_shards * rows, shape[0])
            box = Box.full(shape).rows(0, first, min(first + rows, shape[0]))
            held[name] = Holding(TensorMeta("float32", shape), (box,) if box.num_elements else ())
        inventories.append(Inventory(held, {}))
    return inventories


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(8, 4), (5, 3), (16, 2), (3, 8)])
def test_groups_of_replicas_are_levelled_alike(num_shards, num_replicas):
    """Groups that are alike are shared out once for all; their boxes are those of each."""
    shapes = {f"layers.{i}.{name}": shape for i in range(6) for name, shape in {"w": (999, 512), "b": (512,)}.items()}
    inventories = sharded_with_replicas(shapes, num_shards, num_replicas)
    plan = Plan(inventories)
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for inventory, share in zip(inventories, plan.ranks, strict=True):
        for write in share.writes:
            assert write.held in inventory.tensors[write.name].boxes
            counts[write.name][write.box.slices(inside=Box.full(shapes[write.name]))] += 1
        held = {(name, box) for name, holding in inventory.tensors.items() for box in holding.boxes}
        assert set(share.replicas) == held
    assert all((count == 1).all() for count in counts.values())
    assert imbalance(plan) <= 1.1  # the last shards are smaller


def test_rows_of_ranks_make_layouts_and_find_replicas_that_differ():
    shapes = {"a": (), "b": (6,), "c": (4, 3, 2)}
    boxes = {"a": Box((), ()), "b": Box((0,), (6,)), "c": Box((1, 0, 0), (3, 3, 2))}
    rest = Box((0, 0, 0), (1, 3, 2))
    held = {name: Holding(TensorMeta("int8", shape), (Box.full(shape),)) for name, shape in shapes.items()}
    rows = Rows(held_by([Inventory(held, {})] * 2))
    first = rows.packed([("a", 0, boxes["a"]), ("c", 1, boxes["c"])])
    second = rows.packed([("c", 0, rest), ("b", 0, boxes["b"])])
    found = {name: list(layout.pieces()) for name, layout in rows.layouts([first, second], [2, 1]).items()}
    assert found == {"a": [(0, boxes["a"])], "b": [(2, boxes["b"])], "c": [(1, boxes["c"]), (2, rest)]}
    sums = [rows.packed([("a", 5, boxes["a"]), ("c", c, boxes["c"])]) for c in (7, 7, 8)]
    assert rows.torn(sums[:2]) is None
    assert "got differences in 'c' [1:4, 0:3, 0:2] (ranks 0-1 differ from rank 2)" in rows.torn(sums)
