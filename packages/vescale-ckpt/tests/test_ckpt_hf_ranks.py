"""A module on any number of ranks is saved without a gather, and what another layout saved loads bit for bit."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, WeightRule, load_hf, save_hf
from vescale.ckpt._exchange import hf_files
from vescale_testing import ranks

# name -> global shape, dtype, placement over tp; every value is replicated over dp
TENSORS = {
    "up": ((7, 6), torch.float32, Shard(0)),
    "down": ((5, 9), torch.bfloat16, Shard(1)),
    "norm": ((11,), torch.float64, Replicate()),
    "few": ((3, 2), torch.float16, Shard(0)),  # over 4 ranks the last shard is empty
    "experts": ((4, 6, 5), torch.float32, Shard(0)),
    "wide": ((5_000, 64), torch.float32, Shard(1)),  # many runs of a few values
}
RULES = [WeightRule(["expert.{n}.gate", "expert.{n}.up"], "experts", stack=0, concatenate=1)]
LAYOUTS = [{"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}]


def value_of(name):
    shape, dtype, _ = TENSORS[name]
    seed = list(TENSORS).index(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(mesh, *, zero=False, placements=None):
    """Return a module of DTensors, or of whole tensors without a mesh."""
    module = torch.nn.Module()
    for name, (_, _, placement) in TENSORS.items():
        value = torch.zeros_like(value_of(name)) if zero else value_of(name)
        if mesh is not None:
            value = distribute_tensor(value, mesh, [Replicate(), (placements or {}).get(name, placement)])
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    return module


def assert_right(module):
    for name, value in module.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, value_of(name)), name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200])
def test_every_layout_loads_what_another_saved(tmp_path, max_shard_bytes):
    @ranks(4)
    def on_every_rank():
        meshes = [init_device_mesh("cpu", tuple(each.values()), mesh_dim_names=tuple(each)) for each in LAYOUTS]
        with pytest.raises(AssertionError, match="up"):
            assert_right(build(meshes[0], zero=True))
        for number, mesh in enumerate(meshes):
            folder = tmp_path / f"{number}"
            save_hf(folder, build(mesh), rules=RULES, max_shard_bytes=max_shard_bytes)
            for other in (*meshes, None):
                loaded = build(other, zero=True)
                load_hf(folder, loaded, rules=RULES)
                assert_right(loaded)

    on_every_rank()
    for number in range(len(LAYOUTS)):
        files = [load_file(path) for path in sorted((tmp_path / f"{number}").glob("*.safetensors"))]
        found = {key: value for file in files for key, value in file.items()}
        assert torch.equal(found["wide"], value_of("wide"))
        assert torch.equal(found["expert.3.up"], value_of("experts")[3, 3:])
        loaded = build(None, zero=True)
        load_hf(tmp_path / f"{number}", loaded, rules=RULES)
        assert_right(loaded)


@ranks(4)
def test_a_rank_reads_and_writes_its_part_alone(tmp_path, monkeypatch):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    counts = {"read": 0, "written": 0}
    read_at, pwrite = hf_files.read_at, os.pwrite

    def counted_read(file, start, memory):
        counts["read"] += len(memory)
        return read_at(file, start, memory)

    def counted_write(handle, data, start):
        counts["written"] += len(data)
        return pwrite(handle, data, start)

    monkeypatch.setattr(hf_files, "read_at", counted_read)
    monkeypatch.setattr(os, "pwrite", counted_write)
    rows = {name: Shard(0) for name in TENSORS}
    save_hf(tmp_path / "hf", build(mesh, placements=rows))
    total = sum(value_of(name).nbytes for name in TENSORS)
    assert 0.24 < counts["written"] / total < 0.26
    loaded = build(mesh, zero=True, placements=rows)
    load_hf(tmp_path / "hf", loaded)
    assert_right(loaded)
    assert 0.24 < counts["read"] / total < 0.26
    whole = build(None, zero=True)
    counts["read"] = 0
    load_hf(tmp_path / "hf", whole)
    assert counts["read"] == total


@ranks(2)
def test_boxes_of_other_values(tmp_path):
    class Ranges:
        """A range of rows on each rank, uneven, and nothing on the second one of ``few``."""

        def __init__(self, name, *, zero):
            self._name, self.__global_shape__, self.dtype = name, TENSORS[name][0], TENSORS[name][1]
            cut = {"up": 3, "few": 3}[name]
            rows = (0, cut) if dist.get_rank() == 0 else (cut, self.__global_shape__[0])
            value = value_of(name)[slice(*rows)]
            self._offsets, self.view = (rows[0], 0), torch.zeros_like(value) if zero else value

        def __boxes__(self):
            return [(self._offsets, self.view)] if self.view.numel() else []

    class Module(torch.nn.Module):
        def __init__(self, *, zero):
            super().__init__()
            self.values = {name: Ranges(name, zero=zero) for name in ("up", "few")}

        def state_dict(self, **_kwargs):
            return dict(self.values)

        def load_state_dict(self, state, **_kwargs):
            self.was_loaded = state.keys() == self.values.keys()

    save_hf(tmp_path / "hf", Module(zero=False))
    loaded = Module(zero=True)
    load_hf(tmp_path / "hf", loaded)
    assert loaded.was_loaded
    for name, value in loaded.values.items():
        assert torch.equal(value.view, Ranges(name, zero=False).view)


@ranks(2)
def test_stages_of_a_pipeline_save_and_load_their_own(tmp_path):
    layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in range(2)})
    stage = torch.nn.ModuleDict({str(dist.get_rank()): layers[str(dist.get_rank())]})
    with torch.no_grad():
        for value in stage.parameters():
            value.fill_(dist.get_rank() + 1)
    save_hf(tmp_path / "hf", stage)
    loaded = torch.nn.ModuleDict({str(number): torch.nn.Linear(3, 3) for number in range(2)})
    load_hf(tmp_path / "hf", loaded)
    assert [float(loaded[str(number)].weight.detach().mean()) for number in range(2)] == [1.0, 2.0]
    load_hf(tmp_path / "hf", stage)


def refused(call) -> str:
    """Return the message, after a check that it is the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        call()
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert set(texts) == {texts[0]}
    return texts[0]


@ranks(2)
def test_replicas_that_differ_are_refused(tmp_path):
    module = torch.nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.fill_(dist.get_rank())
        module.bias.zero_()
    text = refused(lambda: save_hf(tmp_path / "hf", module))
    assert "replicas on all ranks, got differences in 'weight' [0:3, 0:3] (rank 0 differ from rank 1)" in text
    assert text.endswith("give values of one rank their own name")
    assert not (tmp_path / "hf").exists()


@ranks(2)
def test_arguments_that_differ_are_refused(tmp_path):
    rank, module = dist.get_rank(), torch.nn.Linear(3, 3)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    text = refused(lambda: save_hf(tmp_path / f"hf-{rank}", module))
    assert "expected the same folder on all ranks, got " in text
    text = refused(lambda: save_hf(tmp_path / "hf", module, max_shard_bytes=10 + rank))
    assert "expected the same max_shard_bytes on all ranks, got 10 on rank 0, 11 on rank 1" in text
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    save_hf(tmp_path / "hf", module)
    text = refused(lambda: load_hf(tmp_path / "hf", module, rename={"w": f"{rank}"}))
    assert "expected the same rename on all ranks" in text
    text = refused(lambda: load_hf(tmp_path / "none", module))
    assert "none: expected model.safetensors or model.safetensors.index.json, got neither" in text


@ranks(2)
def test_a_rank_that_fails_stops_all(tmp_path):
    module = torch.nn.Linear(3, 3)
    if dist.get_rank() == 1:
        module.register_buffer("sparse", torch.eye(2).to_sparse())
    text = refused(lambda: save_hf(tmp_path / "hf", module))
    assert text.startswith("rank 1: tensor 'sparse': expected a plain strided tensor")
    assert not (tmp_path / "hf").exists()
