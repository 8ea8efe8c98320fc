"""A rank that is lost while process groups are made, or that cannot make its own, is an error on all, soon."""

import gc
import os
import re
import signal
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, _background, load, save, verify, wait
from vescale.ckpt._control import own_group
from vescale.ckpt._load import shared
from vescale.ckpt._lost_ranks import Failures
from vescale_testing import RankFailure, halved, ranks, run_ranks


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


@pytest.fixture
def on_hosts(monkeypatch):
    """Every rank is on a host of its own, and the first two are replicas of each other, as are the other two."""
    monkeypatch.setattr("socket.gethostname", lambda: f"host-{dist.get_rank()}")
    monkeypatch.setattr(shared, "LEAST_BYTES", 1)


def state_of(rank: int) -> dict:
    return {"model": {f"layer{rank // 2}": torch.full((500,), 1.0 + rank // 2)}}


def load_with_replicas(path):
    load(path, state_of(dist.get_rank()), strict=False)


def save_in_background(path):
    save(path, state_of(dist.get_rank()), async_=True, overwrite=True)
    wait()


CALLS = {"load": load_with_replicas, "save": save_in_background}


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "c", {"model": state_of(0)["model"] | state_of(2)["model"]})
    return tmp_path / "c"


def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_args, **_kwargs):
    raise OSError("too many open files")


@halved
@pytest.mark.usefixtures("on_hosts")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_killed_there_is_named_by_the_others(path, call, lost):
    def body():
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == lost:
                patch.setattr(dist, "new_group", kill)
            CALLS[call](path)

    began = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank {lost}") as failure:
        run_ranks(body, 4, timeout=60)
    assert time.monotonic() - began < 30  # torch alone waits for half an hour
    assert set(failure.value.exceptions) == set(range(4)) - {lost}, failure.value
    for error in failure.value.exceptions.values():
        assert re.search(rf"no answer from rank (\d+, )*{lost}\b", str(error))
    verify(path)


@pytest.mark.usefixtures("on_hosts")
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_cannot_make_one_is_named_on_all(path, call):
    def body():
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 2:
                patch.setattr(dist, "new_group", fail)
            began = time.monotonic()
            with pytest.raises(CheckpointError, match="rank 2: OSError: too many open files"):
                CALLS[call](path)
            return time.monotonic() - began

    assert max(run_ranks(body, 4, timeout=60)) < 10
    verify(path)


@pytest.mark.usefixtures("on_hosts")
def test_they_are_made_once(path):
    def body():
        made = []
        make = dist.new_group

        def counted(members, **options):
            made.append(tuple(members))
            return make(members, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", counted)
            for _ in range(2):
                load_with_replicas(path)
                save_in_background(path)
        return made

    first, everyone = [(0, 1), (2, 3)], (0, 1, 2, 3)
    assert run_ranks(body, 4) == [[first[rank // 2], everyone] for rank in range(4)]


@ranks(2, backend=None)
def test_they_end_with_the_default_group(tmp_path):
    """Also if the program asks for nothing more."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    rank = store.add("ranks", 1) - 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    save(tmp_path / "c", {"w": torch.ones(5)}, async_=True)
    _background._present.join()
    group = weakref.ref(own_group((0, 1), "background"))
    assert group() is not None
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    wait()
