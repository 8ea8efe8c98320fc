"""The random generators of the process: which stream is in force, and their seeds and states.

A stream is a state of torch's default CPU generator and a way to read it (`philox.state` for the stream "philox"). The
state of the stream that is not in force is parked here, so that neither stream moves while the other one draws::

    stream in force     default CPU generator       parked
    torch               state of "torch"            state of "philox"
    philox              state of "philox"           state of "torch"

A saved state (`get_state`) is a flat dict of tensors and integers, which ``torch.save``, ``pickle`` and checkpoint
formats accept:

==================  ==========================================  ========================================================
key                 value                                       content
==================  ==========================================  ========================================================
``version``         int                                         1
``torch.cpu``       uint8, ``(5056,)``                          torch's CPU generator (the stream "torch")
``torch.cuda``      uint8, ``(devices, 16)``; if in use         torch's generators of the accelerators (``cuda``, …)
``philox.seed``     int                                         the stream "philox": its seed
``philox.counter``  int                                         and the number of its next draw
==================  ==========================================  ========================================================

Batch windows are no part of it: they belong to the program, not to the generators.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .philox import state as philox_state

__all__ = [
    "PHILOX",
    "STREAMS",
    "TORCH",
    "Position",
    "Snapshot",
    "current",
    "exchange_moves",
    "fork",
    "get_state",
    "kinds_of",
    "manual_seed",
    "moving",
    "random_position",
    "set_state",
]

TORCH, PHILOX = "torch", "philox"

VERSION = 1
MOST_MOVES = 2048  # that are kept: more than a forward has calls of other stages that draw
CPU, SEED, COUNTER = "torch.cpu", "philox.seed", "philox.counter"
REQUIRED = {"version": int, CPU: Tensor, SEED: int, COUNTER: int}


class _Streams:
    """The stream in force, the generator state of the parked one, and the contexts that are open."""

    def __init__(self) -> None:
        self.active = TORCH
        self.parked: dict[str, Tensor] = {}
        self.num_open = 0  # contexts of `random.stream` and `random.fork`
        self.program = contextlib.ExitStack()  # what `random.set_stream` entered
        self.num_program = 0  # how many of the open contexts that is

    def parked_state(self, name: str) -> Tensor:
        """Return the generator state of the stream that is not in force; a new one starts at torch's seed."""
        if name not in self.parked:
            self.parked[name] = philox_state.started(torch.initial_seed())
        return self.parked[name]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Count a context that restores streams at its end."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


# Process-wide, as torch's default generator is: a backward pass may run in other threads than its forward pass.
STREAMS = _Streams()


def current() -> str:
    """Return the name of the stream in force."""
    return STREAMS.active


# ------------------------------------------------------------------------------------------------- all generators


@dataclass(frozen=True)
class Snapshot:
    """The states of all generators of this process, and which stream is in force."""

    active: str
    generator: Tensor
    parked: dict[str, Tensor]
    devices: dict[str, list[Tensor]]

    @classmethod
    def take(cls) -> Snapshot:
        """Copy the present states."""
        return cls(STREAMS.active, torch.get_rng_state(), dict(STREAMS.parked), _device_states())

    def restore(self) -> None:
        """Restore these states."""
        STREAMS.active = self.active
        STREAMS.parked = dict(self.parked)
        torch.set_rng_state(self.generator)
        _set_device_states(self.devices)


def _device_states() -> dict[str, list[Tensor]]:
    """Return the states of all generators on accelerators that are in use, by device type."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    module = torch.get_device_module(accelerator.type)
    is_initialized = getattr(module, "is_initialized", lambda: False)
    if not is_initialized():
        return {}
    return {accelerator.type: [module.get_rng_state(index) for index in range(module.device_count())]}


def _set_device_states(states: dict[str, list[Tensor]]) -> None:
    """Undo `_device_states`."""
    for device_type, of_devices in states.items():
        for index, state in enumerate(of_devices):
            torch.get_device_module(device_type).set_rng_state(state, index)


# ------------------------------------------------------------------------------------------------- seeds and states


def manual_seed(seed: int) -> None:
    """See :func:`vescale.dtensor.random.manual_seed`."""
    begun = philox_state.started(seed)  # before anything changes: it checks the seed
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    if STREAMS.active == PHILOX:
        STREAMS.parked[TORCH] = torch.get_rng_state()
        torch.set_rng_state(philox_state.write(philox_state.read(begun), before))
    else:
        STREAMS.parked[PHILOX] = begun


def get_state() -> dict[str, Any]:
    """See :func:`vescale.dtensor.random.get_state`."""
    in_philox = STREAMS.active == PHILOX
    here = torch.get_rng_state()
    there = STREAMS.parked_state(TORCH if in_philox else PHILOX).clone()
    cpu, philox = (there, here) if in_philox else (here, there)
    position = philox_state.read(philox)
    devices = {f"torch.{kind}": torch.stack(states) for kind, states in _device_states().items()}
    return {
        "version": VERSION,
        CPU: cpu,
        **devices,
        SEED: position.seed,
        COUNTER: position.counter,
    }


def set_state(state: dict[str, Any]) -> None:
    """See :func:`vescale.dtensor.random.set_state`."""
    _check(state)
    position = philox_state.Position(state[SEED], state[COUNTER])
    if STREAMS.active == PHILOX:
        STREAMS.parked[TORCH] = state[CPU].clone()
        torch.set_rng_state(philox_state.write(position, torch.get_rng_state()))
    else:
        STREAMS.parked[PHILOX] = philox_state.write(position, philox_state.started(position.seed))
        torch.set_rng_state(state[CPU])
    _set_device_states({kind: list(state[f"torch.{kind}"]) for kind in kinds_of(state)})


@contextlib.contextmanager
def fork(seed: int | None = None) -> Iterator[None]:
    """See :func:`vescale.dtensor.random.fork`."""
    before = Snapshot.take()
    with STREAMS.opened():
        try:
            if seed is not None:
                manual_seed(seed)
            yield
        finally:
            before.restore()


# ------------------------------------------------------------------------------------------------- checks


def kinds_of(state: dict[Any, Any]) -> list[str]:
    """Return the kinds of accelerators of which a state has generators."""
    texts = [key for key in state if isinstance(key, str)]
    return [key.removeprefix("torch.") for key in texts if key.startswith("torch.") and key != CPU]


def _check(state: dict[str, Any]) -> None:
    """Raise unless `set_state` can restore all of ``state``."""
    if not isinstance(state, dict):
        raise TypeError(f"expected the dict that random.get_state() returns, got {type(state).__name__}")
    if "version" in state and (not isinstance(state["version"], int) or state["version"] != VERSION):
        raise ValueError(f"expected a random state of version {VERSION}, got version {state['version']!r}")
    if missing := sorted(REQUIRED.keys() - state.keys()):
        raise ValueError(f"expected a state saved by random.get_state(), got one without {', '.join(missing)}")
    for key, kind in REQUIRED.items():
        if not isinstance(state[key], kind) or isinstance(state[key], bool):
            raise ValueError(
                f"random state: expected {key} to be of type {kind.__name__}, got {type(state[key]).__name__}"
            )
    devices = kinds_of(state)
    if unknown := sorted(map(str, state.keys() - REQUIRED.keys() - {f"torch.{kind}" for kind in devices})):
        raise ValueError(f"expected a state saved by random.get_state(), got unknown entries {', '.join(unknown)}")
    _check_tensor(CPU, state[CPU], torch.uint8, torch.get_rng_state().shape)
    if not 0 <= state[SEED] < 2**64 or not 0 <= state[COUNTER] < 2**63:
        raise ValueError(
            f"random state: expected 0 <= seed < 2**64 and 0 <= counter < 2**63, got {state[SEED]} and {state[COUNTER]}"
        )
    for kind in devices:
        _check_devices(kind, state[f"torch.{kind}"])


def _check_tensor(key: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"random state: expected {key} to be a {dtype} tensor of shape {tuple(shape)}, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def _check_devices(kind: str, states: object) -> None:
    if not isinstance(states, Tensor) or states.dtype != torch.uint8 or states.ndim != 2:
        raise ValueError(f"random state: expected torch.{kind} to be a uint8 tensor of shape (devices, bytes)")
    try:
        here = torch.get_device_module(kind).device_count()
    except (RuntimeError, AttributeError):  # no such kind of device
        here = 0
    if here != len(states):
        raise ValueError(
            f"expected a random state of {here} {kind} devices, as this process sees, got one of {len(states)}"
        )


# ------------------------------------------------------------------------------------------------- positions

_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Position:
    """The state of torch's default generators; see :func:`random_position`.

    It is made and compared at the start and at the end of every call of a module, so both take about a microsecond
    (``torch.equal`` of two states takes several).
    """

    __slots__ = ("_num_moves", "_state")

    def __init__(self, device_type: str):
        state = torch.get_rng_state()  # also where the stream "philox" of all devices is
        if device_type != "cpu":
            device = torch.get_device_module(device_type)
            if not getattr(device, "is_current_stream_capturing", bool)():  # a generator cannot be read during capture
                state = torch.cat([state, device.get_rng_state()])
        self._state = state
        self._num_moves = _moves.count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Position) or self._state.nbytes != other._state.nbytes:
            return NotImplemented
        if self._num_moves == other._num_moves:
            return _is_same(self._state, other._state)
        first, last = (self, other) if self._num_moves < other._num_moves else (other, self)
        state = first._state
        for before, after in _moves.between(first._num_moves, last._num_moves):
            if before.nbytes != state.nbytes or not _is_same(state, before):
                return False
            state = after
        return _is_same(state, last._state)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return not _compare_memory(one.data_ptr(), other.data_ptr(), one.nbytes)


class _Moves:
    """The latest moves of generators that are no draws: states before and after each."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=MOST_MOVES)

    def add(self, before: Position, after: Position) -> None:
        self.count += 1
        self._kept.append((before._state, after._state))

    def between(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        first = self.count - len(self._kept)
        if start < first:
            raise RuntimeError(
                f"expected at most {MOST_MOVES} moves of the random generators in one call of a module, got "
                f"{end - start}; run fewer stages of a pipeline in one call"
            )
        return list(self._kept)[start - first : end - first]


# Process-wide, as the generators are.
_moves = _Moves()


def exchange_moves(moves: object) -> object:
    """Let positions be compared by other moves from now on, new ones if None; return those before.

    Where several ranks live in one process, each has its own.
    """
    global _moves
    before = _moves
    _moves = moves if isinstance(moves, _Moves) else _Moves()
    return before


@contextlib.contextmanager
def moving(device_type: str) -> Iterator[None]:
    """Move generators in this context, which is no draw: positions before and after it are equal.

    A stage of a pipeline skips the draws of other stages in this way.
    """
    before = Position(device_type)
    yield
    _moves.add(before, Position(device_type))


def random_position(device_type: str = "cpu") -> Position:
    """Return the positions of the random streams of the CPU and of a kind of device; equal until something draws.

    A position covers every draw from torch's default generators, by any code, and seeding; of a device, those of the
    current one. It does not cover generators that a program has created. On the CPU it takes about a microsecond.

    Example:
        >>> before = random_position()
        >>> random_position() == before
        True
        >>> dropped = torch.nn.functional.dropout(torch.ones(3), 0.5)
        >>> random_position() == before
        False
    """
    return Position(device_type)
