"""The fingerprint of a tensor depends on every bit, on the order of elements, and not on how the tensor is stored."""

import numpy
import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import save, save_dcp, save_hf
from vescale.ckpt._save import fingerprints, saving
from vescale.ckpt._save.fingerprints import _ROW_WORDS
from vescale_testing import ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.fixture(params=[True, False], ids=["crc32", "multilinear"])
def fingerprint(request):
    """Return a function of each kind."""
    return lambda tensor: fingerprints.fingerprint(tensor, on_cpu=request.param)


def values(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.from_numpy(numpy.random.default_rng(0).integers(0, 2, count)).to(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 1001, _ROW_WORDS - 1, _ROW_WORDS, 3 * _ROW_WORDS + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_have_equal_fingerprints_wherever_they_are(dtype, count, fingerprint):
    tensor = values(dtype, count)
    expected = fingerprint(tensor)
    assert -(2**63) <= expected < 2**63
    behind = torch.empty(count + 1, dtype=dtype)
    behind[1:] = tensor
    assert fingerprint(behind[1:]) == expected
    apart = torch.empty(count, 2, dtype=dtype)
    apart[:, 1] = tensor
    assert fingerprint(apart[:, 1]) == expected


@pytest.mark.parametrize("count", [1, 2, 1001, 2 * _ROW_WORDS + 5])
def test_every_changed_bit_changes_the_fingerprint(count, fingerprint):
    tensor = values(torch.float32, count)
    bits, expected = tensor.view(torch.int32), fingerprint(tensor)
    for place in {0, count // 2, count - 1}:
        for bit in range(32):
            bits[place] ^= 1 << bit if bit < 31 else -(2**31)
            assert fingerprint(tensor) != expected, (place, bit)
            bits[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert fingerprint(tensor) == expected


@pytest.mark.parametrize(
    "change",
    [
        torch.neg,
        lambda x: x * 2,
        lambda x: x.flip(0),
        lambda x: torch.cat([x[_ROW_WORDS:], x[:_ROW_WORDS]]),
        lambda x: torch.where(torch.arange(len(x)) < 2, -x, x),  # two signs
        torch.zeros_like,
    ],
    ids=["signs", "doubled", "reversed", "rows swapped", "two signs", "zeros"],
)
def test_changes_that_plain_sums_do_not_see(change, fingerprint):
    tensor = torch.from_numpy(numpy.random.default_rng(0).standard_normal(2 * _ROW_WORDS)).float()
    assert fingerprint(change(tensor)) != fingerprint(tensor)


def test_conjugated_views_count_by_their_values(fingerprint):
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert fingerprint(tensor.conj()) == fingerprint(tensor.conj().resolve_conj()) != fingerprint(tensor)


def test_nothing_has_a_fingerprint_too(fingerprint):
    assert fingerprint(torch.empty(0, 3)) == 0


@pytest.mark.parametrize(
    "call",
    [lambda path, model: save(path, {"model": model}), lambda path, model: save_dcp(path, {"model": model}), save_hf],
    ids=["save", "save_dcp", "save_hf"],
)
@ranks(2)
def test_replicas_on_the_cpu_have_the_fast_kind_in_every_format(tmp_path, monkeypatch, call):
    path, kinds = [tmp_path], []
    dist.broadcast_object_list(path)

    def recorded(tensor, *, on_cpu):
        kinds.append(on_cpu)
        return fingerprints.fingerprint(tensor, on_cpu=on_cpu)

    monkeypatch.setattr(saving, "fingerprint", recorded)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    call(path[0] / "c", model)
    assert kinds == [True, True]
