"""Where the random generators are: positions, the distance between two, and a position moved by a distance.

A stage runs its own units only. So that it draws what one process draws, its generators skip what other stages draw:

    generator                          position            distance
    Mersenne Twister of the CPU        the full state      a number of 32-bit words, skipped one by one
    counter-based, of an accelerator   (seed, offset)      a difference of offsets
    another stream of numbers          (seed, number)      a difference of numbers; known by the package of the stream

A distance is measured once, where the draw runs, and holds from any position. Positions are compared in every step.

No operator of torch runs here: modes around the caller would change it.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

#: Of a CPU generator's state: seed, two counters, 624 words of the Mersenne Twister, the second of a pair of normals.
_STATE_BYTES, _NUM_WORDS, _FIRST_WORD = 5056, 624, 3
#: More are not looked for: 4 GB of random words in a call are taken for a generator that was seeded.
_MOST_WORDS = 2**30
_BLOCKS, _SAMPLE = 256, 8  # blocks of 624 words at a time; a block is known by its first words
STOCK = "torch"  # the stream of torch's own generators


class UnknownDistanceError(Exception):
    """No number of draws leads from one position to the other."""


@dataclass(frozen=True)
class Distance:
    """How far a call moves the generators: words on the CPU, the offset of a device, numbers of another stream."""

    words: int = 0
    offset: int = 0
    numbers: int = 0

    def __bool__(self) -> bool:
        return bool(self.words or self.offset or self.numbers)


NOWHERE = Distance()


@dataclass(frozen=True, eq=False)
class Position:
    """The state of all generators that a step uses.

    Attributes:
        cpu: the state of the CPU's generator; empty in another stream, which keeps its own position there.
        device: that of the accelerator's; empty without one.
        other: seed and number in another stream.
    """

    cpu: np.ndarray
    device: np.ndarray
    other: tuple[int, int] = (0, 0)
    _checksum: list[int] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Position):
            return NotImplemented
        same = np.array_equal(self.cpu, other.cpu) and np.array_equal(self.device, other.device)
        return same and self.other == other.other

    @property
    def checksum(self) -> int:
        """A number that is equal on all ranks at this position."""
        return zlib.crc32(self.cpu.tobytes() + self.device.tobytes() + repr(self.other).encode())


class Generators:
    """The generators of this process.

    Args:
        device: of the pipeline.
        draws: the package that knows other streams and parts of a batch (``docs/protocols.md``); None if there is none.
    """

    def __init__(self, device: torch.device, draws: Any) -> None:
        self._device, self._draws = device, draws

    @property
    def stream(self) -> str:
        """The name of the stream in force."""
        return STOCK if self._draws is None else str(self._draws.stream())

    def read(self) -> Position:
        """Return the present position."""
        none = np.empty(0, np.uint8)
        device = none if self._device.type == "cpu" else _bytes(self._module().get_rng_state(self._device))
        if self.stream == STOCK:
            return Position(_bytes(torch.get_rng_state()), device)
        return Position(none, device, tuple(self._draws.position()))

    def write(self, position: Position) -> None:
        """Move the generators to a position, which is no draw."""
        kind = self._device.type
        with contextlib.nullcontext() if self._draws is None else self._draws.moving(kind):
            if position.cpu.size:
                torch.set_rng_state(torch.from_numpy(position.cpu.copy()))
            else:
                self._draws.move(*position.other)
            if position.device.size:
                self._module().set_rng_state(torch.from_numpy(position.device.copy()), self._device)

    def distance(self, before: Position, after: Position) -> Distance:
        """Return what leads from one position to another.

        Raises:
            UnknownDistanceError: no number of draws does, as after a seed.
        """
        if before == after:
            return NOWHERE
        words = _words_between(before.cpu, after.cpu) if before.cpu.size else 0
        numbers = after.other[1] - before.other[1]
        found = Distance(words, _offset(after.device) - _offset(before.device), numbers)
        if self.moved(before, found) != after:
            raise UnknownDistanceError
        return found

    def moved(self, position: Position, distance: Distance) -> Position:
        """Return the position at a distance from another."""
        if not distance:
            return position
        seed, number = position.other
        cpu = _after_words(position.cpu, distance.words) if distance.words else position.cpu
        device = position.device.copy()
        if distance.offset:
            device.view(np.int64)[1] += distance.offset
        return Position(cpu, device, (seed, number + distance.numbers))

    def _module(self) -> Any:
        return torch.get_device_module(self._device.type)


def _bytes(state: torch.Tensor) -> np.ndarray:
    return state.numpy().copy()


def _offset(state: np.ndarray) -> int:
    if not state.size:
        return 0
    if state.size != 16:
        raise UnknownDistanceError
    return int(state.view(np.int64)[1])


# --- the Mersenne Twister ---


def _key(state: np.ndarray) -> np.ndarray:
    return state.view(np.uint64)[_FIRST_WORD : _FIRST_WORD + _NUM_WORDS].astype(np.uint32)


def _place(state: np.ndarray) -> int:
    """Return how many of the 624 words are drawn."""
    return _NUM_WORDS + 1 - int(state.view(np.int32)[2])


def _twister(state: np.ndarray, place: int | None = None) -> np.random.MT19937:
    """Return numpy's generator of the same words as torch's."""
    if state.size != _STATE_BYTES:
        raise UnknownDistanceError
    twister = np.random.MT19937()
    place = _place(state) if place is None else place
    twister.state = {"bit_generator": "MT19937", "state": {"key": _key(state), "pos": place}}
    return twister


def _words_between(before: np.ndarray, after: np.ndarray) -> int:
    twister, tail = _twister(before), 8 * (_FIRST_WORD + _NUM_WORDS)
    if not (np.array_equal(before[:8], after[:8]) and np.array_equal(before[tail:], after[tail:])):
        raise UnknownDistanceError  # another seed, or one of a pair of normals is left
    start, end = _place(before), _place(after)
    if end >= start and np.array_equal(_key(before), _key(after)):
        return end - start
    goal = _twister(after, 0).random_raw(_NUM_WORDS)[:_SAMPLE]
    twister.random_raw(_NUM_WORDS - start, output=False)
    for first in range(0, _MOST_WORDS, _BLOCKS * _NUM_WORDS):
        blocks = twister.random_raw(_BLOCKS * _NUM_WORDS).reshape(_BLOCKS, _NUM_WORDS)
        (found,) = (blocks[:, :_SAMPLE] == goal).all(1).nonzero()
        if found.size:
            return _NUM_WORDS - start + first + int(found[0]) * _NUM_WORDS + end
    raise UnknownDistanceError


def _after_words(state: np.ndarray, count: int) -> np.ndarray:
    twister = _twister(state)
    twister.random_raw(count, output=False)
    reached = twister.state["state"]
    moved = state.copy()
    moved.view(np.uint64)[_FIRST_WORD : _FIRST_WORD + _NUM_WORDS] = reached["key"]
    moved.view(np.int32)[2] = _NUM_WORDS + 1 - reached["pos"]
    moved.view(np.uint64)[2] = reached["pos"]
    return moved
