"""Philox4x32-10, the generator behind every CUDA draw, in integer tensor operations.

Only `bernoulli` with a tensor of probabilities needs it: its threads are numbered through, so that no shift of the
generator's offset makes a part of the draw a draw of its own. The words of a shard are computed one by one instead::

    counter  (block low, block high, subsequence low, subsequence high)      key  (seed low, seed high)

    10 rounds of   hi, lo = M * counter,  counter = (hi of 2 ^ c1 ^ k0, lo of 2, hi of 0 ^ c3 ^ k1, lo of 0)

32-bit words live in int64 tensors; a product wraps around modulo 2^64, which keeps both of its halves.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); cuRAND's `curand_init` for the counter
and `curand_uniform` for the conversion to float.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox_words", "uniform_of"]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
MASK = 0xFFFFFFFF


def philox_words(seed: int, subsequence: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of one block for each subsequence.

    Args:
        seed: the generator's seed, modulo 2^64.
        subsequence: int64 tensor, not negative.
        block: number of the block, the generator's offset divided by 4.

    Returns:
        Four int64 tensors with values in [0, 2^32).

    Example:
        >>> words = philox_words(0, torch.zeros(1, dtype=torch.int64), 0)
        >>> [hex(int(word)) for word in words]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    keys = [seed & MASK, seed >> 32 & MASK]
    low = torch.full_like(subsequence, block & MASK)
    counter = [low, torch.full_like(low, block >> 32 & MASK), subsequence & MASK, subsequence >> 32]
    for _ in range(NUM_ROUNDS):
        first, second = counter[0] * MULTIPLIERS[0], counter[2] * MULTIPLIERS[1]
        counter = [
            _high(second).bitwise_xor_(counter[1]).bitwise_xor_(keys[0]),
            second & MASK,
            _high(first).bitwise_xor_(counter[3]).bitwise_xor_(keys[1]),
            first & MASK,
        ]
        keys = [key + step & MASK for key, step in zip(keys, WEYL, strict=True)]
    return tuple(counter)


def _high(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(MASK)


def uniform_of(word: Tensor) -> Tensor:
    """Return the float32 in (0, 1] that cuRAND makes of a word: the middle of its interval of length 2^-32.

    Example:
        >>> uniform_of(torch.tensor([0, 2**31, 2**32 - 1])).tolist()
        [1.1641532182693481e-10, 0.5, 1.0]
    """
    return word.to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
