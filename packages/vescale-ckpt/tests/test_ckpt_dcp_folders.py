"""A folder written for torch.distributed.checkpoint is complete or no checkpoint, and has what `save` accepts."""

import logging
import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from vescale.ckpt import CheckpointError, PerRank, load_dcp, save_dcp
from vescale.ckpt._exchange import dcp_write
from vescale_testing import ranks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def load_there(path, **state):
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


@dataclass
class Blocks:
    """A value with any number of boxes on a rank."""

    __global_shape__: tuple[int, ...]
    dtype: torch.dtype
    blocks: list[tuple[tuple[int, ...], torch.Tensor]]

    def __boxes__(self):
        return self.blocks


def test_boxes_of_any_number_and_size_are_chunks(tmp_path):
    value = torch.arange(35.0).view(7, 5)
    rows = {0: [(0, 1), (4, 7)], 1: [], 2: [(1, 2), (2, 3), (3, 4)]}

    def save_blocks():
        own = rows[dist.get_rank()]
        blocks = [((a, c), value[a:b, c : c + n]) for a, b in own for c, n in ((0, 2), (2, 3))]
        save_dcp(tmp_path / "c", {"w": Blocks((7, 5), torch.float32, blocks)})

    run_ranks(save_blocks, 3)
    assert torch.equal(load_there(tmp_path / "c", w=torch.zeros(7, 5))["w"], value)
    stored = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["w"]
    assert len(stored.chunks) == 10
    state = {"w": Blocks((7, 5), torch.float32, [((3, 0), torch.zeros(4, 5)), ((0, 1), torch.zeros(3, 2))])}
    load_dcp(tmp_path / "c", state, allow_pickle=True)
    assert torch.equal(state["w"].blocks[0][1], value[3:])
    assert torch.equal(state["w"].blocks[1][1], value[:3, 1:3])


@ranks(4)
def test_replicas_are_written_once_and_shared_out(tmp_path):
    save_dcp(tmp_path / "c", {"w": torch.arange(100_000.0)})
    dist.barrier()
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 110_000


@ranks(2)
def test_replicas_that_differ_are_refused_and_leave_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected equal replicas on all ranks, got differences in 'w' \[0:3\]"):
        save_dcp(tmp_path / "c", {"w": torch.full((3,), float(dist.get_rank()))})
    dist.barrier()
    assert not (tmp_path / "c").exists()


@ranks(2)
def test_values_that_differ_or_are_missing_are_refused(tmp_path):
    rank = dist.get_rank()
    with pytest.raises(
        CheckpointError, match=r"'step': expected equal plain values on all ranks, got 0 on rank 0 and 1"
    ):
        save_dcp(tmp_path / "c", {"step": rank})
    with pytest.raises(CheckpointError, match=r"tensor 'w'.*but box \[3:6\] is missing"):
        save_dcp(tmp_path / "c", {"w": Blocks((6,), torch.float32, [((0,), torch.ones(3))] if rank else [])})
    with pytest.raises(CheckpointError, match="expected the same folder on all ranks"):
        save_dcp(tmp_path / f"c{rank}", {"w": torch.ones(3)})


@ranks(3)
def test_what_only_some_ranks_have_is_stored(tmp_path):
    rank = dist.get_rank()
    state = {f"w{rank}": torch.full((2,), float(rank)), f"note{rank}": ("of", rank), "own": PerRank({"rank": rank})}
    save_dcp(tmp_path / "c", state)
    dist.barrier()
    for other in range(3):
        found = load_there(tmp_path / "c", **{f"w{other}": torch.zeros(2), f"note{other}": None})
        assert found[f"note{other}"] == ("of", other)
        assert torch.equal(found[f"w{other}"], torch.full((2,), float(other)))
    again = {f"w{rank}": torch.zeros(2), f"note{rank}": (), "own": PerRank(None)}
    load_dcp(tmp_path / "c", again, allow_pickle=True)
    assert again["own"].value == {"rank": rank}
    assert again[f"note{rank}"] == ("of", rank)


def test_the_whole_folder_becomes_a_file_of_torch_save(tmp_path):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    state = {
        "model": model,
        "optimizer": optimizer,
        "list": [torch.ones(2), {"a": 1}],
        "names": ["a", "b"],
        "none": None,
    }
    save_dcp(tmp_path / "c", state)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], model.weight)
    assert found["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert torch.equal(found["list"][0], torch.ones(2))
    assert found["list"][1] == {"a": 1}
    assert (found["names"], found["none"]) == (["a", "b"], None)


# --- complete or no checkpoint ---


def test_the_metadata_comes_last(tmp_path, monkeypatch):
    """A save that ends before it leaves a folder that no reader takes for a checkpoint."""

    class Interrupt(BaseException):
        pass

    def finish(*_):
        assert list((tmp_path / "c").glob("*.distcp"))
        raise Interrupt

    monkeypatch.setattr(dcp_write.FileSystemWriter, "finish", finish)
    with pytest.raises(Interrupt):
        save_dcp(tmp_path / "c", {"w": torch.ones(3)})
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_killed_save_leaves_the_folder_before_as_it_was(tmp_path):
    """The process ends at the worst place: the new files are written, and the metadata is not."""
    save_dcp(tmp_path / "c", {"w": torch.ones(3), "step": 1})
    child = os.fork()
    if child == 0:
        dcp_write.FileSystemWriter.finish = lambda *_args: os.kill(os.getpid(), signal.SIGKILL)
        try:
            save_dcp(tmp_path / "c", {"w": torch.full((3,), 2.0), "step": 2}, overwrite=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 2
    found = load_there(tmp_path / "c", w=torch.zeros(3), step=0)
    assert torch.equal(found["w"], torch.ones(3))
    assert found["step"] == 1

    save_dcp(tmp_path / "c", {"w": torch.full((3,), 3.0), "step": 3}, overwrite=True)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 1, "what was left over is removed"
    assert load_there(tmp_path / "c", w=torch.zeros(3), step=0)["step"] == 3


def test_a_failure_after_the_commit_keeps_the_new_folder(tmp_path, monkeypatch):
    """The last flush of the directory fails: the metadata names the new files, so they stay."""
    calls = []

    def flush(path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("the directory cannot be opened")

    monkeypatch.setattr(dcp_write, "flush_names", flush)
    with pytest.raises(CheckpointError, match="OSError: the directory cannot be opened"):
        save_dcp(tmp_path / "c", {"w": torch.ones(3)})
    assert torch.equal(load_there(tmp_path / "c", w=torch.zeros(3))["w"], torch.ones(3))


def test_a_failure_before_the_commit_leaves_nothing(tmp_path, monkeypatch):
    def flush(_path):
        raise OSError("the directory cannot be opened")

    monkeypatch.setattr(dcp_write, "flush_names", flush)
    with pytest.raises(CheckpointError, match="OSError: the directory cannot be opened"):
        save_dcp(tmp_path / "c", {"w": torch.ones(3)})
    assert not (tmp_path / "c").exists()


@ranks(2)
def test_a_failure_on_one_rank_keeps_the_folder_before(tmp_path):
    save_dcp(tmp_path / "c", {"w": torch.ones(3)})

    class Broken:
        def state_dict(self):
            raise RuntimeError("no state today")

        def load_state_dict(self, _):
            pass

    state = {"w": torch.zeros(3), **({"broken": Broken()} if dist.get_rank() else {})}
    with pytest.raises(CheckpointError, match="rank 1: RuntimeError: no state today"):
        save_dcp(tmp_path / "c", state, overwrite=True)
    dist.barrier()
    assert torch.equal(load_there(tmp_path / "c", w=torch.zeros(3))["w"], torch.ones(3))


def test_other_folders_are_not_overwritten(tmp_path):
    save_dcp(tmp_path / "c", {"w": torch.ones(3)})
    with pytest.raises(
        CheckpointError, match=r"expected a path that does not exist, got a complete DCP folder; .*overwr"
    ):
        save_dcp(tmp_path / "c", {"w": torch.ones(3)})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="expected a DCP folder or no such path, got something else"):
            save_dcp(tmp_path / "d", {"w": torch.ones(3)}, overwrite=overwrite)
    with pytest.raises(CheckpointError, match="expected a DCP folder or no such path, got something else"):
        save_dcp(tmp_path / "d" / "thesis.tex", {"w": torch.ones(3)}, overwrite=True)
    with pytest.raises(CheckpointError, match="expected a writable path, got NotADirectoryError"):
        save_dcp(tmp_path / "d" / "thesis.tex" / "c", {"w": torch.ones(3)})
    assert (tmp_path / "d" / "thesis.tex").read_text() == "x"


def test_a_folder_that_dcp_wrote_is_replaced(tmp_path, caplog):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    with caplog.at_level(logging.INFO, "vescale.ckpt"):
        save_dcp(tmp_path / "c", {"w": torch.zeros(3)}, overwrite=True)
    assert "for DCP: 1 tensors from 1 ranks" in caplog.text
    assert not (tmp_path / "c" / "__0_0.distcp").exists()
    assert torch.equal(load_there(tmp_path / "c", w=torch.ones(3))["w"], torch.zeros(3))


def test_two_values_with_one_key_of_dcp_are_refused(tmp_path):
    state = {"a.b": torch.ones(2), "a": {"b": 3}}
    with pytest.raises(
        CheckpointError, match=r"distinct keys of DCP, which joins names by '\.', got one for two.*'a\.b'"
    ):
        save_dcp(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def test_keys_with_slashes_and_lists_keep_their_paths(tmp_path):
    state = {"a/b": torch.ones(2), "list": [torch.zeros(1), torch.ones(1)], "deep": {"c/d": [{"x": torch.ones(3)}]}}
    save_dcp(tmp_path / "c", state)
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    dcp.save(state, checkpoint_id=tmp_path / "d")
    assert metadata.planner_data == dcp.FileSystemReader(tmp_path / "d").read_metadata().planner_data
    again = {"a/b": torch.zeros(2), "list": [torch.ones(1), torch.zeros(1)], "deep": {"c/d": [{"x": torch.zeros(3)}]}}
    load_dcp(tmp_path / "c", again, allow_pickle=True)
    assert torch.equal(again["deep"]["c/d"][0]["x"], torch.ones(3))
