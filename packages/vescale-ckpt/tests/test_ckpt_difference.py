"""Two checkpoints are compared bit for bit by global tensors, whatever layouts they have."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, diff, save
from vescale_testing import ranks

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def texts(path, other):
    return {difference.name: difference.text for difference in diff(path, other)}


def values(dtype):
    return torch.arange(12).to(getattr(torch, dtype)).reshape(3, 4)


def large(seed=0):
    """A tensor of several blocks, of odd sizes."""
    return torch.randn(7, 333_333, generator=torch.Generator().manual_seed(seed))


@ranks(3)
def test_layouts_do_not_count(tmp_path):
    mesh = init_device_mesh("cpu", (3,))
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("copies", Replicate())):
        save(tmp_path / name, {"w": distribute_tensor(large(), mesh, [placement])})
    if dist.get_rank() == 0:
        assert diff(tmp_path / "rows", tmp_path / "columns") == []
        assert diff(tmp_path / "copies", tmp_path / "rows") == []
    dist.barrier()
    changed = large()
    changed[6, 333_332] += 1
    save(tmp_path / "changed", {"w": distribute_tensor(changed, mesh, [Shard(1)])})
    if dist.get_rank() == 0:
        found = texts(tmp_path / "rows", tmp_path / "changed")
        assert found == {"w": "1 of 2333331 elements differ, by at most 1"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path, dtype):
    other = values(dtype)
    other[2, 0] = other[0, 0]
    save(tmp_path / "a", {"w": values(dtype), "same": values(dtype)})
    save(tmp_path / "b", {"w": other, "same": values(dtype)})
    by = 1 if dtype == "bool" else 8
    assert texts(tmp_path / "a", tmp_path / "b") == {"w": f"1 of 12 elements differ, by at most {by}"}


def test_bits_count_not_numbers(tmp_path):
    """NaN equals itself; zeros of both signs differ."""
    save(tmp_path / "a", {"nan": torch.tensor(float("nan")), "zero": torch.zeros(2)})
    save(tmp_path / "b", {"nan": torch.tensor(float("nan")), "zero": -torch.zeros(2)})
    save(tmp_path / "c", {"nan": torch.tensor(1.0), "zero": torch.zeros(2)})
    assert texts(tmp_path / "a", tmp_path / "b") == {"zero": "2 of 2 elements differ, by at most 0"}
    assert texts(tmp_path / "a", tmp_path / "c") == {"nan": "1 of 1 elements differ, by at most inf"}


def test_all_that_a_checkpoint_has(tmp_path):
    model = torch.nn.Linear(2, 1)
    save(tmp_path / "a", {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.5), "step": 1, "x": torch.ones(2)})
    adam = torch.optim.AdamW(model.parameters(), lr=0.5)
    save(tmp_path / "b", {"m": model, "o": adam, "step": 2, "x": torch.ones(2, 1), "long": "x" * 99})
    found = texts(tmp_path / "a", tmp_path / "b")
    assert found["o (optimizer)"] == '"SGD" and "AdamW"'
    assert found["step"] == "1 and 2"
    assert found["x"] == "float32 [2] and float32 [2, 1]"
    assert found["long"] == f'"{"x" * 56}... in the second only'
    assert not any(name.startswith("m/") for name in found)
    assert texts(tmp_path / "b", tmp_path / "a")["long"].endswith("in the first only")


def test_damage_is_no_difference(tmp_path):
    for name in "ab":
        save(tmp_path / name, {"w": torch.ones(100)})
    (file,) = (tmp_path / "b").glob("*/data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor 'w' .* expected checksum"):
        diff(tmp_path / "a", tmp_path / "b")
