"""A folder whose files were cut, changed or left out is refused by name, before memory is allocated."""

import json
import os
import tracemalloc

import pytest
import torch

from vescale.ckpt import CheckpointError, load_hf, save_hf
from vescale_testing.json_mutations import check_reader

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"


def build(value=1.0):
    module = torch.nn.Linear(3, 2)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def parts_of(file):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def folder(tmp_path):
    save_hf(tmp_path / "one", build())
    return tmp_path / "one"


@pytest.fixture
def shards(tmp_path):
    save_hf(tmp_path / "shards", build(), max_shard_bytes=8)
    return tmp_path / "shards"


def refuse(folder, message):
    loaded = build(0.0)
    with pytest.raises(CheckpointError, match=message):
        load_hf(folder, loaded)
    assert not loaded.weight.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["bias"].update(data_offsets=[0, 2**40]), r"expected a range of 8 bytes, got"),
        (lambda header: header["bias"].update(shape=[2**40]), "expected a range of .* bytes, got"),
        (lambda header: header["bias"].update(shape=[2**33, 2**33, 0, 1]), "expected a range of 0 bytes, got"),
        (lambda header: header["bias"].update(shape=[-2]), r"an integer from 0 to .* at bias\.shape\[0\], got -2"),
        (lambda header: header["bias"].update(dtype="F8_E8M0"), "expected a dtype of .*, got 'F8_E8M0' at bias"),
        (lambda header: header.pop("weight"), r"expected \d+ bytes by the header, got \d+"),
        (
            lambda header: header.update(more=header["bias"]),
            "without gaps or overlaps, got '.*' at byte 0 after",
        ),
    ],
)
def test_a_header_that_lies(folder, change, message):
    header, data = parts_of(folder / ONE)
    change(header)
    write(folder / ONE, header, data)
    refuse(folder, f"{folder / ONE}.*{message}")


@pytest.mark.parametrize("max_examples", [300, pytest.param(5000, marks=pytest.mark.thorough)])
def test_every_mutation_of_a_header_is_refused_or_reads_the_same(folder, max_examples):
    header, data = parts_of(folder / ONE)
    expected = {"weight": build().weight, "bias": build().bias}

    def read(text):
        write(folder / ONE, text.encode("utf-8", "surrogatepass"), data)
        loaded = build(0.0)
        load_hf(folder, loaded)
        for name, value in loaded.named_parameters():
            assert torch.equal(value, expected[name])
        return json.loads(text)

    del header["__metadata__"]  # of which nothing is read
    check_reader(json.dumps(header), read, json.dumps, error=CheckpointError, max_examples=max_examples)


def test_a_length_outside_of_the_file_allocates_nothing(folder):
    content = (folder / ONE).read_bytes()
    for length in (len(content) - 7, 99_999_999, 2**63):
        (folder / ONE).write_bytes(length.to_bytes(8, "little") + content[8:])
        tracemalloc.start()
        refuse(folder, f"{ONE}: expected a header inside the file, got one of {length} bytes")
        assert tracemalloc.get_traced_memory()[1] < 10**6
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 3, 8, 40, -1])
def test_a_file_that_was_cut(folder, size):
    content = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(content[:size])
    refuse(folder, f"{folder / ONE}: expected .*; download it again")


def test_a_file_that_is_cut_while_it_is_read(folder, monkeypatch):
    from vescale.ckpt._exchange import hf_load

    def cut(*args):
        os.truncate(folder / ONE, 50)
        return hf_load_real(*args)

    hf_load_real = hf_load.OpenFile
    monkeypatch.setattr(hf_load, "OpenFile", cut)
    refuse(folder, r"expected \d+ bytes as when its header was read, got 50")


def test_a_key_that_occurs_twice(folder):
    _, data = parts_of(folder / ONE)
    row = '{"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}'
    write(folder / ONE, f'{{"a": {row}, "a": {row}}}'.encode(), data)
    refuse(folder, "expected JSON, got other text .*'a'")


def test_a_missing_file(shards):
    (shards / "model-00002-of-00002.safetensors").unlink()
    refuse(shards, r"model-00002-of-00002\.safetensors: expected a data file, got No such file")


def test_an_index_that_lies(shards):
    index = json.loads((shards / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    weights = index["weight_map"]
    lacks = f"expected the tensors of {INDEX}, got a file without"
    for change, message in (
        (
            {"bias": second, "weight": second},
            rf"{second}: {lacks} '(bias|weight)'",
        ),
        (
            {**weights, "more": first},
            f"{first}: {lacks} 'more'",
        ),
        (
            {**weights, "bias": "../one/model.safetensors"},
            "names of files in the folder, got '../one/model",
        ),
        ({**weights, "bias": "/etc/passwd"}, "names of files in the folder, got '/etc/passwd'"),
        ({**weights, "bias": 3}, r"a string at weight_map\.bias, got 3"),
        ({"weight": index["weight_map"]["weight"]}, r"requested and not stored \(1\): 'bias'"),
    ):
        (shards / INDEX).write_text(json.dumps({"weight_map": change}))
        refuse(shards, message)
    for content, message in ((b"{", "expected JSON"), (b"\xff", "expected UTF-8 text"), (b"[]", "expected .*at|got")):
        (shards / INDEX).write_bytes(content)
        refuse(shards, f"{INDEX}: {message}")


def test_links_are_refused_but_those_of_the_hubs_cache(folder, tmp_path):
    (folder / ONE).rename(tmp_path / "elsewhere")
    (folder / ONE).symlink_to(tmp_path / "elsewhere")
    refuse(folder, f"{ONE}: expected a regular file, got a symbolic link; copy the file to where it is")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0123", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "elsewhere").rename(blobs / "4567")
    (snapshot / ONE).symlink_to("../../blobs/4567")
    loaded = build(0.0)
    load_hf(snapshot, loaded)
    assert torch.equal(loaded.weight, build().weight)


def test_other_kinds_of_files(folder):
    (folder / ONE).unlink()
    (folder / ONE).mkdir()
    refuse(folder, f"{ONE}: expected a (regular|data) file, got")
    (folder / ONE).rmdir()
    os.mkfifo(folder / ONE)
    refuse(folder, f"{ONE}: expected a data file, got another kind of file")
    refuse(folder.parent / "none", "expected model.safetensors or model.safetensors.index.json, got neither")
