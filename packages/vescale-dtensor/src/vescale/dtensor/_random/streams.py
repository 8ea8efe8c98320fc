"""Which random stream is in force, and how handlers follow it.

============ =============================================== ==================================================
stream       numbers                                         equal to
============ =============================================== ==================================================
``torch``    the stock generator's, for the global tensor    the unmodified program on one device
``philox``   a function of (seed, draw, global index)        one device inside ``random.stream("philox")``
============ =============================================== ==================================================

A stream is a state of torch's default CPU generator and a way to read it. The state of the stream that is not in force
is parked here, so neither moves while the other one draws. All of it belongs to the process, as the generator does:
backward may run in other threads than forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._operators.attention import is_fused_without_dropout
from .._torch import dispatch as _torch
from .._torch.generator import in_backward
from .philox import rules as _rules
from .philox import state as _state
from .stock import rules as _random_rules

__all__ = [
    "PHILOX",
    "TORCH",
    "PhiloxMode",
    "Snapshot",
    "current",
    "device_states",
    "opened",
    "park",
    "parked_state",
    "set_device_states",
    "set_stream",
    "stream",
    "switchable",
]

TORCH, PHILOX = "torch", "philox"


class _Streams:
    """The state of the process: the stream in force, the parked one's generator state, and what is open."""

    def __init__(self) -> None:
        self.active = TORCH
        self.parked: dict[str, Tensor] = {}
        self.num_open = 0  # contexts of `stream` and `fork`
        self.program = contextlib.ExitStack()  # what `set_stream` entered
        self.num_program = 0  # how many of the open contexts that is


_streams = _Streams()


def current() -> str:
    """Return the name of the stream in force."""
    return _streams.active


@functools.cache
def switchable(handler: _torch.Handler) -> _torch.Handler:
    """Return a handler that runs ``handler`` in the stream "torch", and the counter-based rules in "philox".

    It costs one look at a global variable. Equal handlers give the same object.

    Raises:
        RuntimeError: when called, in the stream "torch", while backward repeats a forward that ran in "philox".
    """

    def handle(op: _torch.Op, args: tuple, kwargs: dict) -> object:
        if _streams.active == PHILOX:
            return _rules.handle(op, args, kwargs)
        if in_backward() and _state.is_marked(torch.get_rng_state()):
            raise RuntimeError(
                f'{op} repeats, in backward, a forward that ran inside random.stream("philox"), which has been left: '
                "call backward() inside the same context"
            )
        return handler(op, args, kwargs)

    return handle


# ------------------------------------------------------------------------------------------------- plain tensors


class PhiloxMode(_torch.TorchDispatchMode):
    """Run random operators by the rules of the stream "philox" while it is in force."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _torch.is_random(func) and not (torch.is_inference_mode_enabled() and _torch.is_composite(func)):
            return func(*args, **kwargs)
        if _streams.active != PHILOX or _rules.runs_stock() or not _random_rules.is_enabled():
            return func(*args, **kwargs)
        if _torch.is_composite(func):
            with self:  # inference mode shows dropout and the like as one operator: look inside
                return func.decompose(*args, **kwargs)
        if not _torch.is_random(func) or is_fused_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        return _rules.handle(func, args, kwargs)


# ------------------------------------------------------------------------------------------------- switching


@contextlib.contextmanager
def stream(name: str, *, seed: int | None = None) -> Iterator[None]:
    """See :func:`vescale.dtensor.random.stream`."""
    _check_name(name)
    if seed is None and name == _streams.active:
        yield
        return
    mode = PhiloxMode() if name == PHILOX and _streams.active != PHILOX else contextlib.nullcontext()
    with opened(), _continued(name) if seed is None else _seeded(name, seed), mode:
        yield


def set_stream(name: str, *, seed: int | None = None) -> None:
    """See :func:`vescale.dtensor.random.set_stream`."""
    _check_name(name)
    if _streams.num_open > _streams.num_program:
        raise RuntimeError("set_stream is for the whole program: call it outside of random.stream and random.fork")
    begun = None if seed is None else _state.started(seed)
    _streams.program.close()
    _streams.num_program = 0
    if name == PHILOX:
        if begun is not None:
            _streams.parked[PHILOX] = begun
        _streams.program.enter_context(stream(PHILOX))
        _streams.num_program = 1
    elif seed is not None:
        torch.manual_seed(seed)


def _check_name(name: str) -> None:
    if name not in (TORCH, PHILOX):
        raise ValueError(f'unknown random stream {name!r}; there are "torch" and "philox"')


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Count a context that puts streams back at its end."""
    _streams.num_open += 1
    try:
        yield
    finally:
        _streams.num_open -= 1


@contextlib.contextmanager
def _seeded(name: str, seed: int) -> Iterator[None]:
    """Start a stream, and forget it at the end."""
    begun = _state.started(seed)
    before = Snapshot.take()
    _streams.active = name
    try:
        if name == TORCH:
            torch.manual_seed(seed)
        else:
            torch.set_rng_state(begun)
            _state.swap_windows(_random_rules.WINDOWS.get())
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def _continued(name: str) -> Iterator[None]:
    """Take up a stream where it was left, and park it at the end."""
    outer = _streams.active
    _exchange(outer, name)
    try:
        if name == PHILOX:
            _state.swap_windows(_random_rules.WINDOWS.get())
        yield
    finally:
        _exchange(name, outer)


def _exchange(leave: str, enter: str) -> None:
    parked = parked_state(enter)
    _streams.parked[leave] = torch.get_rng_state()
    torch.set_rng_state(parked)
    del _streams.parked[enter]
    _streams.active = enter


# ------------------------------------------------------------------------------------------------- generators


def parked_state(name: str) -> Tensor:
    """Return the generator state of the stream that is not in force; one that never was starts at torch's seed."""
    if name not in _streams.parked:
        _streams.parked[name] = _state.started(torch.initial_seed())
    return _streams.parked[name]


def park(name: str, state: Tensor) -> None:
    """Set the generator state of the stream that is not in force."""
    _streams.parked[name] = state


def device_states() -> dict[str, list[Tensor]]:
    """Return the states of all generators on accelerators that are in use, by device type."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return {}
    module = torch.get_device_module(accelerator.type)
    is_initialized = getattr(module, "is_initialized", lambda: False)
    if not is_initialized():
        return {}
    return {accelerator.type: [module.get_rng_state(index) for index in range(module.device_count())]}


def set_device_states(states: dict[str, list[Tensor]]) -> None:
    """Undo `device_states`."""
    for device_type, of_devices in states.items():
        for index, state in enumerate(of_devices):
            torch.get_device_module(device_type).set_rng_state(state, index)


@dataclass(frozen=True)
class Snapshot:
    """All of this process's generators, and which stream is in force."""

    active: str
    generator: Tensor
    parked: dict[str, Tensor]
    devices: dict[str, list[Tensor]]

    @classmethod
    def take(cls) -> Snapshot:
        """Copy what there is."""
        return cls(_streams.active, torch.get_rng_state(), dict(_streams.parked), device_states())

    def restore(self) -> None:
        """Put everything back."""
        _streams.active = self.active
        _streams.parked = dict(self.parked)
        torch.set_rng_state(self.generator)
        set_device_states(self.devices)
