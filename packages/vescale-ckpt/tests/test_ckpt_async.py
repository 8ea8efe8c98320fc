"""An asynchronous save stores the state of the moment of its call, while training goes on."""

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, PerRank, diff, latest, load, read_manifest, save, verify, wait
from vescale.ckpt._save.save import _staging
from vescale.ckpt._save.saving import Saving
from vescale_testing import ranks


@pytest.fixture
def held_back(monkeypatch):
    """Let the files of saves in the background wait for an event."""
    write, event = Saving.write, threading.Event()

    def write_later(saving):
        assert threading.current_thread() is threading.main_thread() or event.wait(30)
        return write(saving)

    monkeypatch.setattr(Saving, "write", write_later)
    yield event
    event.set()


def training(seed: int):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    step(state)
    return state


def step(state) -> None:
    state["model"](torch.ones(3, 4)).sum().backward()
    state["optimizer"].step()
    state["step"] += 1


def test_what_changes_after_the_call_is_not_stored(tmp_path, held_back):
    state = training(0)
    metadata = {"note": ["before"]}
    save(tmp_path / "later", state, metadata=metadata, async_=True)
    metadata["note"].append("after")
    other = training(0)
    step(state)
    assert not (tmp_path / "later" / "manifest.json").exists()
    held_back.set()
    wait()
    assert read_manifest(tmp_path / "later").metadata == {"note": ["before"]}
    save(tmp_path / "at once", other)
    assert diff(tmp_path / "later", tmp_path / "at once") == []
    save(tmp_path / "after", state)
    assert diff(tmp_path / "later", tmp_path / "after") != []
    verify(tmp_path / "later")


@pytest.mark.parametrize("call", ["save", "load", "latest"])
def test_the_next_call_waits(tmp_path, held_back, call):
    save(tmp_path / "step-1", {"step": 1}, async_=True)
    threading.Timer(0.3, held_back.set).start()
    if call == "save":
        save(tmp_path / "step-2", {"step": 2}, async_=True, keep_last=1)
        wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    elif call == "load":
        state = {"step": 0}
        load(tmp_path / "step-1", state)
        assert state["step"] == 1
    else:
        assert latest(tmp_path) == tmp_path / "step-1"


def test_to_wait_for_nothing(tmp_path):
    before = threading.active_count()
    wait()
    save(tmp_path / "a", {"step": 1})
    wait()
    assert threading.active_count() == before
    assert read_manifest(tmp_path / "a").leaves == {"step": 1}


@ranks(3)
def test_sharded_and_replicated_state_while_ranks_talk(tmp_path):
    """The writer has a process group of its own, so collectives of the training do not mix with its rounds."""
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(70.0).view(7, 10)
    state = {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replicated": whole.clone(),
        "own": PerRank(dist.get_rank()),
    }
    path = [tmp_path]
    dist.broadcast_object_list(path)
    for number in range(3):
        save(path[0] / f"step-{number}", state, async_=True)
        for _ in range(50):
            dist.all_reduce(torch.ones(3))
        for each in state.values():
            local = each.to_local() if isinstance(each, DTensor) else each
            if isinstance(local, torch.Tensor):
                local += 1
    wait()
    for number in range(3):
        loaded = {name: torch.zeros(7, 10) for name in ("sharded", "columns", "replicated")}
        loaded["own"] = PerRank(None)
        load(path[0] / f"step-{number}", loaded)
        for name in ("sharded", "columns", "replicated"):
            assert torch.equal(loaded[name], whole + number)
        assert loaded["own"].value == dist.get_rank()


@ranks(2)
def test_ranks_must_agree_on_async(tmp_path):
    with pytest.raises(CheckpointError, match="the same async_ on all ranks, got False on rank 0, True on rank 1"):
        save(tmp_path / "a", {"step": 1}, async_=dist.get_rank() == 1)


@ranks(2)
def test_subgroups_have_writers_of_their_own(tmp_path):
    groups = [dist.new_group([rank]) for rank in range(2)]
    save(
        tmp_path / f"own-{dist.get_rank()}",
        {"step": dist.get_rank()},
        process_group=groups[dist.get_rank()],
        async_=True,
    )
    wait()
    assert read_manifest(tmp_path / f"own-{dist.get_rank()}").leaves == {"step": dist.get_rank()}


def test_buffers_are_used_again(tmp_path):
    state = {"a": torch.ones(1000), "b": torch.ones(3, dtype=torch.bfloat16)}
    save(tmp_path / "a", state, async_=True)
    wait()
    before = [buffer.data_ptr() for buffer in _staging._buffers]
    save(tmp_path / "b", {"a": state["a"][:900], "b": state["b"]}, async_=True)
    wait()
    assert [buffer.data_ptr() for buffer in _staging._buffers] == before != []
    save(tmp_path / "c", {"a": torch.ones(10**6)}, async_=True)
    wait()
    verify(tmp_path / "c")


PROGRAM = """
import torch, torch.distributed as dist
from vescale.ckpt import save
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
save({path!r}, {{"w": torch.ones(10**6)}}, async_=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()", "raise SystemExit(3)"])
def test_a_program_that_ends_waits(tmp_path, end):
    program = PROGRAM.format(path=str(tmp_path / "a"), end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (3 if "Exit" in end else 0), done.stderr
    verify(tmp_path / "a")


def test_training_stops_for_the_copy_alone(tmp_path, held_back):
    began = time.monotonic()
    save(tmp_path / "a", {"w": torch.ones(1000)}, async_=True)
    assert time.monotonic() - began < 5  # the files wait for the event, 30 s at most
    held_back.set()
    wait()
