"""A save appears whole or not at all: failures and crashes leave the path, and an earlier checkpoint, as they were."""

import itertools
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, load, read_manifest, save, verify
from vescale_testing import ranks, run_ranks


def state(value: float) -> dict:
    return {"w": torch.full((100, 100), value), "step": int(value)}


def assert_holds(path: Path, value: float) -> None:
    verify(path)
    loaded = state(0)
    load(path, loaded)
    assert loaded["w"].eq(value).all()
    assert loaded["step"] == value


def test_an_existing_path_is_refused_and_replaced_only_on_demand(tmp_path):
    path = tmp_path / "c"
    save(path, state(1))
    with pytest.raises(CheckpointError, match="got an existing one; save to another path, or pass overwrite=True"):
        save(path, state(2))
    assert_holds(path, 1)
    save(path, state(2), overwrite=True)
    assert_holds(path, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_directory_may_be_there_but_other_things_are_never_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", state(1))
    assert_holds(tmp_path / "empty", 1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"expected a checkpoint to overwrite, got no manifest.json"):
        save(tmp_path / "thesis", state(1), overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"


def test_parents_are_created(tmp_path):
    save(tmp_path / "a" / "b" / "c", state(1))
    assert_holds(tmp_path / "a" / "b" / "c", 1)


def test_a_path_that_cannot_be_written_is_refused_before_the_state_is_read(tmp_path):
    class Untouched:
        def state_dict(self):
            raise AssertionError("the state was read")

        def load_state_dict(self, state_dict): ...

    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r".*/file/c: expected a writable path, got .*Error: "):
        save(tmp_path / "file" / "c", {"model": Untouched()})


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_write_that_fails_on_one_rank_fails_alike_on_all_and_leaves_nothing(tmp_path, overwrite):
    path = tmp_path / "c"
    if overwrite:
        save(path, state(1))

    def body() -> str:
        if dist.get_rank() == 1:  # a file may grow to 4 kB only: as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(CheckpointError) as caught:
            save(path, state(2), overwrite=overwrite)
        return str(caught.value)

    texts = run_ranks(body, 3)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: OSError: ")
    assert list(tmp_path.iterdir()) == ([path] if overwrite else [])
    if overwrite:
        assert_holds(path, 1)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_the_middle_leaves_the_earlier_checkpoint(tmp_path, killed):
    path = tmp_path / "c"
    save(path, state(1))

    def body():
        flush = os.fsync

        def flush_and_die(file):
            flush(file)
            if dist.get_rank() == killed:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = flush_and_die
        save(path, state(2), overwrite=True)

    with pytest.raises(AssertionError, match=f"rank {killed}"):
        run_ranks(body, 2, timeout=20)
    assert_holds(path, 1)


@pytest.mark.parametrize("step", ["open", "os.replace"])
def test_a_failure_at_the_very_end_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, step):
    path = tmp_path / "c"
    save(path, state(1))

    def fail(*_args, **_kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(f"vescale.ckpt._format.storage.{step}", fail, raising=False)
    with pytest.raises(CheckpointError, match="OSError: No space left on device"):
        save(path, state(2), overwrite=True)
    assert_holds(path, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_removes_the_unfinished_directory(tmp_path, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("vescale.ckpt._save.checkpoint.write_data_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "c", state(1))
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_directory_is_no_checkpoint(tmp_path):
    save(tmp_path / "c", state(1))
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a complete checkpoint, got a directory without manifest.json"):
        load(tmp_path / "c", state(0))
    with pytest.raises(CheckpointError, match=r"/nowhere: expected a checkpoint, got No such file"):
        read_manifest(tmp_path / "nowhere")


def test_leftovers_of_a_killed_save_are_mentioned_and_in_nobodys_way(tmp_path, caplog):
    (tmp_path / "c" / "save-00001234").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"without manifest\.json; a save runs or did not finish"):
        load(tmp_path / "c", state(0))
    save(tmp_path / "c", state(1))
    assert "c/save-00001234 is left over from a save that did not finish" in caplog.text
    save(tmp_path / "c", state(2), overwrite=True)
    assert_holds(tmp_path / "c", 2)


@ranks(2)
def test_ranks_must_agree_on_path_and_metadata(tmp_path):
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"the same path on all ranks, got .*/c0 on rank 0, .*/c1 on rank 1"):
        save(tmp_path / f"c{rank}", state(1))
    with pytest.raises(CheckpointError, match="expected the same metadata on all ranks"):
        save(tmp_path / "c", state(1), metadata={"rank": rank})
    assert list(tmp_path.iterdir()) == []


def kill_at_step(step: int, run) -> bool:
    """Run in a child that is killed before its ``step``-th operation on files; return whether it was."""
    pid = os.fork()
    if pid == 0:
        steps = itertools.count()

        def counted(function):
            def before(*args, **kwargs):
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return before

        for name in ("open", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_step_leaves_the_earlier_checkpoint_or_the_new_one(tmp_path, overwrite):
    seen = set()
    for step in itertools.count():
        path = tmp_path / f"c{step}"
        if overwrite:
            save(path, state(1))
        was_killed = kill_at_step(step, lambda path=path: save(path, state(2), overwrite=overwrite))
        try:
            value = read_manifest(path).leaves["step"]
        except CheckpointError:
            value = 0
        seen.add(value)
        if value:
            assert_holds(path, value)
        save(path, state(3), overwrite=overwrite or value > 0)  # nothing that is left is in the way
        assert_holds(path, 3)
        if not was_killed:
            break
    assert value == 2
    assert seen == ({1, 2} if overwrite else {0, 2})
    assert step > 5


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_kills", [10, pytest.param(100, marks=pytest.mark.thorough)])
def test_a_kill_at_any_moment_leaves_one_version_complete(tmp_path, num_kills, is_async):
    path, moments = tmp_path / "c", random.Random(3)
    save(path, state(0))
    seen: list[int] = []
    while len(seen) < num_kills or seen[-1] == 0:  # until a save was faster
        pid = os.fork()
        if pid == 0:
            try:
                for value in itertools.count(int(read_manifest(path).leaves["step"]) + 1):
                    save(path, state(value), overwrite=True, async_=is_async)
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen.append(read_manifest(path).leaves["step"])
        assert_holds(path, seen[-1])
    assert seen == sorted(seen)


class Meanwhile:
    """An object in the state that does something when a save or a load comes to it."""

    def __init__(self, action) -> None:
        self.action = action

    def state_dict(self):
        self.action()
        return {}

    def load_state_dict(self, state_dict): ...


def test_two_saves_to_one_path_leave_one_of_them_complete(tmp_path):
    path = tmp_path / "c"
    other = Meanwhile(lambda: save(path, state(1)))
    with pytest.raises(CheckpointError, match="no other save to the same path, got one that was completed meanwhile"):
        save(path, {**state(2), "other": other})
    assert_holds(path, 1)
    other = Meanwhile(lambda: save(path, state(3), overwrite=True))
    save(path, {**state(4), "other": other}, overwrite=True)
    assert_holds(path, 4)
    assert len(list(path.iterdir())) == 2


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError("Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    path = tmp_path / "c"
    save(path, state(1))
    assert_holds(path, 1)
    other = Meanwhile(lambda: save(tmp_path / "d", state(1)))
    with pytest.raises(CheckpointError, match="no other save to the same path, got one that was completed meanwhile"):
        save(tmp_path / "d", {**state(2), "other": other})
    assert_holds(tmp_path / "d", 1)


def test_a_load_beside_a_save_to_the_same_path_is_told_to_read_again(tmp_path):
    path = tmp_path / "c"
    save(path, state(1))
    other = Meanwhile(lambda: save(path, state(2), overwrite=True))
    with pytest.raises(CheckpointError, match="a save has replaced the checkpoint while it was read"):
        load(path, {**state(0), "other": other})
    assert_holds(path, 2)
