"""Where the counter-based stream keeps its position: inside the state of torch's CPU generator.

While the stream is active nothing draws from the Mersenne Twister of torch's default CPU generator, so the 624 words of
its state are free. They hold the seed of the stream, the number of the next draw, and what surrounds it::

    word      0, 1    mark that says so              8, 9     batch windows in force (id, 0: none)
              2, 3    seed                           10       process that numbers windows and modules
              4, 5    number of the next draw        11       0
              6, 7    module that runs (0: none)     12 ...   numbers of the next draws of modules

Counts of modules are combined (exclusive or) with the words of a generator freshly seeded, and the words that are not
used are its, so what might draw from the generator in spite of all does not get zeros.

Whatever saves and restores the generator then saves and restores the position, without knowing of it: activation
checkpointing above all, reentrant or not, which restores the generator before it runs a part of a model again, in
whichever order and thread backward asks for it; `torch.random.fork_rng`; `torch.get_rng_state` and its counterpart. A
counter anywhere else would have advanced in the meantime, and the recomputation would draw another mask. The batch
windows travel along for the same reason: recomputation happens when `random.local_batch` may have been left.

`torch.manual_seed` writes a state without the mark. It is read as a stream of that seed that has drawn nothing. Any
other state without the mark (of the stock stream, midway) is read as a stream seeded by a digest of it: never a
repetition.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..._torch.generator import NUM_WORDS, is_fresh, seed_of, seeded_state, words_of
from ..global_position import BatchWindow
from .cipher import Key, fold_in

__all__ = [
    "Position",
    "current_windows",
    "furthest",
    "is_marked",
    "module_id",
    "read",
    "started",
    "swap_module",
    "swap_windows",
    "take_key",
    "write",
]

MARK = 0x5EED_C0DE_9E37_79B9
MODULE_KEYS = 2**63
"""Added to a module's number where it makes a key, so that it is not the number of a draw."""

_MARK, _SEED, _COUNTER, _MODULE, _WINDOWS = (slice(at, at + 2) for at in range(0, 10, 2))
_PROCESS = 10
_SLOTS = 12
_MAX_MODULES = NUM_WORDS - _SLOTS

# Numbers that fit into a state for windows and modules; they mean something in this process (and its forks) only.
_process = int.from_bytes(os.urandom(4), "little")
_lock = threading.Lock()
_slots: dict[int, int] = {}
_windows: dict[int, tuple[BatchWindow, ...]] = {0: ()}


@dataclass
class Position:
    """The stream's position, as plain numbers.

    Attributes:
        seed: 64-bit seed.
        counter: number of the next draw outside of modules.
        modules: number of the next draw of each module that has drawn, by `module_id`.
    """

    seed: int
    counter: int = 0
    modules: dict[int, int] = field(default_factory=dict)


def furthest(positions: Sequence[Position]) -> Position:
    """Return the position after all draws of programs that started from one position and drew independently."""
    modules: dict[int, int] = {}
    for position in positions:
        for module, count in position.modules.items():
            modules[module] = max(count, modules.get(module, 0))
    return Position(positions[0].seed, max(position.counter for position in positions), modules)


def module_id(name: str) -> int:
    """Return the 63-bit number that stands for a module's name, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % (2**63 - 1) + 1


def started(seed: int) -> Tensor:
    """Return the generator state of a stream that has drawn nothing.

    Raises:
        ValueError: ``seed`` is not a 64-bit integer.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed is a 64-bit integer, got {seed}")
    return write(Position(seed % 2**64), seeded_state(seed))


def write(position: Position, over: Tensor) -> Tensor:
    """Return a copy of a generator state that holds ``position``; the module and the windows in ``over`` stay."""
    state = over.clone()
    words = words_of(state)
    is_new = _get(words, _MARK) != MARK
    for where, value in ((_MARK, MARK), (_SEED, position.seed), (_COUNTER, position.counter)):
        _put(words, where, value)
    if is_new:
        _put(words, _MODULE, 0)
        _put(words, _WINDOWS, 0)
    words[_PROCESS], words[_PROCESS + 1] = _process, 0
    words[_SLOTS:] = _base(position.seed)[_SLOTS:]
    for module, count in position.modules.items():
        words[_slot(module)] ^= np.uint32(count)
    return state


def is_marked(state: Tensor) -> bool:
    """Tell whether a generator state is one of this stream's."""
    return _get(words_of(state), _MARK) == MARK


def read(state: Tensor) -> Position:
    """Return the position that a generator state holds, or stands for.

    Raises:
        ValueError: the state was made in another process and counts draws of modules.
    """
    words = words_of(state)
    if _get(words, _MARK) != MARK:
        if is_fresh(state):
            return Position(seed_of(state))
        return Position(int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little"))
    counts = words ^ _base(_get(words, _SEED))
    if words[_PROCESS] != _process and (counts[_SLOTS:].any() or _get(words, _WINDOWS)):
        raise ValueError(
            "this generator state was saved in another process by torch.get_rng_state; "
            "save with vescale.dtensor.random.get_state()"
        )
    modules = {module: int(counts[slot]) for module, slot in _slots.items() if counts[slot]}
    return Position(_get(words, _SEED), _get(words, _COUNTER), modules)


def take_key() -> Key:
    """Return the key of the next draw, which is spent."""
    with _lock:
        state = _generator_state()
        words = words_of(state)
        root = Key(_get(words, _SEED), 0)
        module = _get(words, _MODULE)
        if module:
            slot = _slot(module)
            base = _base(root.seed)[slot]
            number = int(words[slot] ^ base)
            if number == 2**32 - 1:
                raise RuntimeError("a module has drawn 2**32 times from one stream; start another with manual_seed")
            key = fold_in(fold_in(root, module + MODULE_KEYS), number)
            words[slot] = np.uint32(number + 1) ^ base
        else:
            number = _get(words, _COUNTER)
            key = fold_in(root, number)
            _put(words, _COUNTER, number + 1)
        torch.set_rng_state(state)
        return key


# ------------------------------------------------------------------------------------------------- surroundings


def swap_module(module: int) -> int:
    """Make ``module`` the one that draws; return the one before (0: none)."""
    return _swap(_MODULE, module)


def current_windows() -> tuple[BatchWindow, ...]:
    """Return the batch windows that the state holds."""
    return _windows[_get(words_of(_generator_state()), _WINDOWS)]


def swap_windows(windows: tuple[BatchWindow, ...]) -> tuple[BatchWindow, ...]:
    """Put ``windows`` in force, innermost first; return those before."""
    number = 0
    if windows:
        text = repr(windows).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
        _windows.setdefault(number, windows)
    return _windows[_swap(_WINDOWS, number)]


# ------------------------------------------------------------------------------------------------- words


def _generator_state() -> Tensor:
    """Return the state of the default CPU generator, marked."""
    state = torch.get_rng_state()
    words = words_of(state)
    if _get(words, _MARK) != MARK:
        return write(read(state), state)
    if words[_PROCESS] != _process:
        return write(read(state), state)
    return state


def _swap(where: slice, value: int) -> int:
    with _lock:
        state = _generator_state()
        words = words_of(state)
        before = _get(words, where)
        if before != value:
            _put(words, where, value)
            torch.set_rng_state(state)
        return before


def _slot(module: int) -> int:
    """Return the word that counts the draws of a module."""
    slot = _slots.get(module)
    if slot is None:
        if len(_slots) == _MAX_MODULES:
            raise RuntimeError(
                f"more than {_MAX_MODULES} modules draw from one stream, which is all that random.key_by_module can "
                "count; key a part of the model only"
            )
        slot = _slots[module] = _SLOTS + len(_slots)
    return slot


@functools.lru_cache(maxsize=16)
def _base(seed: int) -> np.ndarray:
    """Return the words of a generator freshly seeded."""
    return words_of(seeded_state(seed)).copy()


def _get(words: np.ndarray, where: slice) -> int:
    low, high = words[where].tolist()
    return low | high << 32


def _put(words: np.ndarray, where: slice, value: int) -> None:
    words[where] = value & 0xFFFFFFFF, value >> 32
