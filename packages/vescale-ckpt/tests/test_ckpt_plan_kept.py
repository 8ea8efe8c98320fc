"""Ranks that hold what they held at the save before do not plan again; any change is noticed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, PerRank, load, save
from vescale.ckpt._save import saving
from vescale_testing import ranks


@pytest.fixture
def plans(monkeypatch):
    """Count plans."""
    made: list[int] = []
    merge = saving.merge_held

    def counted(tables, table_of, boxes):
        made.append(len(boxes))
        return merge(tables, table_of, boxes)

    monkeypatch.setattr(saving, "merge_held", counted)
    monkeypatch.setattr(saving, "_plans", {})
    return made


def assert_holds(path, state) -> None:
    whole = {name: torch.zeros(value.shape) if isinstance(value, torch.Tensor) else 0 for name, value in state.items()}
    load(path, whole, ignore=["own"])
    for name, value in whole.items():
        own = state[name]
        expected = own.full_tensor() if hasattr(own, "full_tensor") else own
        assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected, name


@ranks(2)
def test_values_and_plain_values_may_change(plans, tmp_path):
    mesh, path = init_device_mesh("cpu", (2,)), [tmp_path]
    dist.broadcast_object_list(path)
    state = {"w": distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)]), "r": torch.ones(4), "step": 1}
    for number in range(4):
        state["w"] += 1
        state["r"] += 1
        state["step"] += 1
        save(path[0] / f"{number}", state, async_=number % 2 == 1)
        assert_holds(path[0] / f"{number}", state)
    assert plans == ([2] if dist.get_rank() == 0 else [])


@ranks(2)
def test_a_change_on_one_rank_makes_a_new_plan(plans, tmp_path):
    mesh, path = init_device_mesh("cpu", (2,)), [tmp_path]
    dist.broadcast_object_list(path)
    whole = torch.arange(15.0).view(5, 3)
    is_last = dist.get_rank() == 1
    states = [
        {"w": distribute_tensor(whole, mesh, [Shard(0)])},
        {"w": distribute_tensor(whole, mesh, [Shard(1)])},
        {"w": distribute_tensor(whole, mesh, [Shard(1)]), **({"more": torch.ones(3)} if is_last else {})},
        {"w": whole.bfloat16()},
        {"v": whole.bfloat16()},
        {"v": whole.bfloat16(), "own": PerRank("a" * (1 + is_last))},
        {"v": whole.bfloat16(), "own": PerRank("a")},
    ]
    for number, state in enumerate(states):
        for repeat in "ab":
            save(path[0] / f"{number}{repeat}", state)
        assert len(plans) == (0 if is_last else number + 1)
    for number, dtype in ((0, torch.float32), (1, torch.float32), (3, torch.bfloat16)):
        loaded = {"w": torch.zeros(5, 3, dtype=dtype)}
        load(path[0] / f"{number}b", loaded)
        assert torch.equal(loaded["w"], whole.to(dtype))


@ranks(2)
def test_a_plan_of_a_save_that_failed_is_made_again(plans, tmp_path):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    torn = {"w": torch.full((3,), float(dist.get_rank()))}
    with pytest.raises(CheckpointError, match="expected equal replicas"):
        save(path[0] / "a", torn)
    save(path[0] / "a", {"w": torch.ones(3)})
    assert_holds(path[0] / "a", {"w": torch.ones(3)})
    assert len(plans) == (2 if dist.get_rank() == 0 else 0)


@ranks(2)
def test_plain_values_are_compared_with_kept_plans_too(plans, tmp_path):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    save(path[0] / "a", {"w": torch.ones(3), "step": 1})
    with pytest.raises(CheckpointError, match="'step': expected equal plain values on all ranks"):
        save(path[0] / "b", {"w": torch.ones(3), "step": dist.get_rank()})
    assert len(plans) == (1 if dist.get_rank() == 0 else 0)
