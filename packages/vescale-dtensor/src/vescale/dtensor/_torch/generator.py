"""The layout of a CPU generator's state.

``torch.get_rng_state()`` is 5056 bytes. As 64-bit words these are the seed, two counters, 624 words of the Mersenne
Twister (only their lower 32 bits are used) and the stored second number of a normal pair. The layout has not changed
since torch 1.0, and the first use of the stream checks it.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

__all__ = ["NUM_WORDS", "is_default_generator", "is_fresh", "seed_of", "seeded_state", "words_of"]

NUM_WORDS = 624
STATE_BYTES = 5056
FIRST_WORD = 3


def words_of(state: Tensor) -> np.ndarray:
    """Return the words of the Mersenne Twister in a CPU generator's state: a writable view of 32-bit integers."""
    _check_layout()
    return state.numpy().view(np.uint32)[2 * FIRST_WORD : 2 * (FIRST_WORD + NUM_WORDS) : 2]


def seed_of(state: Tensor) -> int:
    """Return the seed of a CPU generator's state."""
    return int(state.numpy().view(np.uint64)[0])


def is_fresh(state: Tensor) -> bool:
    """Return whether nothing has been drawn since the generator was seeded."""
    words = state.numpy().view(np.uint64)
    return int(words[1]) == 2**32 + 1 and int(words[2]) == 0


def seeded_state(seed: int) -> Tensor:
    """Return the state of a CPU generator just seeded."""
    return torch.Generator().manual_seed(seed).get_state()


def is_default_generator(generator: torch.Generator) -> bool:
    """Return whether a generator is the default one of its device."""
    if generator.device.type == "cpu":
        defaults = (torch.default_generator,)
    else:
        defaults = getattr(torch.get_device_module(generator.device.type), "default_generators", ())
    return any(generator._cdata == default._cdata for default in defaults)  # the dispatcher wraps it anew


@functools.cache
def _check_layout() -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    expected = state.clone()
    ok = state.numel() == STATE_BYTES and seed_of(state) == 5 and is_fresh(state)
    if ok:
        expected.numpy().view(np.uint32)[2 * FIRST_WORD] ^= 1
        generator.set_state(expected)
        ok = torch.equal(generator.get_state(), expected) and not torch.equal(expected, state)
    if not ok:
        raise RuntimeError(f"torch {torch.__version__} keeps the state of its CPU generator in another form")
