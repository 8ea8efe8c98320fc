"""Ranks that hold the same boxes read them once together, and pass them on."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.ckpt import Box, CheckpointError, load, save
from vescale.ckpt._format import data_files
from vescale.ckpt._format.data_files import BLOCK_BYTES
from vescale.ckpt._load import shared
from vescale.ckpt._load.shared import turns
from vescale_testing import ranks, run_ranks

SHAPES = {"a": (1024, 4096), "b": (3, 5, 7), "c": (), "d": (7,), "e": (513, 1000), "f": (1, 2_000_001), "g": (0, 4)}
DTYPES = {"b": torch.bfloat16, "d": torch.complex64, "e": torch.float8_e4m3fn, "f": torch.int16}


@pytest.fixture(params=["small chunks", "large chunks"])
def always_shared(request, monkeypatch):
    """Share small states, too, in chunks of two sizes; every rank is on a host of its own."""
    monkeypatch.setattr("socket.gethostname", lambda: f"host-{dist.get_rank()}")
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)
    monkeypatch.setattr(shared, "CHUNK_BYTES", 70_000 if request.param == "small chunks" else BLOCK_BYTES)


@pytest.fixture
def blocks_read(monkeypatch):
    """Record the sizes of what this rank reads from files."""
    read, found = data_files.read_at, []

    def recorded(file, start, memory):
        found.append(len(memory))
        return read(file, start, memory)

    monkeypatch.setattr(data_files, "read_at", recorded)
    return found


def model(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-9, 9, shape, generator=draw).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_path(tmp_path):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    return path[0]


@pytest.mark.usefixtures("always_shared")
@ranks(3)
def test_replicas_get_every_value(tmp_path, blocks_read):
    path = same_path(tmp_path) / "c"
    expected, state = model(0), {"model": model(1), "step": 0}
    save(path, {"model": expected, "step": 3})
    load(path, state)
    assert state["step"] == 3
    for name, tensor in expected.items():
        assert torch.equal(bits(state["model"][name]), bits(tensor)), name
    found = [None] * 3
    dist.all_gather_object(found, len(blocks_read))
    assert all(count > 0 for count in found)  # every replica reads a part


@ranks(4)
def test_every_block_is_read_once(tmp_path, monkeypatch, blocks_read):
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)
    monkeypatch.setattr("socket.gethostname", lambda: f"host-{dist.get_rank() % 2}")
    path = same_path(tmp_path) / "c"
    state = {"model": {f"w{i}": torch.full((2048, 1024), float(i)) for i in range(9)}}  # two blocks each
    save(path, state)
    del blocks_read[:]
    load(path, state)
    found: list = [None] * 4
    dist.all_gather_object(found, blocks_read)
    blocks = [size for own in found for size in own]
    assert sum(blocks) == 9 * 2 * BLOCK_BYTES
    assert all(found)


@pytest.mark.parametrize("size", [1000, 5_000_000])
@ranks(4)
def test_small_states_and_those_of_one_host_are_read_by_every_rank(tmp_path, blocks_read, size):
    """The negative sibling."""
    path = same_path(tmp_path) / "c"
    state = {"model": {"w": torch.ones(size)}}
    save(path, state)
    del blocks_read[:]
    load(path, state)
    assert sum(blocks_read) == 4 * size


@pytest.mark.usefixtures("always_shared")
@ranks(4)
def test_hybrid_meshes_columns_dtypes_and_other_objects(tmp_path):
    """Replicas are those of each shard; what is sharded over all ranks has none; targets may need a cast or a copy."""
    path = same_path(tmp_path) / "c"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    whole = torch.randn(37, 50, generator=torch.Generator().manual_seed(0))
    save(path, {"model": {"w": whole, "v": whole + 1}, "optimizer": {"m": whole * 2}})
    zeros = torch.zeros(37, 50)
    state = {
        "model": {
            "w": distribute_tensor(zeros.double(), mesh, [Replicate(), Shard(0)]),
            "v": distribute_tensor(zeros, mesh, [Replicate(), Shard(1)]),
        },
        "optimizer": {"m": distribute_tensor(zeros, mesh, [Shard(0), Shard(0)])},
    }
    columns = state["model"]["v"].to_local()
    assert isinstance(state["model"]["v"], DTensor)
    load(path, state, allow_dtype_cast=True)
    assert torch.equal(state["model"]["w"].full_tensor(), whole.double())
    assert torch.equal(state["model"]["v"].full_tensor(), whole + 1)
    assert columns.data_ptr() == state["model"]["v"].to_local().data_ptr()
    assert torch.equal(state["optimizer"]["m"].full_tensor(), whole * 2)


@pytest.mark.usefixtures("always_shared")
@ranks(4)
def test_ranks_with_other_names_are_no_replicas(tmp_path):
    """Two stages of a pipeline, each with two replicas."""
    path = same_path(tmp_path) / "c"
    stage = dist.get_rank() % 2
    values = {f"layer{i}": torch.full((500,), float(i)) for i in range(4)}
    own = {name: value for name, value in values.items() if int(name[-1]) % 2 == stage}
    save(path, {"model": own})
    state = {"model": {name: torch.zeros(500) for name in own}}
    load(path, state)
    for name, value in own.items():
        assert torch.equal(state["model"][name], value)


@pytest.mark.usefixtures("always_shared")
def test_damage_that_one_replica_reads_is_an_error_on_all(tmp_path):
    path = tmp_path / "c"
    state = {"model": {f"w{i}": torch.full((300, 100), float(i)) for i in range(8)}}
    save(path, state)
    (file,) = path.glob("save-*/*.safetensors")
    with open(file, "r+b") as handle:
        handle.seek(-1000, 2)  # in the part of the last replica
        handle.write(b"\xff")

    def body() -> str:
        with pytest.raises(CheckpointError, match=r"bytes were changed or lost.*partly filled") as caught:
            load(path, state)
        dist.barrier()
        return str(caught.value)

    texts = run_ranks(body, 3, timeout=60)
    assert len(set(texts)) == 1
    assert re.match(r"rank [12]: tensor 'model/w7'", texts[0]), texts[0]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[], [1], [5] * 24, [100, 1, 1, 1], list(range(1, 40))])
def test_turns_have_every_chunk_once_in_equal_parts(sizes, num_replicas):
    order = turns(sizes, num_replicas)
    assert sorted(chunk for _, chunk in order) == list(range(len(sizes)))
    by_replica: dict[int, list[int]] = {}
    for replica, chunk in order:
        by_replica.setdefault(replica, []).append(chunk)
    for own in by_replica.values():
        assert own == list(range(own[0], own[-1] + 1))  # neighbors
        assert sum(sizes[chunk] for chunk in own) <= sum(sizes) / num_replicas + 2 * max(sizes)


def test_replicas_take_turns():
    assert turns([5] * 5, 2) == [(0, 0), (1, 2), (0, 1), (1, 3), (1, 4)]


def test_cuts_begin_where_blocks_do():
    boxes = list(shared._cut(Box((5, 0), (1000, 4096)), 256 * 4096))
    assert [box.offsets[0] for box in boxes] == [5, 261, 517, 773]
    assert sum(box.num_elements for box in boxes) == 1000 * 4096
    assert all(box.num_elements <= 10 for box in shared._cut(Box((0, 0, 0), (3, 7, 11)), 10))
