"""FORMAT.md is complete: a reader that follows it, and imports nothing of the package, reads every checkpoint."""

import itertools
import json
import re
import zlib
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.ckpt import PerRank, save
from vescale_testing import run_ranks

PAGE = (Path(__file__).parents[1] / "FORMAT.md").read_text()


# --- the reader ---


def boxes_of(run):
    starts = [(run["file"], tuple(run["offsets"]))]
    for loop in run.get("loops", []):
        starts = [
            (file + i * loop["file"], tuple(a + i * b for a, b in zip(offsets, loop["offsets"], strict=True)))
            for i in range(loop["count"])
            for file, offsets in starts
        ]
    return [(file, offsets, tuple(run["sizes"])) for file, offsets in starts]


def key_of(name, shape, offsets, sizes):
    if sizes == tuple(shape):
        return name
    return f"{name}[{', '.join(f'{a}:{a + n}' for a, n in zip(offsets, sizes, strict=True))}]"


def checksum(data):
    return f"{zlib.crc32(data):08x}"


def read_file(path, row):
    data = path.read_bytes()
    assert len(data) == row["bytes"]
    length = 8 + int.from_bytes(data[:8], "little")
    assert checksum(data[:length]) == row["header_crc32"]
    header = json.loads(data[8:length])
    sums = json.loads(header.pop("__metadata__")["crc32"])
    for key, tensor in header.items():
        start, end = (length + place for place in tensor["data_offsets"])
        block = 4 * 1024**2
        assert sums[key] == "".join(checksum(data[at : min(at + block, end)]) for at in range(start, end, block))
    return load_file(path)


def read_checkpoint(path):
    body = json.loads((path / "manifest.json").read_text())
    assert (body["format"], body["version"]) == ("vescale-checkpoint", 3)
    unsigned = {key: value for key, value in body.items() if key != "crc32"}
    assert body["crc32"] == checksum(json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode())
    files = [read_file(path / body["folder"] / row["name"], row) for row in body["files"]]
    found = {}
    for name, tensor in body["tensors"].items():
        layout = body["layouts"][tensor["layout"]]
        dtype = getattr(torch, tensor["dtype"])
        value, count = torch.empty(layout["shape"], dtype=dtype), torch.zeros(layout["shape"])
        for file, offsets, sizes in itertools.chain.from_iterable(map(boxes_of, layout["runs"])):
            stored = files[file][key_of(name, layout["shape"], offsets, sizes)]
            index = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            value[index] = torch.view_as_complex(stored) if dtype.is_complex else stored
            count[index] += 1
        assert (count == 1).all()
        found[name] = value
    return found, body["leaves"]


# --- the checkpoints ---


def values():
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(7, 6, generator=generator),
        "large": torch.randn(1100, 1025, generator=generator),
        "half": torch.randn(8, 3, generator=generator).bfloat16(),
        "complex": torch.randn(5, 2, generator=generator, dtype=torch.complex64),
        "scalar": torch.tensor(3),
        "none": torch.zeros(0, 4),
    }


LAYOUTS = {
    "rows": ((4,), [Shard(0)]),
    "columns of copies": ((2, 2), [Replicate(), Shard(1)]),
    "copies": ((3,), [Replicate()]),
    "rows and columns": ((2, 3), [Shard(0), Shard(1)]),
}


def saved_under(name, path):
    shape, placements = LAYOUTS[name]
    mesh = init_device_mesh("cpu", shape)
    state = {
        key: distribute_tensor(value, mesh, placements) if value.dim() == 2 else value
        for key, value in values().items()
    }
    leaves = {"step": 3, "best": float("inf"), "blob": b"\0\1\2", "table": {30: 1, 80: 1}}
    save(path, {"model": state, "rank": PerRank((dist.get_rank(), b"x")), **leaves})


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_reader_of_the_page(tmp_path, name):
    shape, _ = LAYOUTS[name]
    size = numpy.prod(shape)
    run_ranks(saved_under, int(size), name, tmp_path / "c")
    tensors, leaves = read_checkpoint(tmp_path / "c")
    for key, value in values().items():
        torch.testing.assert_close(tensors.pop(f"model/{key}"), value, rtol=0, atol=0)
    texts = {key: json.loads(bytes(value.tolist())) for key, value in tensors.items()}
    assert texts == {f"rank/rank-{rank}": {"tuple": [rank, {"bytes": "eA=="}]} for rank in range(size)}
    blob, table = {"__bytes__": "AAEC"}, {"__items__": [[30, 1], [80, 1]]}
    assert leaves == {"step": 3, "best": float("inf"), "blob": blob, "table": table}


def test_an_optimizer(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    tensors, leaves = read_checkpoint(tmp_path / "c")
    assert torch.equal(tensors["optimizer/state/weight/exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert leaves["optimizer/param_groups"][0]["lr"] == 0.5


def test_the_example_of_the_page():
    layout = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    (run,) = layout["runs"]
    texts = {file: key_of("", layout["shape"], offsets, sizes) for file, offsets, sizes in boxes_of(run)}
    assert texts == {0: "[0:4, 0:3]", 1: "[0:4, 3:6]", 2: "[4:8, 0:3]", 3: "[4:8, 3:6]"}
    for file, text in texts.items():
        assert f"`{text}` in file {file}" in PAGE


def test_a_changed_byte_is_noticed(tmp_path):
    """The sibling that breaks it."""
    save(tmp_path / "c", {"w": torch.ones(10)})
    (file,) = (tmp_path / "c").glob("*/data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(AssertionError):
        read_checkpoint(tmp_path / "c")
