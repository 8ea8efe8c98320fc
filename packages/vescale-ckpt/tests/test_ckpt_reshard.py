"""A checkpoint saved under one layout loads bit for bit under any other.

The state has tensors of many dtypes and shapes: sharded by tensor parallelism (unevenly, with empty shards),
replicated, split by pipeline stages, and values sharded over data parallelism as flat ranges, the way ZeRO keeps
optimizer state.
Each layout saves once; then each layout loads every checkpoint and compares every local box with the
corresponding slice of the global tensor.
"""

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.ckpt import Box, CheckpointError, load, read_manifest, save, verify
from vescale_testing import ranks, run_ranks

LAYOUTS = {
    "one process": {},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "dp4 tp1": {"dp": 4, "tp": 1},
    "dp1 tp4": {"dp": 1, "tp": 4},
    "dp3": {"dp": 3},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
}

# name -> global shape, dtype, tensor-parallel placement
TENSORS = {
    "layers.0.up": ((7, 6), torch.float32, Shard(0)),
    "layers.0.down": ((5, 9), torch.bfloat16, Shard(1)),
    "layers.0.norm": ((11,), torch.float64, Replicate()),
    "layers.1.few": ((3, 2), torch.float16, Shard(0)),  # on tp 4 the last shard is empty
    "layers.1.experts": ((4, 3, 5), torch.float32, Shard(2)),
    "layers.1.scale": ((), torch.float32, Replicate()),
    "layers.1.counts": ((6,), torch.int64, Shard(0)),
    "layers.1.mask": ((2, 8), torch.bool, Shard(1)),
}


def global_value(name: str) -> torch.Tensor:
    shape, dtype, _ = TENSORS[name]
    seed = list(TENSORS).index(name)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100).to(dtype)


def flat_range_boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Return the boxes of elements ``start`` to ``end`` of a row-major tensor: end of a row, rows, start of one."""
    if len(shape) < 2:
        return [Box((start,), (end - start,))] if shape and end > start else [Box((), ())] if end > start else []
    width = torch.Size(shape[1:]).numel()
    boxes = []
    while start < end:
        row, column = divmod(start, width)
        if column == 0 and end - start >= width:
            rows = (end - start) // width
            boxes.append(Box((row, *[0] * (len(shape) - 1)), (rows, *shape[1:])))
            start += rows * width
        else:
            stop = min(end, (row + 1) * width)
            inner = flat_range_boxes(shape[1:], column, stop - row * width)
            boxes += [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]
            start = stop
    return boxes


@dataclass
class FlatShard:
    """A rank's range of the elements of a local tensor, in one buffer, seen as boxes of the global tensor."""

    __global_shape__: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[tuple[int, ...], torch.Tensor]]

    def __boxes__(self):
        return self.parts

    @classmethod
    def of(cls, value: torch.Tensor | DTensor, dp: tuple[int, int]) -> "FlatShard":
        rank, size = dp
        local, offsets = value, (0,) * value.ndim
        if isinstance(value, DTensor):
            local = value.to_local()
            offsets = tuple(value.__create_chunk_list__()[0].offsets)
        share = -(-local.numel() // size)
        start, end = min(rank * share, local.numel()), min((rank + 1) * share, local.numel())
        buffer = local.reshape(-1)[start:end].clone()
        parts, used = [], 0
        for box in flat_range_boxes(tuple(local.shape), start, end):
            view = buffer[used : used + box.num_elements].view(box.sizes)
            parts.append((tuple(a + b for a, b in zip(offsets, box.offsets, strict=True)), view))
            used += box.num_elements
        return cls(tuple(value.shape), value.dtype, parts)


def build_state(layout: dict[str, int], *, filled: bool) -> dict:
    """Return this rank's part of the state: global values, or zeros to load into."""
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout)) if layout else None
    coord = dict(zip(layout, mesh.get_coordinate(), strict=True)) if mesh else {}
    model, moments = {}, {}
    for name, (_, _, placement) in TENSORS.items():
        if "pp" in layout and int(name.split(".")[1]) != coord["pp"]:
            continue
        value = global_value(name) if filled else torch.zeros_like(global_value(name))
        if layout.get("tp"):
            value = distribute_tensor(value, mesh["tp"], [placement], src_data_rank=None)
        model[name] = value
        moments[name] = {"exp_avg": FlatShard.of(value, (coord.get("dp", 0), layout.get("dp", 1)))}
    groups = [{"lr": 0.125 if filled else 0.0, "betas": [0.9, 0.95]}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "step": 7 if filled else 0}


def count_differences(state: dict) -> int:
    """Count the local boxes, over model and optimizer, that differ from the global values."""
    wrong = 0
    for name, value in state["model"].items():
        expected = global_value(name)
        held = [((0,) * value.ndim, value)]
        if isinstance(value, DTensor):
            held = [(tuple(value.__create_chunk_list__()[0].offsets), value.to_local())]
        for offsets, view in held + state["optimizer"]["state"][name]["exp_avg"].__boxes__():
            index = tuple(slice(a, a + n) for a, n in zip(offsets, view.shape, strict=True))
            wrong += not torch.equal(view, expected[index])
    leaves = (state["step"], state["optimizer"]["param_groups"])
    return wrong + (leaves != (7, [{"lr": 0.125, "betas": [0.9, 0.95]}]))


def world_size(layout: dict[str, int]) -> int:
    return torch.Size(layout.values()).numel()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for name, layout in LAYOUTS.items():
        run_ranks(
            lambda path, layout: save(path, build_state(layout, filled=True)),
            world_size(layout),
            folder / name,
            layout,
            backend="gloo" if layout else None,
        )
    return folder


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_loads_what_every_layout_saved(saved, target):
    def body() -> list[int]:
        counts = []
        for source in LAYOUTS:
            state = build_state(LAYOUTS[target], filled=False)
            assert count_differences(state) > 0
            load(saved / source, state)
            counts.append(count_differences(state))
        return counts

    layout = LAYOUTS[target]
    for counts in run_ranks(body, world_size(layout), backend="gloo" if layout else None):
        assert counts == [0] * len(LAYOUTS)


@pytest.mark.parametrize("source", LAYOUTS)
def test_each_element_is_stored_once(saved, source):
    manifest = verify(saved / source)
    assert manifest.world_size == world_size(LAYOUTS[source])
    for name, (shape, _, _) in TENSORS.items():
        for stored in (manifest.tensors[f"model/{name}"], manifest.tensors[f"optimizer/state/{name}/exp_avg"]):
            assert stored.meta.shape == shape
            boxes = [box for _, box in stored.layout.pieces()]
            assert sum(box.num_elements for box in boxes) == torch.Size(shape).numel()


def test_two_swapped_pieces_are_noticed(saved, tmp_path, rewrite_manifest):
    path = shutil.copytree(saved / "dp1 tp4", tmp_path / "c")
    pieces = list(read_manifest(path).tensors["model/layers.1.experts"].layout.pieces())

    def swap(body):
        layout = body["layouts"][body["tensors"]["model/layers.1.experts"]["layout"]]
        layout["runs"] = [{"file": file, "offsets": box.offsets, "sizes": box.sizes} for file, box in pieces]
        first, second, *_ = layout["runs"]
        assert first["sizes"] == second["sizes"]
        first["file"], second["file"] = second["file"], first["file"]

    rewrite_manifest(path, swap)
    with pytest.raises(CheckpointError, match=r"by the manifest, got none in the file"):
        load(path, build_state({}, filled=False))


def test_the_manifest_is_plain_json(saved):
    body = json.loads((saved / "dp2 tp2" / "manifest.json").read_text())
    assert body["layouts"][body["tensors"]["model/layers.0.up"]["layout"]]["shape"] == [7, 6]


@ranks(4)
def test_a_large_replicated_tensor_is_written_by_all_its_holders(tmp_path):
    value = torch.arange(200_000.0)
    save(tmp_path / "c", {"w": value.clone(), "b": torch.ones(3)})
    manifest = verify(tmp_path / "c")
    sizes = [manifest.files[f"data-{rank}-0.safetensors"].num_bytes for rank in range(4)]
    assert max(sizes) / (sum(sizes) / 4) < 1.01
    target = {"w": torch.zeros(200_000), "b": torch.zeros(3)}
    load(tmp_path / "c", target)
    assert torch.equal(target["w"], value)


@ranks(3)
def test_replicas_that_differ_are_refused_by_default(tmp_path):
    state = {"w": torch.zeros(4)}
    if dist.get_rank() == 2:
        state["w"][1] = 1
    try:
        save(tmp_path / "c", state)
    except ValueError as error:
        text = str(error)
    assert "'w' [0:4] (ranks 0-1 differ from rank 2)" in text
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    save(tmp_path / "c", state, check_replicas=False)
    verify(tmp_path / "c")
