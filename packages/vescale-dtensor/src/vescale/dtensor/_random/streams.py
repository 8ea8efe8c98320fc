"""Switching streams, and random operators on plain tensors.

============ =============================================== ==================================================
stream       numbers                                         equal to
============ =============================================== ==================================================
``torch``    the stock generator's, for the global tensor    the unmodified program on one device
``philox``   a function of (seed, draw, global index)        one device inside ``random.stream("philox")``
============ =============================================== ==================================================

Random operators on DTensors reach ``rules`` through DTensor's own dispatch. Those on plain tensors need a dispatch
mode: `PhiloxMode` in the stream "philox", `RandomMode` in a batch window. `unwatched` takes both off around code that
draws nothing, because a mode costs some microseconds per operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .._operators.attention import is_fused_without_dropout
from .._torch import dispatch
from .global_position import WINDOWS, BatchWindow
from .philox import state as philox_state
from .rules import handle, is_enabled, philox_handle, runs_stock
from .state import PHILOX, STREAMS, TORCH, Snapshot, current

__all__ = [
    "PhiloxMode",
    "RandomMode",
    "is_watched",
    "is_watched_alone",
    "set_stream",
    "stream",
    "unwatched",
    "watched",
]


# ------------------------------------------------------------------------------------------------- switching


@contextlib.contextmanager
def stream(name: str, *, seed: int | None = None) -> Iterator[None]:
    """See :func:`vescale.dtensor.random.stream`."""
    _check_name(name)
    if seed is None and name == STREAMS.active:
        yield
        return
    mode = PhiloxMode() if name == PHILOX and STREAMS.active != PHILOX else contextlib.nullcontext()
    with STREAMS.opened(), _continued(name) if seed is None else _seeded(name, seed), mode:
        yield


def set_stream(name: str, *, seed: int | None = None) -> None:
    """See :func:`vescale.dtensor.random.set_stream`."""
    _check_name(name)
    if STREAMS.num_open > STREAMS.num_program:
        raise RuntimeError("set_stream is for the whole program: call it outside of random.stream and random.fork")
    begun = None if seed is None else philox_state.started(seed)
    STREAMS.program.close()
    STREAMS.num_program = 0
    if name == PHILOX:
        if begun is not None:
            STREAMS.parked[PHILOX] = begun
        STREAMS.program.enter_context(stream(PHILOX))
        STREAMS.num_program = 1
    elif seed is not None:
        torch.manual_seed(seed)


def _check_name(name: str) -> None:
    if name not in (TORCH, PHILOX):
        raise ValueError(f'expected a random stream "torch" or "philox", got {name!r}')


@contextlib.contextmanager
def _seeded(name: str, seed: int) -> Iterator[None]:
    """Start a stream with a seed, and drop it at the end."""
    begun = philox_state.started(seed)
    before = Snapshot.take()
    STREAMS.active = name
    try:
        if name == TORCH:
            torch.manual_seed(seed)
        else:
            torch.set_rng_state(begun)
            philox_state.swap_windows(WINDOWS.get())
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def _continued(name: str) -> Iterator[None]:
    """Continue a stream from where it was left, and park it at the end."""
    outer = STREAMS.active
    _exchange(outer, name)
    try:
        if name == PHILOX:
            philox_state.swap_windows(WINDOWS.get())
        yield
    finally:
        _exchange(name, outer)


def _exchange(leave: str, enter: str) -> None:
    parked = STREAMS.parked_state(enter)
    STREAMS.parked[leave] = torch.get_rng_state()
    torch.set_rng_state(parked)
    del STREAMS.parked[enter]
    STREAMS.active = enter


# ------------------------------------------------------------------------------------------------- dispatch modes


class PhiloxMode(dispatch.TorchDispatchMode):
    """Run random operators by the rules of the stream "philox" while it is in force."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not dispatch.is_random(func) and not (torch.is_inference_mode_enabled() and dispatch.is_composite(func)):
            return func(*args, **kwargs)
        if current() != PHILOX or runs_stock() or not is_enabled():
            return func(*args, **kwargs)
        if dispatch.is_composite(func):
            with self:  # in inference mode, dropout and others are one operator: decompose it
                return func.decompose(*args, **kwargs)
        if not dispatch.is_random(func) or is_fused_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        return philox_handle(func, args, kwargs)


class RandomMode(dispatch.TorchDispatchMode):
    """Pass random operators on plain tensors to a handler; all other operators run unchanged.

    Attributes:
        windows: the batch windows in force. Autograd takes the mode along to its own threads, which run the backward on
            an accelerator, but not the context of Python, which holds the windows elsewhere.
    """

    def __init__(self, handler: dispatch.Handler):
        super().__init__()
        self.handler = handler
        self.windows: tuple[BatchWindow, ...] = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.windows or WINDOWS.get():
            return self._run(func, args, kwargs or {})
        token = WINDOWS.set(self.windows)
        try:
            return self._run(func, args, kwargs or {})
        finally:
            WINDOWS.reset(token)

    def _run(self, func, args, kwargs):
        if dispatch.is_composite(func) and (torch.is_inference_mode_enabled() or dispatch.is_random(func)):
            with self:  # below autograd, dropout and others are one operator: decompose it
                return func.decompose(*args, **kwargs)
        if not dispatch.is_random(func) or runs_stock() or not is_enabled():
            return func(*args, **kwargs)
        if is_fused_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)  # they reach the same rules by their own dispatch
        return self.handler(func, args, kwargs)


# ------------------------------------------------------------------------------------------------- watching

# The modes that `unwatched` has removed around the running code, outermost first.
TAKEN_OFF: ContextVar[tuple[dispatch.TorchDispatchMode, ...]] = ContextVar("vescale_modes_taken_off", default=())


def is_watched() -> bool:
    """Return whether random operators on plain tensors are intercepted here; `unwatched` does not change the answer.

    They are intercepted in `local_batch`, in `micro_batches` and in the stream "philox".

    Example:
        >>> is_watched()
        False
    """
    return bool(TAKEN_OFF.get()) or any(map(_is_ours, dispatch.dispatch_modes()))


def is_watched_alone() -> bool:
    """Return whether operators on plain tensors are intercepted as in `is_watched`, and by no other dispatch mode."""
    modes = dispatch.dispatch_modes()
    return bool(modes) and all(map(_is_ours, modes))


def _is_ours(mode: dispatch.TorchDispatchMode) -> bool:
    return isinstance(mode, PhiloxMode) or (isinstance(mode, RandomMode) and mode.handler is handle)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Run code without random operators outside the dispatch mode of `local_batch` and the other contexts.

    The mode takes some microseconds per operator, and a compiler refuses to run inside it. Random operators on DTensors
    still draw their part of the batch. Those on plain tensors draw from torch's stream as on a single rank, unless they
    run inside `watched`. If another dispatch mode is active, too, this context changes nothing: `is_watched_alone`
    returns whether there is none.

    Example:
        >>> with random.local_batch(mesh["dp"]), extension.unwatched():    # doctest: +SKIP
        ...     hidden = compiled_layer(hidden)
    """
    if not is_watched_alone():
        yield
        return
    modes = tuple(dispatch.dispatch_modes())
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
    """Intercept random operators again, inside `unwatched`; nothing changes elsewhere.

    For random operators in custom operators that compiled code calls.

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
