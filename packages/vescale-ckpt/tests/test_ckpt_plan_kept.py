"""Ranks that hold what they held at the save before do not plan again; any change is noticed."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, PerRank, load, load_dcp, load_hf, save, save_dcp, save_hf, wait
from vescale.ckpt._control import Control
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


@pytest.fixture
def rounds(monkeypatch):
    """Count rounds between ranks: those for which the training waits, and those of the thread."""
    counts, run_round = {True: 0, False: 0}, Control.run_round

    def counted(control, *args, **options):
        counts[threading.current_thread() is threading.main_thread()] += 1
        return run_round(control, *args, **options)

    monkeypatch.setattr(Control, "run_round", counted)

    def of(call):
        counts.update({True: 0, False: 0})
        call()
        wait()
        return counts[True], counts[False]

    return of


@ranks(2)
def test_a_kept_plan_needs_one_round_before_the_training_goes_on(plans, rounds, tmp_path):
    path, stage = [tmp_path], dist.get_rank()
    dist.broadcast_object_list(path)
    state = {"model": {f"layer{stage}": torch.ones(7), "shared": torch.ones(5)}, "step": 1}  # tables that differ

    def save_at(number, *, is_async):
        state["step"] = number
        return rounds(lambda: save(path[0] / f"{number}", state, async_=is_async))

    assert save_at(1, is_async=False) == (3, 0)
    assert save_at(2, is_async=False) == (2, 0)
    save_at(3, is_async=True)  # makes the process group of the thread
    assert save_at(4, is_async=True) == (1, 1)
    state["model"]["more"] = torch.ones(3)
    assert save_at(5, is_async=True) == (3, 1)
    assert save_at(6, is_async=True) == (1, 1)
    assert plans == ([2, 2] if stage == 0 else [])
    for number in range(1, 7):
        loaded = {"model": {"layer0": torch.zeros(7), "layer1": torch.zeros(7)}, "step": 0}
        load(path[0] / f"{number}", loaded, ignore=["model/shared", "model/more"])
        assert loaded["step"] == number
        assert all(value.eq(1).all() for value in loaded["model"].values())


@ranks(2)
def test_other_ranks_may_tell_their_tables_the_next_time(plans, rounds, tmp_path):
    """Stages whose plain values are alike once, and then are not."""
    path, is_last = [tmp_path], dist.get_rank() == 1
    dist.broadcast_object_list(path)
    counts = []
    for number in range(4):
        state = {"w": torch.ones(5), **({"last": 1} if is_last and number > 0 else {})}
        counts.append(rounds(lambda: save(path[0] / f"{number}", state, async_=False)))  # noqa: B023
        loaded = {"w": torch.zeros(5), **({"last": 0} if number else {})}
        load(path[0] / f"{number}", loaded)
        assert loaded["w"].eq(1).all()
    assert counts == [(3, 0), (3, 0), (2, 0), (2, 0)]
    assert plans == ([2] if not is_last else [])


@ranks(2)
def test_each_format_keeps_a_plan(plans, rounds, tmp_path):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0)
        model.bias.fill_(0)
    counts = []
    for number in range(2):
        model.bias.data += 1
        counts += [
            rounds(lambda: save(path[0] / f"c{number}", {"model": model})),  # noqa: B023
            rounds(lambda: save_dcp(path[0] / f"dcp{number}", {"model": model})),  # noqa: B023
            rounds(lambda: save_hf(path[0] / f"hf{number}", model)),  # noqa: B023
        ]
    assert counts == [(3, 0), (3, 0), (4, 0), (2, 0), (2, 0), (3, 0)]
    assert plans == ([2, 2, 2] if dist.get_rank() == 0 else [])
    others = [torch.nn.Linear(4, 2) for _ in range(3)]
    load(path[0] / "c1", {"model": others[0]})
    load_dcp(path[0] / "dcp1", {"model": others[1]}, allow_pickle=True)
    load_hf(path[0] / "hf1", others[2])
    assert all(other.bias.eq(2).all() and other.weight.eq(0).all() for other in others)
