"""The cipher gives the published words, on every path, and keys follow the conventions of `torch.func._random`."""

import numpy as np
import pytest
import torch

from vescale.dtensor import random
from vescale.dtensor._random.philox import cipher as _cipher
from vescale.dtensor._random.philox.cipher import Key, blocks, encrypt, fold_in

# kat_vectors of Random123: philox4x32-10, counter, key, words
PUBLISHED = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

SEEDS = (0, 1, 2**32 - 1, 2**32, 0x9E3779B97F4A7C15, 2**64 - 1)


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_vectors(counter, key, words):
    assert encrypt(counter, key[0] | key[1] << 32) == words
    assert encrypt(counter, (key[0] | key[1] << 32) ^ 1) != words


@pytest.mark.parametrize("path", ["numpy", "torch"])
def test_vectorised_paths_give_the_words_of_the_scalar_one(path):
    many = _cipher._blocks_numpy if path == "numpy" else _cipher._blocks_torch
    for seed in SEEDS:
        for offset in (0, 7, 2**32 - 2, 2**63 - 1, 2**64 - 3):  # counters beyond these wrap around
            first = torch.tensor([0, 5, 2**32 - 1, 2**40])
            words = many(Key(seed, offset), first.numpy() if path == "numpy" else first, 3)
            expected = []
            for start in first.tolist():
                counters = [(offset + start + i) % 2**64 for i in range(3)]
                expected += [encrypt((c % 2**32, c >> 32, 0, 0), seed) for c in counters]
            assert np.asarray(words).tolist() == [list(block) for block in expected], (seed, offset)
            few = many(Key(seed, offset), np.array([5]) if path == "numpy" else torch.tensor([5]), 3)
            assert np.array_equal(few, words[3:6])


def test_long_sequences_are_cut_without_a_seam(monkeypatch):
    whole = blocks(Key(3, 9), torch.tensor([0]), 100, torch.device("cpu"))
    monkeypatch.setattr(_cipher, "BLOCKS_AT_A_TIME", 7)
    assert torch.equal(blocks(Key(3, 9), torch.tensor([0]), 100, torch.device("cpu")), whole)
    assert torch.equal(blocks(Key(3, 10), torch.tensor([0]), 99, torch.device("cpu")), whole[1:])


def test_a_folded_key_is_one_block():
    key = Key(0x123456789ABCDEF0, 2**64 - 1)
    w0, w1, w2, w3 = encrypt((4, 0, 0, 0), key.seed)
    assert fold_in(key, 5) == Key(w0 | w1 << 32, w2 | w3 << 32)
    assert len({fold_in(key, data) for data in range(1000)}) == 1000


def words_of(key, num_blocks):
    counters = [(key.offset + i) % 2**64 for i in range(num_blocks)]
    return [word for c in counters for word in encrypt((c % 2**32, c >> 32, 0, 0), key.seed)]


def test_a_draw_is_the_one_of_a_key_folded_with_its_number():
    """What `torch.func._random.uniform(fold_in(key(seed), n), shape)` is by its documentation, in plain Python."""
    with random.stream("philox", seed=11):
        drawn = [torch.rand(7) for _ in range(3)]
        doubles = torch.rand(5, dtype=torch.float64)
    for number, values in enumerate(drawn):
        key = fold_in(Key(11, 0), number)
        words = [
            w for i in range(2) for w in encrypt(((key.offset + i) % 2**32, (key.offset + i) >> 32, 0, 0), key.seed)
        ]
        assert values.tolist() == [(w % 2**24) / 2**24 for w in words[:7]]
    key = fold_in(Key(11, 0), 3)
    words = words_of(key, 3)
    pairs = [(high << 32 | low) % 2**53 / 2**53 for high, low in zip(words[::2], words[1::2], strict=True)]
    assert doubles.tolist() == pairs[:5]


def test_the_library_this_follows_has_kernels_for_other_devices():
    stateless = pytest.importorskip("torch.func._random")
    if not torch.cuda.is_available():
        key = stateless.key(11, device="meta")
        assert key.dtype == torch.uint64
        assert stateless.fold_in(key, 3).shape == key.shape == (2,)  # a seed and an offset
        return
    key = stateless.key(11, device="cuda")
    for number, dtype in enumerate((torch.float32, torch.float64)):
        folded = stateless.fold_in(key, number)
        with random.stream("philox", seed=11):
            _ = [torch.rand(1) for _ in range(number)]
            uniform = torch.rand(1001, dtype=dtype)
        assert torch.equal(uniform, stateless.uniform(folded, 1001, dtype=dtype).cpu())
        with random.stream("philox", seed=11):
            _ = [torch.rand(1) for _ in range(number)]
            normal = torch.randn(1001, dtype=dtype)
        torch.testing.assert_close(normal, stateless.normal(folded, 1001, dtype=dtype).cpu())
