"""Damage on disk is detected: by ``verify`` in every byte, by ``load`` in every piece that it reads in full."""

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, load, save, verify
from vescale_testing import ranks


def flip_bit(file, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "c", {"a": torch.arange(100.0), "b": torch.arange(50), "c": torch.ones(3, dtype=torch.bool)})
    return tmp_path / "c"


def empty_state() -> dict:
    return {"a": torch.zeros(100), "b": torch.zeros(50, dtype=torch.int64), "c": torch.zeros(3, dtype=torch.bool)}


def data_file(path, rank: int = 0):
    (file,) = path.glob(f"*/data-{rank}-0.safetensors")
    return file


@pytest.mark.parametrize("byte", range(1, 804, 67))
def test_a_flipped_bit_anywhere_in_the_data_is_found(checkpoint, byte):
    verify(checkpoint)
    flip_bit(data_file(checkpoint), -byte)
    with pytest.raises(CheckpointError, match=r"tensor '[abc]' \[.*\] in .*: expected checksum .*, got .*: bytes"):
        verify(checkpoint)
    with pytest.raises(CheckpointError, match=r"checksum .*; the tensors of the state are partly filled"):
        load(checkpoint, empty_state())


@pytest.mark.parametrize("byte", range(0, 280, 40))
def test_a_flipped_bit_in_the_header_of_a_file_is_found(checkpoint, byte):
    flip_bit(data_file(checkpoint), byte)
    with pytest.raises(CheckpointError, match=r"data-0-0.safetensors"):
        verify(checkpoint)


def test_verify_lists_all_damaged_pieces(checkpoint):
    flip_bit(data_file(checkpoint), -1)
    flip_bit(data_file(checkpoint), -10)
    with pytest.raises(CheckpointError) as caught:
        verify(checkpoint)
    assert "tensor 'a'" in str(caught.value)
    assert "tensor 'c'" in str(caught.value)
    assert "tensor 'b'" not in str(caught.value)


def test_a_short_or_missing_file_is_refused_before_the_state_is_touched(checkpoint):
    file = data_file(checkpoint)
    data = file.read_bytes()
    state = empty_state()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"expected {len(data)} bytes in data file .*, got {len(data) - 1}"):
        load(checkpoint, state)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"expected data file 'data-0-0.safetensors', got No such file"):
        load(checkpoint, state)
    assert not any(value.any() for value in state.values())


@ranks(2)
def test_damage_that_one_rank_reads_is_raised_on_all(tmp_path):
    path, rank = tmp_path / "c", dist.get_rank()
    save(path, {f"w{rank}": torch.ones(10)})
    if rank == 0:
        flip_bit(data_file(path, 1), -1)
    dist.barrier()

    class Model:
        def state_dict(self):
            return {f"w{rank}": torch.zeros(10)}

        def load_state_dict(self, _state_dict):
            raise AssertionError("damaged values were handed on")

    model = Model()
    with pytest.raises(CheckpointError, match="expected a checkpoint that fits the state"):
        load(path, {"model": model})
    with pytest.raises(CheckpointError, match=r"^rank 1: tensor 'w1' \[0:10\] in .*data-1-0.*: expected checksum"):
        load(path, model.state_dict())
