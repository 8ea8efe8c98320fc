"""Philox4x32-10: the cipher of the stream "philox" and of every CUDA generator.

The cipher maps a 128-bit counter to four 32-bit words (one **block**) under a 64-bit seed::

    counter  (c0, c1, c2, c3)       key  (seed low, seed high)       ten rounds of

    c0, c1, c2, c3  =  high(M1 * c2) ^ c1 ^ k0,  low(M1 * c2),  high(M0 * c0) ^ c3 ^ k1,  low(M0 * c0)
    k0, k1          =  k0 + W0,  k1 + W1

A block does not depend on the blocks before it. Two conventions for the counter are in use:

* The stream "philox" follows ``torch.func._random``. A `Key` is a seed and the counter of its first block; the upper
  half of the counter is zero. ``fold_in`` derives a key from a key and an integer by one block.
* CUDA generators (`words_of_subsequences`) hold the block number in the lower half and the thread in the upper half.

Three implementations give the same words: Python integers for a few blocks, numpy on the CPU, torch on other devices.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), sections 3.3 and 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCKS_AT_A_TIME", "WORDS", "Key", "blocks", "encrypt", "fold_in", "words_of_subsequences"]

WORDS = 4
"""Words of a block."""

BLOCKS_AT_A_TIME = 2**14
"""Blocks the CPU computes at a time. The seven arrays it works on then stay in a core's cache."""

FEW_BLOCKS = 4
"""Up to here Python's integers are faster than a hundred calls of numpy."""

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK_32 = 2**32 - 1
MASK_64 = 2**64 - 1


class Key(NamedTuple):
    """Where a sequence of blocks starts: the cipher's 64-bit seed and a 64-bit counter."""

    seed: int
    offset: int


def encrypt(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Return one block.

    Args:
        counter: four 32-bit integers, lowest first.
        seed: a 64-bit integer, the cipher's key.

    Example:
        >>> [hex(word) for word in encrypt((0, 0, 0, 0), 0)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    x0, x1, x2, x3 = counter
    for k0, k1 in _round_keys(seed):
        p, q = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1, x2, x3 = (q >> 32) ^ x1 ^ k0, q & MASK_32, (p >> 32) ^ x3 ^ k1, p & MASK_32
    return x0, x1, x2, x3


def fold_in(key: Key, data: int) -> Key:
    """Derive a key from ``key`` and an integer (taken modulo 2**64); distinct integers give independent keys.

    Example:
        >>> fold_in(Key(0, 0), 0) == Key(0xE169C58D6627E8D5, 0x9B00DBD8BC57AC4C)
        True
    """
    counter = (key.offset + data) & MASK_64
    w0, w1, w2, w3 = encrypt((counter & MASK_32, counter >> 32, 0, 0), key.seed)
    return Key(w0 | w1 << 32, w2 | w3 << 32)


def _round_keys(seed: int) -> list[tuple[int, int]]:
    low, high = seed & MASK_32, seed >> 32 & MASK_32
    return [((low + r * WEYL[0]) & MASK_32, (high + r * WEYL[1]) & MASK_32) for r in range(NUM_ROUNDS)]


def blocks(key: Key, first: Tensor, count: int, device: torch.device) -> Tensor:
    """Return ``count`` consecutive blocks from each of several starts.

    Args:
        key: where block 0 is.
        first: 1-D int64 CPU tensor of ``R`` block numbers.
        count: blocks from each of them.
        device: where the result is wanted.

    Returns:
        A uint32 tensor of shape ``(R * count, 4)``.
    """
    if device.type == "cpu":
        return torch.from_numpy(_blocks_numpy(key, first.numpy(), count))
    return _blocks_torch(key, first.to(device, non_blocking=True), count)


# ------------------------------------------------------------------------------------------------- CPU


def _blocks_numpy(key: Key, first: np.ndarray, count: int) -> np.ndarray:
    counters = first.astype(np.uint64)[:, None] + np.arange(count, dtype=np.uint64)
    counters += np.uint64(key.offset)  # modulo 2**64, as unsigned numpy integers add
    counters = counters.reshape(-1)
    if counters.size <= FEW_BLOCKS:
        return np.array([encrypt((c & MASK_32, c >> 32, 0, 0), key.seed) for c in counters.tolist()], np.uint32)
    words = np.empty((counters.size, WORDS), np.uint32)
    for start in range(0, counters.size, BLOCKS_AT_A_TIME):
        part = slice(start, start + BLOCKS_AT_A_TIME)
        _encrypt_numpy(counters[part], key.seed, words[part])
    return words


def _encrypt_numpy(counters: np.ndarray, seed: int, words: np.ndarray) -> None:
    """Write the blocks of 64-bit ``counters`` to ``words``, shape ``(n, 4)``.

    Words are held in 64-bit lanes, because a product of two words has 64 bits.
    """
    half, mask = np.uint64(32), np.uint64(MASK_32)
    x0, x1 = counters & mask, counters >> half
    x2, x3 = np.zeros_like(x0), np.zeros_like(x0)
    p, q = np.empty_like(x0), np.empty_like(x0)
    m0, m1 = map(np.uint64, MULTIPLIERS)
    for k0, k1 in _round_keys(seed):
        np.multiply(x0, m0, out=p)
        np.multiply(x2, m1, out=q)
        np.right_shift(q, half, out=x0)
        np.bitwise_xor(x0, x1, out=x0)
        np.bitwise_xor(x0, np.uint64(k0), out=x0)
        np.right_shift(p, half, out=x2)
        np.bitwise_xor(x2, x3, out=x2)
        np.bitwise_xor(x2, np.uint64(k1), out=x2)
        np.bitwise_and(q, mask, out=x1)
        np.bitwise_and(p, mask, out=x3)
    for lane, word in enumerate((x0, x1, x2, x3)):
        words[:, lane] = word


# ------------------------------------------------------------------------------------------------- other devices


def words_of_subsequences(seed: int, subsequence: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words that a CUDA generator gives each thread in one block.

    Args:
        seed: seed of the generator, modulo 2**64.
        subsequence: int64 tensor of thread numbers, not negative.
        block: number of the block: the offset of the generator divided by 4.

    Returns:
        Four int64 tensors of the shape of ``subsequence``, with values in [0, 2**32).

    Example:
        >>> words = words_of_subsequences(0, torch.zeros(1, dtype=torch.int64), 0)
        >>> [hex(int(word)) for word in words]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    low = torch.full_like(subsequence, block & MASK_32)
    high = torch.full_like(low, block >> 32 & MASK_32)
    return _encrypt_torch((low, high, subsequence & MASK_32, subsequence >> 32), seed)


def _blocks_torch(key: Key, first: Tensor, count: int) -> Tensor:
    counters = first[:, None] + torch.arange(count, device=first.device)
    counters = (counters + _signed(key.offset)).reshape(-1)  # int64 wraps around like uint64
    zeros = torch.zeros_like(counters)
    words = _encrypt_torch((counters & MASK_32, (counters >> 32) & MASK_32, zeros, zeros), key.seed)
    return torch.stack(words, dim=-1).to(torch.int32).view(torch.uint32)


def _encrypt_torch(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the words of blocks; words and counters are int64 tensors with values in [0, 2**32)."""
    x0, x1, x2, x3 = counter
    for k0, k1 in _round_keys(seed):
        p, q = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]  # modulo 2**64, which keeps both halves
        x0, x2 = _upper(q).bitwise_xor_(x1).bitwise_xor_(k0), _upper(p).bitwise_xor_(x3).bitwise_xor_(k1)
        x1, x3 = q & MASK_32, p & MASK_32
    return x0, x1, x2, x3


def _upper(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(MASK_32)  # >> keeps the sign, and the product may look negative


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
