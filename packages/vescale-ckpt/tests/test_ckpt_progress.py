"""`progress` tells the first rank alone of the bytes that it writes and reads, up to all of them."""

import io
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load, read_manifest, save, wait
from vescale.ckpt._load import shared
from vescale_testing import ranks


@pytest.fixture
def counts():
    """Those that a rank was told, each a pair of bytes that are done and all bytes."""
    return []


def state(fill: float) -> dict:
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), torch.full((3000, 1000), fill, dtype=torch.float32)
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),  # several blocks on a rank
        "replicated": torch.full((700, 500), fill, dtype=torch.float32),
        "small": torch.full((3,), fill, dtype=torch.bfloat16),
        "step": int(fill),
    }


def same_path(tmp_path):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    return path[0]


def assert_rises_to(counts, total) -> None:
    """On the first rank; the others were told nothing."""
    if dist.get_rank() != 0:
        assert counts == []
        return
    assert {of for _, of in counts} == {total}
    done = [number for number, _ in counts]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)
    assert len(set(done)) > 2


def written_by_first(path) -> int:
    manifest = read_manifest(path)
    pieces = [(name, piece) for name in manifest.tensors for piece in manifest.pieces(name)]
    own = [(name, piece.box.num_elements) for name, piece in pieces if piece.file.startswith("data-0-")]
    return sum(count * getattr(torch, manifest.tensors[name].meta.dtype).itemsize for name, count in own)


@pytest.mark.parametrize("is_async", [False, True])
@ranks(2)
def test_what_the_first_rank_writes(tmp_path, counts, is_async):
    path = same_path(tmp_path) / "c"
    for overwrite in (False, True):  # the plan is kept for the second one
        del counts[:]
        save(path, state(1), progress=lambda *told: counts.append(told), async_=is_async, overwrite=overwrite)
        wait()
        assert_rises_to(counts, written_by_first(path))


@pytest.mark.parametrize("is_shared", [False, True])
@ranks(3)
def test_what_the_first_rank_reads(tmp_path, counts, monkeypatch, is_shared):
    if is_shared:  # replicas on several hosts
        monkeypatch.setattr("socket.gethostname", lambda: f"host-{dist.get_rank()}")
        monkeypatch.setattr(shared, "LEAST_BYTES", 1)
    path = same_path(tmp_path) / "c"
    save(path, state(1))
    loaded = state(0)
    load(path, loaded, progress=lambda *told: counts.append(told))
    assert loaded["replicated"].eq(1).all()
    assert_rises_to(counts, 4 * (1000 * 1000 + 700 * 500) + 2 * 3)


@ranks(1)
def test_nothing_to_write(tmp_path, counts):
    save(tmp_path / "c", {"step": 1}, progress=lambda *told: counts.append(told))
    load(tmp_path / "c", {"step": 1}, progress=lambda *told: counts.append(told))
    assert counts == [(0, 0), (0, 0)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("progress", "stream"), [(True, Terminal), (True, io.StringIO), (False, Terminal)])
@ranks(2)
def test_a_bar_on_the_terminal_of_the_first_rank(tmp_path, monkeypatch, progress, stream):
    path = same_path(tmp_path) / "c"
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    save(path, state(1), progress=progress)
    of_save = shown.getvalue()
    load(path, state(0), progress=progress)
    of_load = shown.getvalue().removeprefix(of_save)
    if dist.get_rank() != 0 or not progress or stream is not Terminal:
        assert of_save == of_load == ""
        return
    assert "saved 6.70 MB of 6.70 MB, 100%" in of_save
    assert "loaded 7.40 MB of 7.40 MB, 100%" in of_load
    assert of_save.endswith(f"\r{'':<60}\r")  # it goes in the end
    assert of_load.endswith(f"\r{'':<60}\r")


@ranks(2)
def test_an_error_of_the_function_is_an_error_on_all_ranks(tmp_path):
    path = same_path(tmp_path) / "c"

    def stop(_done, _total):
        raise ValueError("stop")

    with pytest.raises(
        CheckpointError, match=r"rank 0: expected progress\(.*\) to return, got ValueError: stop; correct the function"
    ):
        save(path, state(1), progress=stop)
    save(path, state(1), progress=stop, async_=True)
    with pytest.raises(
        CheckpointError, match=r"rank 0: expected progress\(.*\) to return, got ValueError: stop; correct the function"
    ):
        wait()
    assert not (path / "manifest.json").exists()
    save(path, state(1))
    with pytest.raises(
        CheckpointError, match=r"rank 0: expected progress\(.*\) to return, got ValueError: stop; correct the function"
    ):
        load(path, state(0), progress=stop)
