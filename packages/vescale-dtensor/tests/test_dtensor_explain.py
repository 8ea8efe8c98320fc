"""`debug.explain()` draws who holds what: exact pictures, every rank's boxes, the same text on all ranks."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.dtensor import (
    DeviceMesh,
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    debug,
    init_device_mesh,
)
from vescale.dtensor.extension import local_shape
from vescale_testing import ranks, run_ranks


def made(shape, mesh, placements, dtype=torch.float32):
    """Return a DTensor with any placements, without communication."""
    cuts = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    local = torch.zeros(local_shape(tuple(shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), cuts), dtype=dtype)
    size = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **size)


def same_everywhere(text):
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {text}
    assert max(map(len, text.splitlines())) < 100
    return text


@ranks(4)
def test_pictures_of_two_dims():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = made((5, 6), mesh, [Shard(0), Shard(1)])
    with CommDebugMode() as counts:
        text = debug.explain(x)
    assert counts.get_total_counts() == 0
    assert same_everywhere(text) == (
        "DTensor of shape (5, 6), torch.float32, on mesh dp=2, tp=2 (cpu)\n"
        "placements  dp: Shard(dim=0), tp: Shard(dim=1)\n"
        "per rank    24 B to 36 B; 120 B on all ranks together\n"
        "\n"
        "        0:3      3:6\n"
        "     ┌────────┬────────┐\n"
        "0:3  │ rank 0 │ rank 1 │\n"
        "     ├────────┼────────┤\n"
        "3:5  │ rank 2 │ rank 3 │\n"
        "     └────────┴────────┘\n"
        "\n"
        "- uneven: 6 to 9 elements on a rank that holds any"
    )
    other = debug.explain(made((5, 6), mesh, [Shard(1), Shard(0)]))
    assert "0:3  │ rank 0 │ rank 2 │" in other


@ranks(4)
def test_ragged_rows_share_a_frame():
    mesh = init_device_mesh("cpu", (4,))
    text = same_everywhere(debug.explain(made((5, 4), mesh, [RaggedShard((0, 1), (3, 7, 0, 10))], torch.int8)))
    assert text.splitlines()[2] == "per rank    0 B to 10 B; 20 B on all ranks together"
    assert "\n".join(text.splitlines()[4:]) == (
        "        0:2     2:3    3:4\n"
        "     ┌──────────────┬────────┐\n"
        "0:1  │    rank 0    │ rank 1 │\n"
        "     ├──────────────┘        │\n"
        "1:2  │                       │\n"
        "     │        ┌──────────────┤\n"
        "2:3  │        │    rank 3    │\n"
        "     ├────────┘              │\n"
        "3:5  │                       │\n"
        "     └───────────────────────┘\n"
        "\n"
        "- rank 2 holds nothing\n"
        "- uneven: 3 to 10 elements on a rank that holds any\n"
        "- a rank's part is in up to 3 separate boxes"
    )


@ranks(4)
def test_notes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases = {
        ((4, 4), (Partial(), Replicate())): [
            "- these are parts: the sum over the 2 ranks of dp gives the values",
            "- 2 copies of every element, along tp",
        ],
        ((4, 4), (Partial("max"), Partial("max"))): [
            "- these are parts: the max over the 2 ranks of dp gives the values",
            "- these are parts: the max over the 2 ranks of tp gives the values",
        ],
        ((1, 4), (Shard(0), Replicate())): ["- 2 copies of every element, along tp", "- ranks 2,3 hold nothing"],
        ((0, 4), (Shard(0), Replicate())): ["- the tensor has no elements"],
        ((8,), (_StridedShard(0, split_factor=2), Shard(0))): [],
        ((8,), (InterleavedShard(0, 2), Replicate())): [
            "- 2 copies of every element, along tp",
            "- a rank's part is in up to 2 separate boxes",
        ],
    }
    for (shape, placements), expected in cases.items():
        text = same_everywhere(debug.explain(made(shape, mesh, placements)))
        assert [line for line in text.splitlines() if line.startswith("- ")] == expected, text
    strided = debug.explain(made((8,), mesh, (_StridedShard(0, split_factor=2), Shard(0))))
    assert "│ rank 0 │ rank 2 │ rank 1 │ rank 3 │" in strided
    one = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    assert "- " not in debug.explain(made((4,), one, (Shard(0), Replicate())))  # one rank is no copy


@ranks(2)
def test_more_dims_and_wide_tensors():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    text = debug.explain(made((2, 3, 4), mesh, [Shard(2)]))
    assert "dim 2 down; along the other dims every rank has all of its part" in text
    assert "2:4  │ rank 1 │" in text
    whole = debug.explain(made((2, 3, 4), mesh, [Replicate()]))
    assert "ranks 0,1  [0:2, 0:3, 0:4]   96 B" in whole
    assert "ranks 0,1  [()]     4 B" in debug.explain(made((), mesh, [Replicate()]))
    huge = debug.explain(made((10**6,), mesh, [InterleavedShard(0, 40)]))
    assert max(map(len, huge.splitlines())) < 100
    with pytest.raises(TypeError, match="expected a DTensor, got Tensor; a plain tensor lies whole on its rank"):
        debug.explain(torch.ones(2))


@ranks(4)
def test_every_element_is_drawn_in_the_cell_of_its_holders():
    """Read the pictures back: the ranks in a cell hold its elements, and no other rank does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    choices = [Replicate(), Shard(0), Shard(1)]
    for shape, placements in itertools.product([(5, 3), (1, 4), (6, 4)], itertools.product(choices, choices)):
        text = debug.explain(made(shape, mesh, placements))
        x = torch.arange(shape[0] * shape[1]).view(shape)
        held = {}
        for rank, (i, j) in enumerate(itertools.product(range(2), range(2))):
            part = x
            for index, placement in zip((i, j), placements, strict=True):
                if isinstance(placement, Shard):
                    chunks = part.chunk(2, placement.dim)
                    part = chunks[index] if index < len(chunks) else part.narrow(placement.dim, 0, 0)
            for element in part.flatten().tolist():
                held.setdefault(element, []).append(rank)
        assert read(text, x) == held, text


def read(text, x):
    """Return the ranks that a picture without merged cells gives to every element of `x`."""
    lines = text.splitlines()
    top = next(number for number, line in enumerate(lines) if "┌" in line)
    columns = [tuple(map(int, part.split(":"))) for part in lines[top - 1].split()]
    held = {}
    for line in lines[top:]:
        match = re.match(r" *(\d+):(\d+) +│(.*)│$", line)
        if match:
            cells = match[3].split("│")
            assert len(cells) == len(columns)
            for (start, stop), cell in zip(columns, cells, strict=True):
                who = [int(rank) for rank in re.sub("ranks?", "", cell).strip().replace("0-3", "0,1,2,3").split(",")]
                for element in x[int(match[1]) : int(match[2]), start:stop].flatten().tolist():
                    held[element] = who
    return held


def in_a_world_of(world_size, body):
    """Run `body` on rank 0 of a large world that does not communicate; return its result."""

    def on_rank_0():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        return body()

    return run_ranks(on_rank_0, 1, backend=None)[0]


def test_rank_lists():
    lists = {
        "rank 0": [0],
        "ranks 0-2,5": [0, 1, 2, 5],
        "ranks 0,8..56": list(range(0, 64, 8)),
        "ranks 0,2,3,7,9.. (8 of them)": [0, 2, 3, 7, 9, 20, 22, 30],
    }

    def texts():
        return [debug.explain(made((1,), DeviceMesh("cpu", members), [Replicate()])) for members in lists.values()]

    for expected, text in zip(lists, in_a_world_of(64, texts), strict=True):
        assert f" {expected} " in text, text


def test_a_label_in_merged_cells_always_fits():
    def text():
        mesh = DeviceMesh("cpu", [list(range(0, 90, 7)), list(range(1, 91, 7))])
        return debug.explain(made((2, 2), mesh, [RaggedShard((0, 1), (3, 1)), Replicate()], torch.int8))

    lines = in_a_world_of(91, text).splitlines()
    top = next(number for number, line in enumerate(lines) if "┌" in line)
    picture = [line for line in lines[top:] if line.endswith(tuple("┐│┤┘"))]
    assert any("ranks 0,7..84" in line for line in picture), lines
    assert len({len(line) for line in picture}) == 1
