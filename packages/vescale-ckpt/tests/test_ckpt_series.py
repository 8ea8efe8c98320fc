"""A run saves one checkpoint after the other: the last complete one is found, and the earlier ones are removed."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, latest, read_manifest, save
from vescale_testing import ranks


def state(step: int) -> dict:
    return {"w": torch.full((10,), float(step)), "step": step}


def names(directory) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_last_one_is_the_one_that_was_saved_last(tmp_path):
    assert latest(tmp_path / "runs") is None
    for step in (9, 10, 100, 20):
        save(tmp_path / "runs" / f"step-{step}", state(step))
        assert latest(tmp_path / "runs") == tmp_path / "runs" / f"step-{step}"
    save(tmp_path / "runs" / "step-9", state(9), overwrite=True)
    assert latest(tmp_path / "runs").name == "step-9"


def test_a_copy_is_as_old_as_its_original(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"step-{step}", state(step))
    os.utime(tmp_path / "step-1" / "manifest.json")
    assert latest(tmp_path).name == "step-2"


def test_incomplete_and_damaged_ones_are_passed_over(tmp_path, caplog):
    for step in (1, 2, 3, 4):
        save(tmp_path / f"step-{step}", state(step))
    (tmp_path / "step-4" / "manifest.json").unlink()
    (tmp_path / "step-3" / "manifest.json").write_text("{")
    next((tmp_path / "step-2").glob("*/*")).unlink()
    (tmp_path / "notes.txt").write_text("")
    assert latest(tmp_path).name == "step-1"
    assert "step-3: manifest.json: expected JSON" in caplog.text
    assert "step-2: expected data file" in caplog.text


def test_the_last_ones_are_kept(tmp_path):
    save(tmp_path / "best-1", state(1))
    save(tmp_path / "final", state(1))
    for step in range(8, 13):
        save(tmp_path / f"step-{step}", state(step), keep_last=3)
    assert names(tmp_path) == {"best-1", "final", "step-10", "step-11", "step-12"}
    (tmp_path / "step-11" / "notes.txt").write_text("do not lose")
    save(tmp_path / "step-13", state(13), keep_last=1)
    assert names(tmp_path) == {"best-1", "final", "step-11", "step-13"}
    assert names(tmp_path / "step-11") == {"notes.txt"}


def test_the_new_one_is_never_removed_whatever_the_clock_says(tmp_path, monkeypatch):
    save(tmp_path / "step-1", state(1))
    monkeypatch.setattr("time.time", lambda: 0.0)
    save(tmp_path / "step-2", state(2), keep_last=1)
    assert names(tmp_path) == {"step-2"}


def test_links_are_left_alone(tmp_path):
    save(tmp_path / "elsewhere" / "kept", state(1))
    (tmp_path / "step-1").symlink_to(tmp_path / "elsewhere" / "kept")
    save(tmp_path / "step-2", state(2), keep_last=1)
    assert read_manifest(tmp_path / "step-1").leaves == {"step": 1}


def test_a_save_is_complete_if_earlier_ones_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def refuse(*_args):
        raise PermissionError("Permission denied")

    save(tmp_path / "step-1", state(1))
    monkeypatch.setattr("vescale.ckpt._format.series.names_in", refuse)
    save(tmp_path / "step-2", state(2), keep_last=1)
    assert "earlier checkpoints could not be removed: Permission denied" in caplog.text
    assert read_manifest(tmp_path / "step-2").leaves == {"step": 2}


def test_a_save_that_fails_removes_nothing(tmp_path):
    save(tmp_path / "step-1", state(1))
    with pytest.raises(Exception, match="expected a tensor"):
        save(tmp_path / "step-2", {"w": object()}, keep_last=1)
    assert names(tmp_path) == {"step-1"}


def test_one_that_is_removed_in_part_is_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path / "step-1", state(1))
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr("shutil.rmtree", lambda *_args, **_kwargs: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save(tmp_path / "step-2", state(2), keep_last=1)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert names(tmp_path) == {"step-1", "step-2"}
    assert latest(tmp_path).name == "step-2"
    assert read_manifest(tmp_path / "step-2").leaves == {"step": 2}


@ranks(3)
def test_all_ranks_go_on_from_the_same_one(tmp_path, monkeypatch):
    """A file system that is not up to date may show another directory to another rank."""
    for step in (1, 2):
        save(tmp_path / f"step-{step}", state(step))
    if dist.get_rank() == 1:
        monkeypatch.setattr("vescale.ckpt._load.latest.complete_in", lambda _directory: [])
    assert latest(tmp_path).name == "step-2"
    with pytest.raises(CheckpointError, match=r"expected the same directory on all ranks, got .*/0 on rank 0"):
        latest(tmp_path / str(dist.get_rank()))
