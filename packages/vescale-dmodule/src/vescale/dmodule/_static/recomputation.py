"""What backward repeats: activation checkpointing runs a part of a program again, after the program is closed.

A checkpoint of torch remembers the program that was open when it was made: its layouts, and the operators of the
running module that came before (``_execution.surroundings``)::

    forward     OPEN: local code  ->  checkpoint(function)     layouts, position in the operators of its module
    backward    IDLE -> OPEN: function -> IDLE                 with these layouts, from that position on

The function may be a module, the forward of one, whose hooks then do not run, or a method with operators of its own.
Other checkpoints, of a program's own ``autograd.Function``, are seen by hooks of the parts that they call again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import _torch
from .._boundary.hooks import Phase
from .._execution.module_hooks import hook_calls
from .call import Call, State
from .operator_mode import OperatorMode, ProgramCall, active_mode
from .parts import Parts
from .recording.layouts import RecordedLayouts, Recordings

__all__ = ["Recomputation"]

Opened = Callable[[RecordedLayouts], AbstractContextManager]


class Recomputation:
    """Opens a program for what backward repeats.

    Args:
        call: of the program.
        parts: of the program.
        recordings: of the program.
        phase: of the parallelized model.
        opened: makes a context in which the program is open, with some layouts.
    """

    def __init__(self, call: Call, parts: Parts, recordings: Recordings, phase: Phase, opened: Opened):
        self._call, self._parts, self._recordings, self._phase = call, parts, recordings, phase
        self._opened = opened
        self._hooked: dict[str, list[RemovableHandle]] = {}

    # ------------------------------------------------------------------------------------- checkpoints of torch

    def carry(self) -> Callable[[], AbstractContextManager] | None:
        """Return what opens the program again, for a checkpoint that is made while it is open."""
        if not self._phase.local:  # an eager part runs
            return None
        call: ProgramCall = self._call
        mode = active_mode()
        mode = mode if mode is not None and mode.call is call else None
        return functools.partial(self._again, self._call.layouts, mode, 0 if mode is None else mode.position)

    @contextlib.contextmanager
    def _again(self, layouts: RecordedLayouts, mode: OperatorMode | None, position: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._is_closed:
                stack.enter_context(self._opened(layouts))
            if mode is not None:
                stack.enter_context(mode.repeated(position))
            yield

    @property
    def _is_closed(self) -> bool:
        return self._call.state in (State.IDLE, State.CHECKING)

    # ------------------------------------------------------------------------------------------- other checkpoints

    def hook(self, name: str) -> None:
        """Open the program for a part that autograd calls in backward."""
        if name in self._hooked or not name or self._parts.is_eager(name):
            return
        entered: list[contextlib.ExitStack] = []

        def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            entered.append(contextlib.ExitStack())
            is_repeat, recordings, layouts = self._is_closed and _torch.in_backward(), self._recordings, None
            if recordings.recomputes or len(recordings.layouts) > 1:
                if is_repeat:
                    layouts = recordings.of_run(name, args, kwargs)
                else:
                    recordings.note_run(name, args, kwargs, self._call.layouts)
            if is_repeat:
                entered[-1].enter_context(self._opened(layouts or self._call.layouts))

        def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
            if entered:
                entered.pop().close()

        self._hooked[name] = hook_calls(self._parts.modules[name], enter, leave)

    def remove(self) -> None:
        """Remove all hooks."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked.clear()
