"""The box of a DTensor's local shard: every placement that is one, and a clear refusal of those that are not."""

import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.ckpt import CheckpointError, load, save
from vescale_testing import ranks


@ranks(4)
def test_every_pair_of_placements_round_trips_through_every_other(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.arange(5.0 * 7).view(5, 7)
    pairs = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
    save(tmp_path / "c", {str(i): distribute_tensor(value, mesh, pair) for i, pair in enumerate(pairs)})
    for shift in (0, 1, 4):
        target = {
            str(i): distribute_tensor(torch.zeros(5, 7), mesh, pairs[(i + shift) % len(pairs)])
            for i in range(len(pairs))
        }
        load(tmp_path / "c", target)
        for loaded in target.values():
            assert torch.equal(loaded.full_tensor(), value)


@ranks(4)
def test_a_mesh_of_some_ranks_needs_nothing_from_the_others(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    stage = dist.get_rank() // 2
    state = {f"stage{stage}": distribute_tensor(torch.arange(6.0) + stage, mesh, [Shard(0)])}
    save(tmp_path / "c", state)
    whole = {f"stage{i}": torch.zeros(6) for i in range(2)}
    load(tmp_path / "c", whole)
    assert torch.equal(whole["stage1"], torch.arange(6.0) + 1)


def build_fsdp_tp(seed: int) -> torch.nn.Module:
    """Return a model under FSDP2 over tensor parallelism of the same dim: FSDP's placement is strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 8, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    return fully_shard(model, mesh=mesh["dp"])


@ranks(4)
def test_fsdp_over_tensor_parallelism_loads_into_plain_tensors_and_back(tmp_path):
    model = build_fsdp_tp(0)
    assert "Strided" in type(model.weight.placements[0]).__name__
    save(tmp_path / "c", {"model": model})
    torch.manual_seed(0)
    expected = torch.nn.Linear(6, 8, bias=False).weight
    plain = {"model": torch.nn.Linear(6, 8, bias=False)}
    load(tmp_path / "c", plain)
    assert torch.equal(plain["model"].weight, expected)
    other = build_fsdp_tp(1)
    load(tmp_path / "c", {"model": other})
    assert torch.equal(other.weight.to_local(), model.weight.to_local())


@ranks(2)
def test_placements_that_are_no_box_are_refused(tmp_path):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    refused = {
        r"tensor 'w': expected a reduced value, got Partial\(sum\) on mesh axis 'tp'": DTensor.from_local(
            torch.ones(4), mesh, [Partial()]
        ),
        r"tensor 'w': expected local shape \(4,\) for placements .*, got \(3,\)": DTensor.from_local(
            torch.ones(3 + dist.get_rank()), mesh, [Shard(0)], shape=torch.Size([7]), stride=(1,), run_check=False
        ),
    }
    if "vescale.dtensor" not in sys.modules:  # which gives such a DTensor boxes
        text = r"tensor 'w': expected consecutive indices of dim 0 on a rank, got others for placements"
        refused[text] = DTensor.from_local(torch.ones(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    for text, tensor in refused.items():
        with pytest.raises(CheckpointError, match=text):
            save(tmp_path / "c", {"w": tensor})


@ranks(2)
def test_an_unknown_placement_is_refused_by_name(tmp_path):
    class Interleaved(Shard):
        pass

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tensor = DTensor.from_local(torch.ones(4), mesh, [Interleaved(0)], run_check=False)
    with pytest.raises(CheckpointError, match=r"expected Shard or Replicate, .*, got .* on mesh axis 'tp'"):
        save(tmp_path / "c", {"w": tensor})
