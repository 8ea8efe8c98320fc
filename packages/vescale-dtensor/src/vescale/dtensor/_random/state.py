"""Seeds and states of the random generators: save, restore, fork.

A saved state is a flat dict of tensors and integers, which ``torch.save``, ``pickle`` and checkpoint formats take:

==================  ==========================================  ========================================================
key                 value                                       what
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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import streams as _streams
from .philox import state as _state

__all__ = ["fork", "get_state", "manual_seed", "set_state"]

VERSION = 1
CPU, SEED, COUNTER = "torch.cpu", "philox.seed", "philox.counter"
REQUIRED = {"version": int, CPU: Tensor, SEED: int, COUNTER: int}


def manual_seed(seed: int) -> None:
    """See :func:`vescale.dtensor.random.manual_seed`."""
    begun = _state.started(seed)  # before anything changes: it checks the seed
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    if _streams.current() == _streams.PHILOX:
        _streams.park(_streams.TORCH, torch.get_rng_state())
        torch.set_rng_state(_state.write(_state.read(begun), before))
    else:
        _streams.park(_streams.PHILOX, begun)


def get_state() -> dict[str, Any]:
    """See :func:`vescale.dtensor.random.get_state`."""
    in_philox = _streams.current() == _streams.PHILOX
    here = torch.get_rng_state()
    there = _streams.parked_state(_streams.TORCH if in_philox else _streams.PHILOX).clone()
    cpu, philox = (there, here) if in_philox else (here, there)
    position = _state.read(philox)
    devices = {f"torch.{kind}": torch.stack(states) for kind, states in _streams.device_states().items()}
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
    position = _state.Position(state[SEED], state[COUNTER])
    if _streams.current() == _streams.PHILOX:
        _streams.park(_streams.TORCH, state[CPU].clone())
        torch.set_rng_state(_state.write(position, torch.get_rng_state()))
    else:
        _streams.park(_streams.PHILOX, _state.write(position, _state.started(position.seed)))
        torch.set_rng_state(state[CPU])
    _streams.set_device_states({kind: list(state[f"torch.{kind}"]) for kind in _devices_of(state)})


@contextlib.contextmanager
def fork(seed: int | None = None) -> Iterator[None]:
    """See :func:`vescale.dtensor.random.fork`."""
    before = _streams.Snapshot.take()
    with _streams.opened():
        try:
            if seed is not None:
                manual_seed(seed)
            yield
        finally:
            before.restore()


# ------------------------------------------------------------------------------------------------- checks


def _devices_of(state: dict[str, Any]) -> list[str]:
    return [key.removeprefix("torch.") for key in state if key.startswith("torch.") and key != CPU]


def _check(state: dict[str, Any]) -> None:
    """Raise unless `set_state` can restore all of ``state``."""
    if not isinstance(state, dict):
        raise TypeError(f"a random state is the dict that random.get_state() returns, got {type(state).__name__}")
    if state.get("version", VERSION) != VERSION:
        raise ValueError(f"a random state of version {state['version']!r}; this vescale reads version {VERSION}")
    if missing := sorted(REQUIRED.keys() - state.keys()):
        raise ValueError(f"a random state without {', '.join(missing)}: it was not saved by random.get_state()")
    for key, kind in REQUIRED.items():
        if not isinstance(state[key], kind):
            raise ValueError(f"random state: {key} is a {kind.__name__}, got {type(state[key]).__name__}")
    devices = _devices_of(state)
    if unknown := sorted(map(str, state.keys() - REQUIRED.keys() - {f"torch.{kind}" for kind in devices})):
        raise ValueError(f"a random state with unknown entries {', '.join(unknown)}")
    _check_tensor(CPU, state[CPU], torch.uint8, torch.get_rng_state().shape)
    if not 0 <= state[SEED] < 2**64 or not 0 <= state[COUNTER] < 2**63:
        raise ValueError(f"random state: seed {state[SEED]} or counter {state[COUNTER]} is out of range")
    for kind in devices:
        _check_devices(kind, state[f"torch.{kind}"])


def _check_tensor(key: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"random state: {key} is a {dtype} tensor of shape {tuple(shape)}, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def _check_devices(kind: str, states: object) -> None:
    if not isinstance(states, Tensor) or states.dtype != torch.uint8 or states.ndim != 2:
        raise ValueError(f"random state: torch.{kind} is a uint8 tensor of shape (devices, bytes)")
    try:
        here = torch.get_device_module(kind).device_count()
    except (RuntimeError, AttributeError):  # no such kind of device
        here = 0
    if here != len(states):
        raise ValueError(f"a random state of {len(states)} {kind} devices; this process sees {here}")
