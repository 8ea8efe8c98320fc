"""Layouts say in a few rules where all pieces of a tensor are, and notice boxes that do not tile it."""

import random

import pytest

from vescale.ckpt import Box, Layout, Loop, Manifest, Run, StoredFile, StoredTensor, TensorMeta
from vescale.ckpt._format.boxes import subtract
from vescale.ckpt._format.manifest import check_pieces, manifest_from_text, manifest_to_text


def chunks(size, count):
    """Return the ranges of a dim of torch's even shards; the last ones are shorter, or empty."""
    length = -(-size // count)
    return [(start, min(length, size - start)) for start in range(0, size, length)]


def sharded(shape, mesh, dims):
    """Return the boxes of a tensor with one file for each rank; axis i of the mesh cuts dim ``dims[i]``."""
    pieces = [(0, Box.full(shape))]
    for count, dim in zip(mesh, dims, strict=True):
        pieces = [
            (rank * count + i, box.rows(dim, start, start + size))
            for rank, box in pieces
            for i, (start, size) in enumerate(chunks(box.sizes[dim], count))
        ]
    return pieces


def random_tiling(rng):
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 4)))
    boxes = [Box.full(shape)]
    for _ in range(rng.randint(0, 6)):
        victim = boxes.pop(rng.randrange(len(boxes)))
        spans = [(start := rng.randrange(size), rng.randint(1, size - start)) for size in victim.sizes]
        hole = Box(tuple(a + b for a, (b, _) in zip(victim.offsets, spans, strict=True)), tuple(n for _, n in spans))
        boxes += [hole, *subtract(victim, hole)]
    return shape, [(rng.randrange(4), box) for box in boxes]


MESHES = {
    "one file": ((8, 6), (), (), 1),
    "rows": ((1024, 8), (1024,), (0,), 1),
    "uneven rows": ((1023, 8), (256,), (0,), 2),
    "columns of rows": ((128, 64), (16, 8), (0, 1), 1),
    "rows of columns": ((128, 64), (16, 8), (1, 0), 1),
    "rows of rows": ((4096,), (128, 8), (0, 0), 1),
    "three axes": ((8, 128, 64), (8, 16, 4), (0, 1, 2), 1),
    "uneven on both": ((127, 63), (16, 8), (0, 1), 4),
}


@pytest.mark.parametrize("name", MESHES)
def test_layouts_of_meshes_are_short(name):
    shape, mesh, dims, num_runs = MESHES[name]
    pieces = sharded(shape, mesh, dims)
    layout = Layout.of(shape, pieces)
    assert sorted(layout.pieces()) == sorted(pieces)
    assert layout.num_pieces == len(pieces)
    assert layout.fault() is None
    # an uneven shard of an inner axis begins a run in each of the outer ones, unless the loops go on over it
    assert len(layout.runs) <= num_runs * (1 if num_runs < 4 else 8)


def test_a_loop_for_each_axis():
    layout = Layout.of((8, 6), sharded((8, 6), (2, 2), (0, 1)))
    assert layout.runs == (Run(0, (0, 0), (4, 3), (Loop(2, 1, (0, 3)), Loop(2, 2, (4, 0)))),)


@pytest.mark.parametrize("seed", range(100))
def test_every_tiling_has_a_layout(seed):
    shape, pieces = random_tiling(random.Random(seed))
    layout = Layout.of(shape, pieces)
    assert sorted(layout.pieces()) == sorted(pieces)
    assert layout.fault() is None
    for _, box in pieces:
        assert {found for _, found in layout.overlaps(box)} == {box}


@pytest.mark.parametrize("seed", range(100))
def test_boxes_that_do_not_tile_are_noticed(seed):
    rng = random.Random(seed)
    shape, pieces = random_tiling(rng)
    lost = pieces.pop(rng.randrange(len(pieces)))
    assert "is missing" in Layout.of(shape, pieces).fault()
    if pieces:
        twice = rng.choice(pieces)
        assert "overlap" in Layout.of(shape, [*pieces, lost, twice]).fault()
        # as many elements as the tensor has
        if twice[1].num_elements == lost[1].num_elements:
            assert "overlap" in Layout.of(shape, [*pieces, twice]).fault()


def test_an_empty_tensor_has_no_pieces():
    assert Layout.of((0, 3), []).fault() is None
    assert list(Layout.of((0, 3), []).pieces()) == []


@pytest.mark.parametrize(
    ("run", "is_inside"),
    [
        (Run(0, (0, 0), (4, 3)), True),
        (Run(0, (5, 0), (4, 3)), False),
        (Run(0, (0, 0), (4, 3), (Loop(2, 0, (4, 0)),)), True),
        (Run(0, (0, 0), (4, 3), (Loop(3, 0, (4, 0)),)), False),
        (Run(0, (4, 0), (4, 3), (Loop(2, 0, (-4, 0)),)), True),
        (Run(0, (0, 0), (4, 3), (Loop(2, 0, (-4, 0)),)), False),
        (Run(0, (0, 0), (4, 3), (Loop(2**62, 0, (2**62, 0)),)), False),
        (Run(0, (0,), (4,)), False),
    ],
)
def test_what_lies_outside_is_known_without_a_table(run, is_inside):
    assert run.lies_in((8, 6)) == is_inside


@pytest.mark.parametrize("mesh", [(1024,), (128, 8)])
def test_the_manifest_hardly_grows_with_the_number_of_ranks(mesh):
    """Of an 8B model, with the states of Adam; 2 MiB would be much for 1,024 ranks."""
    shapes = {"embed": (128256, 4096), "norm": (4096,), "q": (4096, 4096), "kv": (1024, 4096), "up": (14336, 4096)}
    layouts = {
        kind: Layout.of(shape, sharded(shape, mesh, (0, len(shape) - 1)[: len(mesh)])) for kind, shape in shapes.items()
    }
    names = [f"{part}/layers.{i}.{kind}" for part in ("model", "m", "v") for i in range(60) for kind in shapes]
    stored = {kind: StoredTensor(TensorMeta("float32", shapes[kind]), layout) for kind, layout in layouts.items()}
    tensors = {name: stored[name.rpartition(".")[2]] for name in names}
    files = {f"data-{rank}-0.safetensors": StoredFile(10**12, rank) for rank in range(1024)}
    manifest = Manifest(1024, 0.0, {}, {}, "save-00000000", files, tensors)
    text = manifest_to_text(manifest)
    assert len(text) < 2**18
    found = manifest_from_text(text, where="here")
    check_pieces(found, "here")
    assert found == manifest
    assert sum(1 for _ in found.pieces("m/layers.7.up")) == 1024
