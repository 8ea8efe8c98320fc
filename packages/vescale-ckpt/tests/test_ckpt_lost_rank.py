"""A rank that ends during a save or a load ends the others, soon, with an error that names it; `path` is unchanged."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import load, read_manifest, save
from vescale.ckpt._lost_ranks import Failures
from vescale_testing import RankFailure, ranks, run_ranks


@pytest.fixture(autouse=True)
def quick_failures(monkeypatch):
    """Look for failures of other ranks often; wait for their answers less than the 3 s after which ranks are ended."""
    monkeypatch.setattr(Failures, "POLL", timedelta(seconds=0.1))
    monkeypatch.setattr(Failures, "PATIENCE", 2.0)


class Leaves:
    """An object whose state dict ends one rank when it is taken for the second time, or loaded."""

    def __init__(self, lost):
        self.lost, self.calls = lost, 0

    def state_dict(self):
        self.calls += 1
        if self.calls == 2:
            self.load_state_dict({})
        return {"value": torch.ones(2)}

    def load_state_dict(self, _state_dict):
        if dist.get_rank() == self.lost:
            os._exit(7)


def save_twice(path, lost):
    state = {"model": torch.nn.Linear(2, 2), "other": Leaves(lost)}
    save(path / "first", state)
    save(path / "second", state)


def load_once(path, lost):
    state = {"other": Leaves(lost)}
    save(path / "first", state)
    state["other"].calls = -10
    load(path / "first", state)


@pytest.mark.parametrize(("body", "world_size", "lost"), [(save_twice, 3, 1), (save_twice, 3, 0), (load_once, 2, 1)])
def test_the_others_name_the_lost_rank(tmp_path, body, world_size, lost):
    began = time.monotonic()
    with pytest.raises(RankFailure, match=rf"rank {lost}: left with exit status 7") as failure:
        run_ranks(body, world_size, tmp_path, lost, timeout=60)
    assert time.monotonic() - began < 60  # gloo alone waits half an hour
    assert set(failure.value.exceptions) == set(range(world_size)) - {lost}, failure.value
    for rank, error in failure.value.exceptions.items():
        head = f" of a checkpoint failed on rank {rank}; no answer from rank {lost}: ended, or hangs elsewhere\n"
        assert isinstance(error, RuntimeError)
        assert head in str(error), error
    assert read_manifest(tmp_path / "first").world_size == world_size
    assert not (tmp_path / "second" / "manifest.json").exists()


@ranks(2)
def test_a_slow_rank_is_waited_for(tmp_path):
    if dist.get_rank() == 1:
        time.sleep(0.5)
    path = [tmp_path]
    dist.broadcast_object_list(path)
    save(path[0] / "slow", {"step": 1})
    assert read_manifest(path[0] / "slow").leaves == {"step": 1}
