"""Process groups: a subset of the ranks, an explicit group, and a default group without a CPU backend."""

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, load, save, verify
from vescale_testing import ranks


@ranks(3)
def test_a_part_of_the_ranks_saves_and_loads_by_itself(tmp_path):
    members = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="expected a member of process_group, got rank 0"):
            save(tmp_path / "c", {"w": torch.ones(2)}, process_group=members)
        return
    value = torch.arange(40_000.0)
    save(tmp_path / "c", {"w": value}, process_group=members)
    assert verify(tmp_path / "c").files.keys() == {"data-0-0.safetensors", "data-1-0.safetensors"}
    target = {"w": torch.zeros(40_000)}
    load(tmp_path / "c", target, process_group=members)
    assert torch.equal(target["w"], value)


@ranks(2, backend=None)
def test_a_default_group_without_a_cpu_backend_gets_a_helper(tmp_path, monkeypatch):
    # "cuda:gloo" stands for NCCL: a backend for device tensors only.
    store = dist.FileStore(str(tmp_path / "store"), 2)
    rank = store.add("ranks", 1) - 1
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=2)
    with pytest.raises(ValueError, match=r'pass a group of torch.distributed.new_group\(backend="gloo"\)'):
        save(tmp_path / "c", {"w": torch.ones(2)}, process_group=dist.group.WORLD)
    made, make = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made.append(args) or make(*args, **options))
    for _ in range(2):
        save(tmp_path / "c", {f"w{rank}": torch.ones(2)}, overwrite=True)
    target = {f"w{rank}": torch.zeros(2)}
    load(tmp_path / "c", target)
    assert target[f"w{rank}"].tolist() == [1, 1]
    assert made == [([0, 1],)]  # the first call alone makes one
    dist.destroy_process_group()


def test_a_group_without_torch_distributed_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected torch\.distributed to be initialized for process_group"):
        save(tmp_path / "c", {"w": torch.ones(2)}, process_group=object())


@ranks(2)
def test_plain_values_must_agree(tmp_path):
    with pytest.raises(CheckpointError, match=r"'lr': expected equal .* on all ranks, got 0 on rank 0 and 1 on rank 1"):
        save(tmp_path / "c", {"lr": dist.get_rank()})
    save(tmp_path / "c", {f"rank{dist.get_rank()}": {"lr": dist.get_rank()}})
    target = {"rank0": {"lr": None}, "rank1": {"lr": None}}
    load(tmp_path / "c", target)
    assert target == {"rank0": {"lr": 0}, "rank1": {"lr": 1}}
