"""Data files have a checksum for every block: every byte that a load reads is compared with one, whatever it reads."""

import json
import os
import zlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load, read_manifest, save, verify
from vescale_testing import ranks
from vescale_testing.json_mutations import check_reader

BLOCK = 64  # bytes, in place of 4 MiB
DTYPES = (torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.complex64)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("vescale.ckpt._format.data_files.BLOCK_BYTES", BLOCK)


class Boxes:
    """A value of which this process holds the given boxes; elsewhere it is zero."""

    def __init__(self, value: torch.Tensor, boxes) -> None:
        self.__global_shape__, self.dtype, self.value, self.boxes = tuple(value.shape), value.dtype, value, boxes

    def __boxes__(self):
        return [(tuple(s.start for s in box), self.value[box]) for box in self.boxes]


def data_file(path):
    (file,) = path.glob("*/data-0-0.safetensors")
    return file


@st.composite
def shapes_and_boxes(draw):
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(slice(start, draw(st.integers(start + 1, size))))
    return tuple(shape), tuple(box), draw(st.sampled_from(DTYPES)), draw(st.booleans())


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(case=shapes_and_boxes())
def test_any_part_of_any_tensor_is_read(tmp_path_factory, case):
    shape, box, dtype, is_transposed = case
    path = tmp_path_factory.mktemp("c") / "c"
    whole = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7).to(dtype)
    target = torch.zeros(shape[::-1] if is_transposed else shape, dtype=dtype)
    target = target.permute(tuple(range(len(shape))[::-1])) if is_transposed else target
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr("vescale.ckpt._format.data_files.BLOCK_BYTES", BLOCK)
        save(path, {"w": whole})
        load(path, {"w": Boxes(target, [box])})
        verify(path)
    expected = torch.zeros(shape, dtype=dtype)
    expected[box] = whole[box]
    assert torch.equal(target.to(torch.complex128), expected.to(torch.complex128))


@pytest.mark.usefixtures("small_blocks")
def test_damage_in_a_part_is_found_by_a_load_that_reads_it_and_no_other(tmp_path):
    """Rows of 16 bytes, four to a block."""
    path, rows = tmp_path / "c", 40
    save(path, {"w": torch.arange(rows * 4.0).view(rows, 4)})
    data = data_file(path).read_bytes()
    for row in range(rows):
        changed = bytearray(data)
        changed[len(data) - (rows - row) * 16 + 5] ^= 1
        data_file(path).write_bytes(changed)
        for first in range(rows - 2):
            state = {"w": Boxes(torch.zeros(rows, 4), [(slice(first, first + 2), slice(1, 2))])}
            is_read = first // 4 <= row // 4 <= (first + 1) // 4
            if is_read:
                with pytest.raises(CheckpointError, match=r"'w' \[0:40, 0:4\] in .*: expected checksum .*, got"):
                    load(path, state)
            else:
                load(path, state)
                assert state["w"].value[first : first + 2, 1].tolist() == [4 * first + 1.0, 4 * first + 5.0]


@ranks(2)
def test_a_load_under_another_layout_finds_every_flipped_bit(tmp_path):
    path, mesh = tmp_path / "c", init_device_mesh("cpu", (2,))
    whole = torch.arange(64.0).view(8, 8)
    save(path, {"w": distribute_tensor(whole, mesh, [Shard(0)])})
    files = sorted(path.glob("*/data-*"))
    for file in files:
        data = file.read_bytes()
        for byte in range(1, 128, 31):
            if dist.get_rank() == 0:
                changed = bytearray(data)
                changed[-byte] ^= 1
                file.write_bytes(changed)
            dist.barrier()
            target = {"w": distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)])}
            with pytest.raises(CheckpointError, match="expected checksum"):
                load(path, target)
            dist.barrier()
            if dist.get_rank() == 0:
                file.write_bytes(data)
            dist.barrier()
    load(path, target)
    assert torch.equal(target["w"].full_tensor(), whole)


def with_header(path, rewrite_manifest, text: str, data: bytes) -> None:
    """Replace the header of the data file, with all sums and sizes that the manifest has of it."""
    header = len(text.encode()).to_bytes(8, "little") + text.encode()
    data_file(path).write_bytes(header + data)
    sums = {"bytes": len(header + data), "header_crc32": f"{zlib.crc32(header):08x}"}
    rewrite_manifest(path, lambda body: body["files"][0].update(sums))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("max_examples", [200, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_every_mutation_of_a_header_is_refused_or_reads_the_same(tmp_path, rewrite_manifest, max_examples):
    path, saved = tmp_path / "c", {"a": torch.arange(40.0), "b": torch.arange(6).view(2, 3)}
    save(path, saved)
    file = data_file(path).read_bytes()
    length = int.from_bytes(file[:8], "little")
    text, data = file[8 : 8 + length].decode(), file[8 + length :]

    def read(mutant: str) -> str:
        with_header(path, rewrite_manifest, mutant, data)
        verify(path)
        loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
        load(path, loaded)
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        return mutant

    tried = check_reader(text, read, lambda mutant: mutant, error=CheckpointError, max_examples=max_examples)
    assert tried > 800 + max_examples


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["a"].update(data_offsets=[0, 2**40]), "expected a range of 160 bytes, got"),
        (lambda header: header["a"].update(shape=[2**40]), "expected a range of .* bytes, got"),
        (lambda header: header["a"].update(data_offsets=[40, 200]), "without gaps or overlaps, got 'a' at byte 40"),
        (lambda header: header.pop("a"), "expected .* bytes by the header, got"),
        (lambda header: header["__metadata__"].update(crc32='{"a": ""}'), "checksums of 1 blocks of 'b', got 0"),
        (lambda header: header["__metadata__"].update(block_bytes="1"), "expected blocks of 64 bytes, got 1"),
        (
            lambda header: header.update(b={"dtype": "I64", "shape": [6], "data_offsets": [0, 48]}),
            r"by the manifest, got I64 .6,.",
        ),
    ],
)
def test_a_header_that_lies_is_refused_by_what_is_wrong(tmp_path, rewrite_manifest, change, message):
    path = tmp_path / "c"
    save(path, {"a": torch.arange(40.0), "b": torch.arange(6).view(2, 3)})
    file = data_file(path).read_bytes()
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    change(header)
    with_header(path, rewrite_manifest, json.dumps(header), file[8 + length :])
    for read in (verify, lambda path: load(path, {"a": torch.zeros(40), "b": torch.zeros(2, 3).long()})):
        with pytest.raises(CheckpointError, match=rf"data-0-0.safetensors.*{message}"):
            read(path)


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(3)})
    file = data_file(tmp_path / "c")
    data = bytearray(file.read_bytes())
    data[:8] = (2**62).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"expected a header inside the file, got one of {2**62} bytes"):
        verify(tmp_path / "c")


def test_links_are_not_followed_out_of_the_checkpoint(tmp_path):
    path = tmp_path / "c"
    save(path, {"a": torch.ones(3)})
    file = data_file(path)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    for read in (verify, read_manifest, lambda path: load(path, {"a": torch.zeros(3)})):
        with pytest.raises(CheckpointError, match=r"expected a regular data file .*, got a symbolic link; copy"):
            read(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"expected a regular data file .*, got another kind of file"):
        verify(path)
    file.unlink()
    (tmp_path / "elsewhere").rename(file)
    verify(path)
    folder = file.parent.rename(tmp_path / "folder")
    file.parent.symlink_to(folder)
    with pytest.raises(CheckpointError, match="expected a folder, got a symbolic link at 'save-"):
        verify(path)


def test_nothing_is_allocated_for_a_manifest_that_lies(tmp_path, rewrite_manifest):
    """A fresh optimizer has no state, so a load makes tensors of the stored shapes."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})

    def enlarge(body):
        layout = body["layouts"][body["tensors"]["optimizer/state/bias/exp_avg"]["layout"]]
        layout["shape"] = layout["runs"][0]["sizes"] = [2**50]

    rewrite_manifest(tmp_path / "c", enlarge)
    fresh = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match=r"expected pieces that fit in data file .* bytes, got more with tensor"):
        load(tmp_path / "c", {"model": model, "optimizer": fresh})


@pytest.mark.usefixtures("small_blocks")
def test_safetensors_reads_the_files(tmp_path):
    saved = {"a": torch.arange(40.0), "b": torch.ones(3, dtype=torch.bool)}
    save(tmp_path / "c", saved)
    found = load_file(data_file(tmp_path / "c"))
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
