"""Where the stream "philox" keeps its position: inside the state of torch's CPU generator.

While this stream is in force, nothing draws from the Mersenne Twister of torch's default CPU generator, so the 624
words of its state are free. They hold the seed, the number of the next draw, and the batch windows::

    word      0, 1    mark of this layout            6, 7     batch windows in force (id, 0: none)
              2, 3    seed                           8        id of the process that numbered the windows
              4, 5    number of the next draw        9 ...    words of a generator freshly seeded

Code that saves and restores the generator thereby saves and restores the position. Activation checkpointing, reentrant
or not, restores the generator before it repeats a part of the model, in any order and on any thread; so do
`torch.random.fork_rng` and `torch.set_rng_state`. A counter elsewhere would have advanced since the forward pass, and
the recomputation would draw another mask. The batch windows are stored for the same reason: a recomputation may run
after `random.local_batch` was left. The free words are not zero, so that code that draws from the generator against the
rules still gets random numbers.

`torch.manual_seed` writes a state without the mark, which is read as a stream of that seed that has drawn nothing. Any
other state without the mark belongs to the stock stream in mid-course. It is read as a stream seeded by its digest, so
that no numbers repeat.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._torch.generator import is_fresh, seed_of, seeded_state, words_of
from ..global_position import BatchWindow
from .cipher import Key, fold_in

__all__ = ["Position", "current_windows", "is_marked", "read", "started", "swap_windows", "take_key", "write"]

MARK = 0x5EED_C0DE_9E37_79B9

_MARK, _SEED, _COUNTER, _WINDOWS = (slice(at, at + 2) for at in range(0, 8, 2))
_PROCESS = 8
_FREE = 9


class _Process:
    """The meaning of the ids inside generator states. They are valid in this process and its forks only."""

    def __init__(self) -> None:
        self.id = int.from_bytes(os.urandom(4), "little")
        self.lock = threading.Lock()  # backward passes draw in threads of their own
        self.windows: dict[int, tuple[BatchWindow, ...]] = {0: ()}


# Process-wide, because torch's default generator, whose state refers to it, is process-wide.
_process = _Process()


class Position(NamedTuple):
    """The position of the stream: its 64-bit seed and the number of the next draw."""

    seed: int
    counter: int = 0


def started(seed: int) -> Tensor:
    """Return the generator state of a stream that has drawn nothing.

    Raises:
        ValueError: ``seed`` is not a 64-bit integer.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"expected a seed of 64 bits, from -2**63 to 2**64 - 1; got {seed}")
    return write(Position(seed % 2**64), seeded_state(seed))


def write(position: Position, over: Tensor) -> Tensor:
    """Return a copy of the generator state ``over`` that holds ``position``; its batch windows stay."""
    state = over.clone()
    words = words_of(state)
    is_new = _get(words, _MARK) != MARK
    for where, value in ((_MARK, MARK), (_SEED, position.seed), (_COUNTER, position.counter)):
        _put(words, where, value)
    if is_new:
        _put(words, _WINDOWS, 0)
    words[_PROCESS] = _process.id
    words[_FREE:] = _seeded_words(position.seed)[_FREE:]
    return state


def is_marked(state: Tensor) -> bool:
    """Return whether a generator state is one of this stream's."""
    return _get(words_of(state), _MARK) == MARK


def read(state: Tensor) -> Position:
    """Return the position that a generator state holds or stands for.

    Raises:
        ValueError: the state was saved in another process, inside a batch window.
    """
    words = words_of(state)
    if _get(words, _MARK) != MARK:
        if is_fresh(state):
            return Position(seed_of(state))
        return Position(int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little"))
    if words[_PROCESS] != _process.id and _get(words, _WINDOWS):
        raise ValueError(
            "this generator state was saved in another process by torch.get_rng_state, inside random.local_batch or "
            "random.micro_batches; save with vescale.dtensor.random.get_state()"
        )
    return Position(_get(words, _SEED), _get(words, _COUNTER))


def take_key() -> Key:
    """Return the key of the next draw and advance the stream by one draw."""
    with _process.lock:
        state = _generator_state()
        words = words_of(state)
        number = _get(words, _COUNTER)
        _put(words, _COUNTER, number + 1)
        torch.set_rng_state(state)
        return fold_in(Key(_get(words, _SEED), 0), number)


def current_windows() -> tuple[BatchWindow, ...]:
    """Return the batch windows that the state holds, innermost first."""
    return _process.windows[_get(words_of(_generator_state()), _WINDOWS)]


def swap_windows(windows: tuple[BatchWindow, ...]) -> tuple[BatchWindow, ...]:
    """Put ``windows`` in force, innermost first; return those before."""
    number = 0
    if windows:
        text = repr(windows).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
        _process.windows.setdefault(number, windows)
    with _process.lock:
        state = _generator_state()
        words = words_of(state)
        before = _get(words, _WINDOWS)
        if before != number:
            _put(words, _WINDOWS, number)
            torch.set_rng_state(state)
        return _process.windows[before]


# ------------------------------------------------------------------------------------------------- words


def _generator_state() -> Tensor:
    """Return the state of the default CPU generator, in the layout of this stream."""
    state = torch.get_rng_state()
    words = words_of(state)
    if _get(words, _MARK) != MARK or words[_PROCESS] != _process.id:
        return write(read(state), state)
    return state


@functools.lru_cache(maxsize=16)
def _seeded_words(seed: int) -> np.ndarray:
    """Return the words of a generator freshly seeded."""
    return words_of(seeded_state(seed)).copy()


def _get(words: np.ndarray, where: slice) -> int:
    low, high = words[where].tolist()
    return low | high << 32


def _put(words: np.ndarray, where: slice, value: int) -> None:
    words[where] = value & 0xFFFFFFFF, value >> 32
