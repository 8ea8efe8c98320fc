"""What is wrong with a folder of torch.distributed.checkpoint is found before anything is allocated or run."""

import contextlib
import dataclasses
import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from vescale.ckpt import CheckpointError, load_dcp
from vescale_testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class WritesFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def folder(tmp_path):
    dcp.save({"w": torch.arange(24.0).view(4, 6), "v": torch.ones(500), "step": 3}, checkpoint_id=tmp_path / "c")
    return tmp_path / "c"


def new_state() -> dict:
    return {"w": torch.zeros(4, 6), "v": torch.zeros(500), "step": 0}


def refuse(folder, match: str, state=None, **options) -> None:
    state = new_state() if state is None else state
    with pytest.raises(CheckpointError, match=match):
        load_dcp(folder, state, allow_pickle=True, **options)
    assert not any(value.any() for value in state.values() if isinstance(value, torch.Tensor))


def change_metadata(folder, change) -> None:
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


def change_place(folder, key: str, **fields) -> None:
    def change(metadata):
        (index,) = [index for index in metadata.storage_data if index.fqn == key]
        metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **fields)

    change_metadata(folder, change)


def test_the_folder_loads(folder):
    state = new_state()
    load_dcp(folder, state, allow_pickle=True)
    assert torch.equal(state["w"], torch.arange(24.0).view(4, 6))
    assert state["step"] == 3


# --- pickle ---


@ranks(2)
def test_a_pickle_is_not_read_unless_it_is_allowed(tmp_path):
    dcp.save({"w": torch.arange(24.0).view(4, 6)}, checkpoint_id=tmp_path / "c")
    dist.barrier()
    with pytest.raises(
        CheckpointError, match=r"expected allow_pickle=True, got False: \.metadata of a DCP folder is a"
    ):
        load_dcp(tmp_path / "c", {"w": torch.zeros(4, 6)})
    load_dcp(tmp_path / "c", {"w": torch.zeros(4, 6)}, allow_pickle=True)


@ranks(2)
def test_ranks_must_ask_for_the_same(tmp_path):
    dcp.save({"w": torch.arange(24.0).view(4, 6)}, checkpoint_id=tmp_path / "c")
    dist.barrier()
    ignore = ["a"] * dist.get_rank()
    with pytest.raises(CheckpointError, match="expected the same rename, ignore and strict on all ranks, got"):
        load_dcp(tmp_path / "c", {"w": torch.zeros(4, 6)}, ignore=ignore, allow_pickle=True)


def test_metadata_that_names_another_class_does_not_run_it(folder, tmp_path):
    mark = tmp_path / "mark"
    change_metadata(folder, lambda metadata: metadata.planner_data.update(w=WritesFile(mark)))
    refuse(folder, r"only classes of DCP's metadata in \.metadata, got (_io|io)\.open; do not open this folder")
    assert not mark.exists()
    dcp.FileSystemReader(folder).read_metadata()
    assert mark.exists(), "the object does nothing"


@pytest.mark.parametrize(
    "evil", [os.system, eval, torch.load, torch.serialization.add_safe_globals, torch.Tensor, dict.fromkeys]
)
def test_other_names_are_refused_by_name(folder, evil):
    (folder / ".metadata").write_bytes(pickle.dumps(evil))
    name = "getattr" if evil == dict.fromkeys else evil.__name__
    refuse(folder, rf"only classes of DCP's metadata in \.metadata, got [\w.]+\.{name}; do not")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (("w",) * 101, "expected a path of 'w' with at most 100 steps, got 101"),
        ((), "expected keys and indices as path of 'w', got"),
        (("w", 1.5), "expected keys and indices as path of 'w', got"),
        (("step",), "expected distinct paths, got .* twice"),
        (("step", "w"), "expected distinct paths, got .* twice"),
    ],
    ids=["deep", "empty", "number", "taken", "under a value"],
)
def test_paths_that_lead_nowhere_are_refused(folder, path, fault):
    change_metadata(folder, lambda metadata: metadata.planner_data.update(w=path))
    refuse(folder, fault)


def test_a_value_that_runs_code_is_refused(folder, tmp_path):
    mark = tmp_path / "mark"
    folder = folder.with_name("d")
    dcp.save({"w": torch.ones(4, 6), "step": WritesFile(mark)}, checkpoint_id=folder)
    refuse(
        folder,
        r"'step': .*expected what torch\.load\(weights_only=True\) reads.*; to skip them, pass ignore=\['step'\]",
    )
    assert not mark.exists()
    load_dcp(folder, {"w": torch.zeros(4, 6)}, allow_pickle=True, ignore=["step"])


def test_a_tensor_that_runs_code_is_refused(folder, tmp_path):
    mark, blob = tmp_path / "mark", tmp_path / "blob"
    torch.save({"w": WritesFile(mark)}, blob)
    with open(folder / "__0_0.distcp", "ab") as file:
        start = file.tell()
        file.write(blob.read_bytes())
    change_place(folder, "v", offset=start, length=blob.stat().st_size)
    change_metadata(folder, lambda m: m.state_dict_metadata["v"].__dict__.update(size=torch.Size((2,))))
    change_metadata(folder, lambda m: m.state_dict_metadata["v"].chunks[0].__dict__.update(sizes=torch.Size((2,))))
    state = {"v": torch.zeros(2)}
    refuse(
        folder, r"tensor 'v' \[0:2\] in .*: expected what torch\.load\(weights_only=True\) reads", state, strict=False
    )
    assert not mark.exists()


@pytest.mark.parametrize("length", [0, 1, 100, 400, -1])
def test_a_cut_pickle_is_refused(folder, length):
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[:length])
    refuse(folder, r"expected a pickle in \.metadata, got \w+: ")


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_byte_of_the_metadata_is_an_error_or_harmless(folder, seed):
    data = bytearray((folder / ".metadata").read_bytes())
    generator = torch.Generator().manual_seed(seed)
    data[int(torch.randint(len(data), (), generator=generator))] ^= 1 << int(torch.randint(8, (), generator=generator))
    (folder / ".metadata").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        load_dcp(folder, new_state(), allow_pickle=True)


# --- places ---


@pytest.mark.parametrize("name", ["../c/__0_0.distcp", "/etc/hostname", "a/b", "..", ".", "", ".metadata", "a\\b"])
def test_a_file_outside_of_the_folder_is_not_opened(folder, name):
    change_place(folder, "w", relative_path=name)
    refuse(folder, rf"expected names of files in the folder, got {re.escape(repr(name))} in \.metadata")


def test_a_link_is_not_followed(folder, tmp_path):
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    refuse(folder, r"expected a regular file '__0_0\.distcp', got a symbolic link")


def test_a_truncated_file_is_refused(folder):
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    refuse(folder, rf"expected {len(data)} bytes or more in data file '__0_0\.distcp', got {len(data) - 1}; restore it")


def test_a_missing_file_or_folder_is_refused(folder, tmp_path):
    (folder / "__0_0.distcp").unlink()
    refuse(folder, r"expected the file '__0_0\.distcp' in a DCP folder, got No such file or directory")
    (folder / ".metadata").unlink()
    refuse(
        folder,
        r"expected the file '\.metadata' in a DCP folder, got No such file or directory; .*DCP writes this file last",
    )
    refuse(tmp_path / "other", r"expected the file '\.metadata' in a DCP folder, got No such file")


@pytest.mark.parametrize("offset", [10**6, 2**62])
def test_an_offset_beyond_the_file_is_refused(folder, offset):
    change_place(folder, "w", offset=offset)
    refuse(folder, r"expected \d+ bytes or more in data file '__0_0\.distcp', got \d+")


@pytest.mark.parametrize("offset", [-1, 2**70, 1.0, True, None])
def test_an_offset_that_is_none_is_refused(folder, offset):
    change_place(folder, "w", offset=offset)
    refuse(folder, "expected integers of 0 or more as shapes and offsets in .metadata, got")


def test_two_values_in_one_place_are_refused(folder):
    def change(metadata):
        places = {index.fqn: index for index in metadata.storage_data}
        metadata.storage_data[places["w"]] = metadata.storage_data[places["v"]]

    change_metadata(folder, change)
    refuse(
        folder, r"expected values in places of their own, got some that overlap: bytes \d+ to \d+ and from \d+ on of"
    )


def test_data_changed_by_an_extension_is_refused(folder):
    change_place(folder, "w", transform_descriptors=["zstd"])
    refuse(folder, r"expected data as torch\.save writes it, got data changed by \['zstd'\]")


# --- chunks ---


def cut(folder, boxes) -> None:
    """Replace the chunks of the tensor, with the place of the first one for each."""

    def change(metadata):
        (index,) = [index for index in metadata.storage_data if index.fqn == "w"]
        place = metadata.storage_data.pop(index)
        chunks = []
        for number, (offsets, sizes) in enumerate(boxes):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            part = place.length // len(boxes)
            own = dataclasses.replace(place, offset=place.offset + number * part, length=part)
            metadata.storage_data[MetadataIndex("w", offsets)] = own
        metadata.state_dict_metadata["w"].chunks = chunks

    change_metadata(folder, change)


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 0), (2, 6))], r"box \[2:4, 0:6\] is missing"),
        ([], r"box \[0:4, 0:6\] is missing"),
        ([((0, 0), (3, 6)), ((2, 0), (2, 6))], r"boxes \[0:3, 0:6\] and \[2:4, 0:6\] overlap"),
        ([((0, 0), (2, 6)), ((2, 0), (3, 6))], "chunks outside of it"),
    ],
    ids=["missing", "none", "overlap", "outside"],
)
def test_chunks_that_do_not_tile_the_tensor_are_refused(folder, boxes, fault):
    cut(folder, boxes)
    refuse(folder, rf"expected chunks that tile tensor 'w', global shape \(4, 6\), got {fault}; use another")


def test_a_chunk_without_a_place_is_refused(folder):
    def change(metadata):
        metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != "w"}

    change_metadata(folder, change)
    refuse(folder, r"expected the place of chunk \[0:4, 0:6\] of tensor 'w', got none")


def test_a_tensor_larger_than_its_place_is_refused(folder):
    def change(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size((2**30, 2**20))
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size((2**30, 2**20))

    change_metadata(folder, change)
    refuse(folder, rf"expected {2**50} elements in chunk .* of tensor 'w', got \d+ bytes")


def test_data_of_another_tensor_is_found_when_it_is_read(folder):
    """The shape is in the data, too: 24 elements of `w` are not those of a tensor of (6, 4)."""
    change_metadata(folder, lambda m: m.state_dict_metadata["w"].__dict__.update(size=torch.Size((6, 4))))
    change_metadata(folder, lambda m: m.state_dict_metadata["w"].chunks[0].__dict__.update(sizes=torch.Size((6, 4))))
    state = {**new_state(), "w": torch.zeros(6, 4)}
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'w' \[0:6, 0:4\] in .*: expected float32 \(6, 4\) by \.metadata, got float32 \(4, 6\)",
    ):
        load_dcp(folder, state, allow_pickle=True)


@pytest.mark.parametrize("position", range(4, 2600, 150))
def test_a_changed_byte_of_the_data_is_an_error_or_a_value(folder, position):
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[position % len(data)] ^= 255
    (folder / "__0_0.distcp").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        load_dcp(folder, new_state(), allow_pickle=True)


def test_compressed_records_are_refused(folder):
    """They could hold far more than the file has."""
    import io
    import zipfile

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(3, protocol=2) + b" " * 10**6)
    with open(folder / "__0_0.distcp", "ab") as file:
        start = file.tell()
        file.write(data.getvalue())
    change_place(folder, "step", offset=start, length=len(data.getvalue()))
    refuse(folder, r"expected records of raw bytes at byte \d+, got 'archive/data\.pkl' of another kind")
