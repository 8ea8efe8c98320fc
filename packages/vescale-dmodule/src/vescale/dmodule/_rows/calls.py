"""The calls of a module that data-parallel ranks make together: each new one is recorded before it runs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import exact_num_blocks

from .. import _torch
from .._boundary.values import describe_value
from .._static.recording.compare import maxima
from .joint import JointRecorder, OwnError
from .values import WAY_OUT, num_rows
from .watched_hooks import HookWatch

__all__ = ["JointCalls", "calls_of"]

logger = logging.getLogger("vescale.dmodule")

R = TypeVar("R")

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

ATTRIBUTE = "_vescale_rows"  # of the module

WARNS_AT = 32  # signatures after which a warning says that shapes keep changing


class JointCalls(ABC, Generic[R]):
    """Hooks of a module whose calls the data-parallel ranks make together, each with its rows.

    They concern calls in training mode with gradients. Other calls run as they are, and so do calls that a function
    mode or a transform sees, as in a pipeline, whose values may stand for those of others.

    Args:
        module: the module.
        mesh: 1-D, the data-parallel ranks in the order of their rows; None for a copy of the module, which runs as it
            is.
        meet: bound method, called with a text before a recording, in which all ranks must take part; held weakly.

    Attributes:
        recorded: by signature of a call; None where nothing mixes rows.
        is_uneven: whether ranks may have different numbers of rows. They compare them in every call then, and calls
            with different numbers run as they are.
        scales_sums: whether a loss that is a sum over rows is returned as many times as there are ranks, whose mean
            then is the sum; a caller that knows of it switches it off.
    """

    recorder: JointRecorder[R]
    runs_on_rows = True  # whether what code sees in backward are gradients of this rank's rows

    def __init__(self, module: nn.Module, mesh: DeviceMesh | None, *, meet: Callable[[str], None] | None):
        self.module, self.mesh = module, mesh
        self._meet = None if meet is None else weakref.WeakMethod(meet)
        self.recorded: dict[Hashable, R | None] = {}
        self.is_uneven = self.is_off = False
        self._depth = 0  # calls of the module that are running
        self._failure: RuntimeError | None = None  # of a recording of the call in progress, which should fail itself
        self._hooks_of_backward = HookWatch(module)
        self._first_call = contextlib.ExitStack()  # open during the first call of a signature
        self._dropouts = [part for part in module.modules() if isinstance(part, _DROPOUTS)]

    def __reduce__(self) -> object:
        return _of_copy, (type(self),)  # which runs as it is

    def attach(self) -> None:
        """Hook the module, outside of all hooks that it has."""
        vars(self.module)[ATTRIBUTE] = self
        self.module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self.leave, always_call=True)

    @property
    @abstractmethod
    def covers_rows(self) -> bool:
        """Whether what runs now has the results of all rows: draws, statistics."""

    @abstractmethod
    def islands(self) -> dict[str, str]:
        """Return the operators that run on the rows of all ranks, and what each communicates in a forward."""

    def _mixes_rows(self, recorded: R | None) -> bool:
        """Return whether a recorded call has other results on this rank's rows alone."""
        return recorded is not None

    @abstractmethod
    def _open(self, recorded: R | None) -> None:
        """Begin a call on this rank's rows with what is recorded of it; None to run it as it is."""

    @abstractmethod
    def _open_exactly(self, args: tuple, kwargs: dict) -> None:
        """Begin a call inside of ``vescale.dtensor.exact``: all of it runs on the rows of all ranks."""

    @abstractmethod
    def _close(self, result: object) -> object:
        """End a call; return its result for the caller, None to leave it. ``result`` is None if it raised."""

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begin a call: record it if its signature is new."""
        if self._meet is None:
            return
        if torch.compiler.is_compiling():
            self._begin_compiled(args, kwargs)
            return
        if self._depth and not _torch.is_in_own_forward(module):  # an interrupted call
            self._depth = 0
            self._first_call.close()
            self._close(None)
        self._depth += 1
        if self._depth == 1 and not self.recorder.is_running:
            self._begin(args, kwargs)

    def _begin(self, args: tuple, kwargs: dict) -> None:
        recorded = self._failure = None
        if exact_num_blocks() is not None:
            self._open_exactly(args, kwargs)
            return
        if self.module.training and torch.is_grad_enabled() and not (self.is_off or _torch.is_traced()):
            signature, rows = self._signature(args, kwargs), num_rows(args, kwargs) if self.runs_on_rows else None
            is_new = signature not in self.recorded
            if self.is_uneven:
                is_even, is_new = self._meet_uneven(num_rows(args, kwargs), is_new=is_new)
                if not is_even:
                    self._open(None)
                    return
            if is_new:
                try:
                    self.recorded[signature] = self._record(args, kwargs)
                except OwnError as raised:
                    self._failure = raised.error
                self._warn_of_many()
                self._hooks_of_backward.refresh()
                registrations = self._hooks_of_backward.registrations(self.recorder.known_hooks, rows)
                self._first_call.enter_context(registrations)
            recorded = self.recorded.get(signature)
            self._hooks_of_backward.begin(rows)
        self._open(recorded)

    @torch.compiler.disable
    def _begin_compiled(self, args: tuple, kwargs: dict) -> None:
        """Record a call that ``torch.compile`` compiles together with the code around it.

        Raises:
            RuntimeError: on every rank, if it mixes rows, since compiled code knows this rank's rows alone.
        """
        if self.recorder.is_running:
            return
        self._depth += 1
        try:
            self._begin(args, kwargs)
            mixes = any(map(self._mixes_rows, self.recorded.values()))
        finally:
            self._depth -= 1
            self._first_call.close()
            self._close(None)
        if mixes:
            found = "; ".join(self.islands()) or "random numbers that are not drawn for the rows on dim 0"
            raise RuntimeError(
                f"expected that {type(self.module).__name__} treats every row alone, because the DDP around it is "
                f"compiled, and compiled code knows this rank's rows alone, got {found}; call it uncompiled, or, "
                f"{WAY_OUT}"
            )

    def _meet_uneven(self, rows: int | None, *, is_new: bool) -> tuple[bool, bool]:
        """Return whether all ranks have the same number of rows, and whether any has a new signature.

        Raises:
            RuntimeError: on every rank, if ranks have different numbers, and a call that mixes rows has been recorded.
        """
        rows = -1 if rows is None else rows
        most, least, is_new_anywhere = maxima([rows, -rows, float(is_new)], self.mesh)
        if most != -least and any(map(self._mixes_rows, self.recorded.values())):
            raise RuntimeError(
                f"expected the same number of rows on all ranks, since {type(self.module).__name__} mixes rows "
                f"(DDP.islands()), got {-least:.0f} to {most:.0f}; {WAY_OUT}"
            )
        return most == -least, bool(is_new_anywhere)

    def leave(self, _module: nn.Module, _args: tuple, result: object) -> object:
        """End a call. ``result`` is None if it raised."""
        if not self._depth or torch.compiler.is_compiling():
            return None
        self._depth -= 1
        if not self._depth:
            self._first_call.close()
        if not self._depth and self._failure is not None:
            failure, self._failure = self._failure, None
            if result is not None:  # it fails on the rows of other ranks
                raise failure
        return None if self._depth or self.recorder.is_running else self._close(result)

    # in compiled code a call is not recorded
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"

    def _signature(self, args: tuple, kwargs: dict) -> Hashable:
        device = self.mesh.device_type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return dtype, tuple(part.p for part in self._dropouts), tuple(map(describe_value, args)), describe_value(kwargs)

    def _record(self, args: tuple, kwargs: dict) -> R | None:
        meet, depth = self._meet(), self._depth
        if meet is None:
            return None  # without its DDP the module is alone
        name = type(self.module).__name__
        meet(f"the first call of {name} with new shapes or arguments, which all ranks make together")
        self._depth = 0
        try:
            return self.recorder.record(args, kwargs)
        finally:
            self._depth = depth

    def _warn_of_many(self) -> None:
        if len(self.recorded) == WARNS_AT:
            logger.warning(
                "%s has been called with %d different shapes or arguments, and each first call runs it several times "
                "more; pad batches to few lengths, and pass numbers that change as tensors",
                type(self.module).__name__,
                WARNS_AT,
            )


def calls_of(module: nn.Module) -> JointCalls | None:
    """Return the calls of a module that data-parallel ranks make together; None if it has none."""
    calls = vars(module).get(ATTRIBUTE)
    return calls if calls is not None and calls.module is module else None


def _of_copy(kind: type[JointCalls]) -> JointCalls:
    return kind(nn.Module(), None, meet=None)
