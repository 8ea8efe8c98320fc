"""A checkpoint at a URL of fsspec has what one at a path has: a commit, checks of every byte, series, differences."""

import sys

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, diff, latest, load, read_manifest, save, verify, wait
from vescale.ckpt.__main__ import main
from vescale_testing import ranks


class Disk(LocalFileSystem):
    """A file system that several processes see, by fsspec alone: without links, flushes and descriptors."""

    protocol = "disk"

    def created(self, path):
        raise NotImplementedError

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("disk://"))


fsspec.register_implementation("disk", Disk, clobber=True)
pytestmark = pytest.mark.filterwarnings("ignore:.*not explicitly implemented")


@pytest.fixture(params=["memory", "disk"])
def root(request, tmp_path):
    yield f"memory://{tmp_path}" if request.param == "memory" else f"disk://{tmp_path}"
    fsspec.filesystem("memory").store.clear()


def state(value: float) -> dict:
    return {"w": torch.full((100, 100), value), "b": torch.full((3,), value, dtype=torch.bfloat16), "step": int(value)}


def assert_holds(url: str, value: float) -> None:
    verify(url)
    loaded = state(0)
    load(url, loaded)
    assert loaded["w"].eq(value).all()
    assert loaded["b"].eq(value).all()
    assert loaded["step"] == value


def test_save_load_and_replace(root):
    url = f"{root}/run/step-1"
    with pytest.raises(CheckpointError, match="expected a checkpoint, got"):
        load(url, state(0))
    save(url, state(1), metadata={"note": "first"})
    assert read_manifest(url).metadata == {"note": "first"}
    assert_holds(url, 1)
    with pytest.raises(CheckpointError, match="got an existing one; save to another path, or pass overwrite=True"):
        save(url, state(2))
    save(url, state(2), overwrite=True, async_=True)
    wait()
    assert_holds(url, 2)
    folders = [entry for entry in fsspec.open(url).fs.ls(url, detail=False) if "save-" in entry]
    assert len(folders) == 1


def test_the_same_bytes_as_at_a_path(root, tmp_path):
    values = {"w": torch.randn(2000, 1000), "none": torch.empty(0, 3), "z": torch.tensor([1 + 2j]).conj()}
    save(f"{root}/run/step-1", values)
    save(tmp_path / "local", values)
    assert diff(f"{root}/run/step-1", tmp_path / "local") == []
    values["w"][7, 7] += 1
    save(f"{root}/run/step-2", values)
    (difference,) = diff(f"{root}/run/step-2", tmp_path / "local")
    assert difference.name == "w"


def test_series(root):
    assert latest(f"{root}/none") is None
    for step in (1, 2, 3, 4):
        save(f"{root}/run/step-{step}", state(step), keep_last=2)
    assert latest(f"{root}/run") == f"{root}/run/step-4"
    assert_holds(latest(f"{root}/run"), 4)
    assert_holds(f"{root}/run/step-3", 3)
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        read_manifest(f"{root}/run/step-2")


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "manifest"])
def test_damage_is_found(root, damage):
    url = f"{root}/c"
    save(url, state(1))
    fs, inner = fsspec.core.url_to_fs(url)
    manifest = read_manifest(url)
    (name,) = manifest.files
    file = f"{inner}/manifest.json" if damage == "manifest" else f"{inner}/{manifest.folder}/{name}"
    content = bytearray(fs.cat_file(file))
    content[-10] ^= 1
    if damage == "missing":
        fs.rm(file)
    else:
        fs.pipe_file(file, bytes(content[:-3] if damage == "cut" else content))
    texts = {
        "flipped": "bytes were changed or lost",
        "cut": "bytes in data file 'data-0-0.safetensors', got",
        "missing": "expected data file 'data-0-0.safetensors', got none; restore it",
        "manifest": "manifest.json",
    }
    with pytest.raises(CheckpointError, match=texts[damage]):
        load(url, state(0))


@pytest.mark.parametrize(
    "place", ["vescale.ckpt._format.storage._move", "vescale.ckpt._save.checkpoint.write_data_file"]
)
def test_a_save_that_fails_keeps_the_earlier_version(root, monkeypatch, place):
    url = f"{root}/c"
    save(url, state(1))

    def fail(*_args):
        raise OSError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(CheckpointError, match="the connection was lost"):
            save(url, state(2), overwrite=True)
        with pytest.raises(CheckpointError, match="the connection was lost"):
            save(f"{root}/new", state(2))
    assert_holds(url, 1)
    assert len(fsspec.open(url).fs.ls(url)) == 2
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        read_manifest(f"{root}/new")


def test_a_url_of_a_file_is_a_path(tmp_path):
    save(f"file://{tmp_path}/c", state(1))
    assert_holds(tmp_path / "c", 1)


def test_urls_that_cannot_be_opened(monkeypatch):
    with pytest.raises(CheckpointError, match="nosuch://bucket/c: expected a URL that fsspec can open, got"):
        save("nosuch://bucket/c", state(1))
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(CheckpointError, match=r"the package universal-pathlib for a URL, got none; pip install"):
        save("memory://bucket/c", state(1))


def test_the_command_takes_urls(root, capsys):
    save(f"{root}/c", state(1))
    assert main(["verify", f"{root}/c"]) == 0
    assert "every byte is as it was saved" in capsys.readouterr().out


@ranks(3)
def test_ranks_write_and_read_their_parts(tmp_path):
    path = [tmp_path]
    dist.broadcast_object_list(path)
    url, mesh = f"disk://{path[0]}/c", init_device_mesh("cpu", (3,))
    whole = torch.arange(7000.0).view(70, 100)
    for is_async in (False, True):
        save(url, {"w": distribute_tensor(whole, mesh, [Shard(0)]), "r": whole}, overwrite=True, async_=is_async)
        loaded = {"w": distribute_tensor(torch.zeros(70, 100), mesh, [Shard(1)]), "r": torch.zeros(70, 100)}
        load(url, loaded)
        assert torch.equal(loaded["w"].full_tensor(), whole)
        assert torch.equal(loaded["r"], whole)
    assert latest(f"disk://{path[0]}") == url
