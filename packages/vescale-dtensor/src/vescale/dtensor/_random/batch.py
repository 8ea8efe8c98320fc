"""Parts of a batch: the contexts behind `random.local_batch` and `random.micro_batches`.

    rows of the global batch    | 0 1 2 3 | 4 5 6 7 |        local_batch over dp = 2: rows 0-3 and rows 4-7
    micro-batches of a rank     | 0 1 | 2 3 |                micro_batches(2): always the innermost part

A declared part is a `BatchWindow` (index, count), innermost first. Rules of random operators read the windows in force.
What activation checkpointing repeats has the windows of its first run (see ``_torch.recompute``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from .._torch import recompute
from .._torch.dispatch import dispatch_modes
from .global_position import WINDOWS, BatchWindow
from .philox import state as philox_state
from .rules import handle
from .state import PHILOX, Snapshot, current
from .streams import TAKEN_OFF, RandomMode

__all__ = ["MicroBatches", "window"]

Windows = tuple[BatchWindow, ...]


# The mode of the windows in force, if there are any.
_MODE: ContextVar[RandomMode] = ContextVar("vescale_mode_of_windows")

# The windows of the first run, while backward repeats it.
_REPEATED: ContextVar[Windows] = ContextVar("vescale_repeated_windows", default=())


@contextlib.contextmanager
def window(declared: BatchWindow) -> Iterator[None]:
    """Put one more window in force, as the innermost of its kind."""
    if declared.ranks and declared in _REPEATED.get():  # a hook of a repeated module
        yield
        return
    with _in_force(_nested(declared, _windows())), _in_state(declared):
        yield


@contextlib.contextmanager
def _in_force(windows: Windows) -> Iterator[None]:
    """Put windows in force in place of those outside."""
    outer = _MODE.get() if WINDOWS.get() else _inherited_mode()
    mode = outer or RandomMode(handle)
    tokens = WINDOWS.set(windows), _MODE.set(mode)
    before, mode.windows = mode.windows, windows
    try:
        with contextlib.nullcontext() if outer else mode:  # a second mode would slice each random operator twice
            yield
    finally:
        mode.windows = before
        WINDOWS.reset(tokens[0])
        _MODE.reset(tokens[1])


def _windows() -> Windows:
    """Return the windows in force."""
    if windows := WINDOWS.get():
        return windows
    mode = _inherited_mode()
    return () if mode is None else mode.windows


def _inherited_mode() -> RandomMode | None:
    """Return the mode that a thread of autograd has of the thread that waits for it, whose context it does not have."""
    modes = (mode for mode in dispatch_modes() if isinstance(mode, RandomMode) and mode.handler is handle)
    return next(modes, None)


def _carry() -> Callable[[], contextlib.AbstractContextManager] | None:
    windows = () if TAKEN_OFF.get() else _windows()
    return functools.partial(_repeated, windows) if windows else None


@contextlib.contextmanager
def _repeated(windows: Windows) -> Iterator[None]:
    """Put the windows of a first run in force."""
    token = _REPEATED.set(windows)
    try:
        with _in_force(windows):
            yield
    finally:
        _REPEATED.reset(token)


recompute.carriers.append(_carry)


def _nested(declared: BatchWindow, outer: Windows) -> Windows:
    """Return all windows, innermost first; windows without ranks are micro-batches and stay in front."""
    micro = () if not declared.ranks else tuple(each for each in outer if not each.ranks)
    return (*micro, declared, *outer[len(micro) :])


@contextlib.contextmanager
def _in_state(declared: BatchWindow) -> Iterator[None]:
    """Store the window in the state of the stream "philox", for recomputations.

    A recomputation may enter a context again that the state already holds.
    """
    if current() != PHILOX or declared in (known := philox_state.current_windows()):
        yield
        return
    philox_state.swap_windows(_nested(declared, known))
    try:
        yield
    finally:
        philox_state.swap_windows(known)


class MicroBatches:
    """The micro-batches of one step; see :func:`vescale.dtensor.random.micro_batches`."""

    def __init__(self, count: int):
        self.count = count
        self._start = Snapshot.take()
        self._states: dict[int, Snapshot] = {}
        self._running: int | None = None

    @contextlib.contextmanager
    def __call__(self, index: int) -> Iterator[None]:
        """Run as micro-batch ``index``, from its first draw or from its last position."""
        if not 0 <= index < self.count:
            raise IndexError(f"expected a micro-batch from 0 to {self.count - 1}, got {index}")
        if self._running is not None:
            raise RuntimeError(
                f"micro-batch {index} was entered inside micro-batch {self._running}: leave that one first"
            )
        self._running = index
        outside = Snapshot.take()
        self._resume(self._states.get(index, self._start), outside)
        try:
            with window(BatchWindow(index, self.count)) if self.count > 1 else contextlib.nullcontext():
                yield
        finally:
            self._states[index] = Snapshot.take()
            outside.restore()
            self._running = None

    def _resume(self, state: Snapshot, outside: Snapshot) -> None:
        state.restore()
        if current() == PHILOX:  # with the windows around this call
            torch.set_rng_state(philox_state.write(philox_state.read(state.generator), outside.generator))

    def finish(self) -> None:
        """Set the generators to the state of one device after the global batch."""
        if not self._states:
            return
        self._states[max(self._states)].restore()
        if self._start.active == PHILOX:
            positions = [philox_state.read(state.generator) for state in self._states.values()]
            torch.set_rng_state(philox_state.write(max(positions), self._start.generator))  # the one furthest on
