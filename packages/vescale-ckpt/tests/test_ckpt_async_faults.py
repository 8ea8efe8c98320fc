"""What fails in the background raises on all ranks at the next call, and keeps the earlier checkpoint."""

import logging
import os
import re
import resource
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, latest, load, read_manifest, save, verify, wait
from vescale.ckpt._lost_ranks import Failures
from vescale.ckpt._save.staging import Staging
from vescale_testing import RankFailure, halved, ranks, run_ranks


def state(value: int) -> dict:
    return {"w": torch.full((300, 300), float(value)), "step": value}


def fill_the_disk_of(rank: int) -> None:
    """Let files of one rank grow to 4 kB only."""
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def empty_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


CALLS = {
    "wait": lambda _: wait(),
    "save": lambda path: save(path / "next", state(3)),
    "load": lambda path: load(path / "c", state(0)),
    "latest": latest,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failed_write_raises_at_the_next_call_on_all_ranks(tmp_path, call):
    path = tmp_path / "c"

    def body():
        save(path, state(1), overwrite=True)
        fill_the_disk_of(1)
        save(path, state(2), overwrite=True, async_=True)  # returns
        with pytest.raises(CheckpointError) as caught:
            CALLS[call](tmp_path)
        empty_the_disk()
        loaded = state(0)
        load(path, loaded)  # the error is raised once
        assert loaded["step"] == 1
        save(path, state(4), overwrite=True, async_=True)
        wait()
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert len(set(texts)) == 1
    assert f"expected the asynchronous save of {path} to succeed, got rank 1: OSError: " in texts[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert read_manifest(path).leaves["step"] == 4
    assert len(list(path.iterdir())) == 2


def test_an_error_that_no_call_asks_for_is_logged(tmp_path, caplog, monkeypatch):
    def fail(*_args):
        raise OSError("No space left on device")

    monkeypatch.setattr("vescale.ckpt._save.checkpoint.write_data_file", fail)
    with caplog.at_level(logging.ERROR):
        save(tmp_path / "c", state(1), async_=True)
        with pytest.raises(CheckpointError, match="No space left on device"):
            wait()
    assert f"the asynchronous save of {tmp_path / 'c'} failed: OSError: No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_replicas_that_differ_are_found_by_the_writer(tmp_path):
    torn = state(1)
    torn["w"][3, 3] += dist.get_rank()
    save(tmp_path / "c", torn, async_=True)
    torn["w"].zero_()
    with pytest.raises(CheckpointError, match=r"got differences in 'w' .*rank 0 differ from rank 1"):
        wait()
    assert not (tmp_path / "c" / "manifest.json").exists()


@ranks(2)
def test_no_memory_for_the_copy_of_one_rank(tmp_path, monkeypatch):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    save(path[0] / "c", state(1))
    allocate = Staging._buffer

    def fail(*args, **kwargs):
        if dist.get_rank() == 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return allocate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "_buffer", fail)
        with pytest.raises(CheckpointError, match=r"rank 1: RuntimeError: .*can't allocate memory"):
            save(path[0] / "c", state(2), overwrite=True, async_=True)
    wait()
    verify(path[0] / "c")
    assert read_manifest(path[0] / "c").leaves["step"] == 1
    save(path[0] / "c", state(3), overwrite=True, async_=True)
    wait()
    assert read_manifest(path[0] / "c").leaves["step"] == 3


@halved
@pytest.mark.parametrize("killed", [0, 1, 2])
@pytest.mark.parametrize("phase", ["copy", "write", "flush"])
def test_a_rank_killed_in_any_phase_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, phase, killed):
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 1.0)
    path = tmp_path / "c"
    save(path, state(1))
    places = {
        "copy": "vescale.ckpt._save.staging.Staging.copies",
        "write": "vescale.ckpt._save.checkpoint.write_data_file",
        "flush": "os.fsync",
    }

    def die(*_args, **_kwargs):
        assert (threading.current_thread() is threading.main_thread()) == (phase == "copy")
        os.kill(os.getpid(), signal.SIGKILL)

    def body():
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == killed:
                patch.setattr(places[phase], die)
            save(path, state(2), overwrite=True, async_=True)
            wait()

    with pytest.raises(RankFailure, match=f"rank {killed}") as failure:
        run_ranks(body, 3, timeout=60)
    for error in failure.value.exceptions.values():
        assert re.search(rf"no answer from rank (\d+, )*{killed}\b", str(error))
    verify(path)
    assert read_manifest(path).leaves["step"] == 1
    loaded = state(0)
    load(path, loaded)
    assert loaded["w"].eq(1).all()
