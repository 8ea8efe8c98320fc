"""Declare that tensors are parts of a larger batch: contexts behind `random.local_batch` and `random.micro_batches`.

    rows of the global batch    | 0 1 2 3 | 4 5 6 7 |        local_batch over dp = 2: rows 0-3 and rows 4-7
    micro-batches of a rank     | 0 1 | 2 3 |                micro_batches(2): the innermost cut, always

A declared part is a *window* (index, count), innermost first. Rules for random operators read the windows in force.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .._operators.attention import is_fused_without_dropout
from .._torch import dispatch as _torch
from . import streams as _streams
from .global_position import WINDOWS, BatchWindow
from .philox import rules as _rules
from .philox import state as _state
from .stock import rules as _random_rules
from .streams import switchable

__all__ = ["MicroBatches", "RandomMode", "is_watched", "is_watched_alone", "unwatched", "watched", "window"]

Windows = tuple[BatchWindow, ...]

# The modes that `unwatched` has taken off around the running code, the outermost first.
TAKEN_OFF: ContextVar[tuple[_torch.TorchDispatchMode, ...]] = ContextVar("vescale_modes_taken_off", default=())

handle = switchable(_random_rules.handle)


class RandomMode(_torch.TorchDispatchMode):
    """Give random operators on plain tensors to a handler; leave everything else alone."""

    def __init__(self, handler: _torch.Handler):
        super().__init__()
        self.handler = handler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _torch.is_composite(func) and (torch.is_inference_mode_enabled() or _torch.is_random(func)):
            with self:  # only below autograd dropout and the like are one operator: look inside
                return func.decompose(*args, **kwargs)
        if not _torch.is_random(func) or _rules.runs_stock() or not _random_rules.is_enabled():
            return func(*args, **kwargs)
        if is_fused_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)  # they reach the same rules by their own dispatch
        return self.handler(func, args, kwargs)


@contextlib.contextmanager
def window(declared: BatchWindow) -> Iterator[None]:
    """Put one more window in force."""
    outer = WINDOWS.get()
    token = WINDOWS.set(_nested(declared, outer))
    try:
        # a second mode would cut each draw twice
        with contextlib.nullcontext() if outer else RandomMode(handle), _in_state(declared):
            yield
    finally:
        WINDOWS.reset(token)


def is_watched() -> bool:
    """Tell whether random operators on plain tensors are followed here, inside of `unwatched`, too.

    They are in `local_batch`, in `micro_batches` and in the stream "philox".

    Example:
        >>> is_watched()
        False
    """
    return bool(TAKEN_OFF.get()) or any(map(_is_ours, _torch.dispatch_modes()))


def is_watched_alone() -> bool:
    """Tell whether operators on plain tensors are watched for what `is_watched` names, and by nobody else."""
    modes = _torch.dispatch_modes()
    return bool(modes) and all(map(_is_ours, modes))


def _is_ours(mode: _torch.TorchDispatchMode) -> bool:
    return isinstance(mode, _streams.PhiloxMode) or (isinstance(mode, RandomMode) and mode.handler is handle)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Run code that draws nothing without looking for random operators in it, as `local_batch` otherwise does.

    Looking takes some microseconds per operator, and a compiler refuses to run meanwhile. Random operators on DTensors
    still draw their part of the batch; those on plain tensors draw as if there were no other ranks, in torch's stream,
    unless `watched` is around them. Nothing changes where somebody else watches operators, too: ask `is_watched_alone`
    where that matters.

    Example:
        >>> with random.local_batch(mesh["dp"]), extension.unwatched():    # doctest: +SKIP
        ...     hidden = compiled_layer(hidden)
    """
    if not is_watched_alone():
        yield
        return
    modes = tuple(_torch.dispatch_modes())
    token = TAKEN_OFF.set(modes)
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            mode.__enter__()
        TAKEN_OFF.reset(token)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Look for random operators again, inside of `unwatched`; nothing changes elsewhere.

    For operators of one's own that compiled code calls, and that draw.

    Example:
        >>> with random.local_batch(mesh["dp"]), extension.unwatched():    # doctest: +SKIP
        ...     with extension.watched():
        ...         torch.rand(3)                                       # this rank's part of what one device draws
    """
    if not (modes := TAKEN_OFF.get()):
        yield
        return
    token = TAKEN_OFF.set(())
    try:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            yield
    finally:
        TAKEN_OFF.reset(token)


def _nested(declared: BatchWindow, outer: Windows) -> Windows:
    """Return all windows, innermost first; those without ranks are micro-batches and stay in front."""
    micro = () if not declared.ranks else tuple(each for each in outer if not each.ranks)
    return (*micro, declared, *outer[len(micro) :])


@contextlib.contextmanager
def _in_state(declared: BatchWindow) -> Iterator[None]:
    """Note the window in the state of the stream "philox", where a recomputation finds it.

    A recomputation may enter again a context that the state already knows.
    """
    if _streams.current() != _streams.PHILOX or declared in (known := _state.current_windows()):
        yield
        return
    _state.swap_windows(_nested(declared, known))
    try:
        yield
    finally:
        _state.swap_windows(known)


class MicroBatches:
    """The micro-batches of one step; see :func:`vescale.dtensor.random.micro_batches`."""

    def __init__(self, count: int):
        self.count = count
        self._start = _streams.Snapshot.take()
        self._states: dict[int, _streams.Snapshot] = {}
        self._running: int | None = None

    @contextlib.contextmanager
    def __call__(self, index: int) -> Iterator[None]:
        """Run as micro-batch ``index``: at its first draw, or where it was left."""
        if not 0 <= index < self.count:
            raise IndexError(f"there are {self.count} micro-batches, no number {index}")
        if self._running is not None:
            raise RuntimeError(f"micro-batch {index} was entered inside micro-batch {self._running}")
        self._running = index
        outside = _streams.Snapshot.take()
        self._resume(self._states.get(index, self._start), outside)
        try:
            with window(BatchWindow(index, self.count)) if self.count > 1 else contextlib.nullcontext():
                yield
        finally:
            self._states[index] = _streams.Snapshot.take()
            outside.restore()
            self._running = None

    def _resume(self, state: _streams.Snapshot, outside: _streams.Snapshot) -> None:
        state.restore()
        if _streams.current() == _streams.PHILOX:  # with the windows around this call
            torch.set_rng_state(_state.write(_state.read(state.generator), outside.generator))

    def finish(self) -> None:
        """Leave the generators where one device leaves them after the whole batch."""
        if not self._states:
            return
        self._states[max(self._states)].restore()
        if self._start.active == _streams.PHILOX:
            positions = [_state.read(state.generator) for state in self._states.values()]
            torch.set_rng_state(_state.write(max(positions), self._start.generator))  # the one furthest on
