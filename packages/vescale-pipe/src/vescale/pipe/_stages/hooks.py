"""Forward hooks that report the calls of this rank's units to the frame."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .._run.frame import Call
from .._run.inside import InnerCall, InnerCalls
from .._run.mode import RunState
from .._run.tree import flatten, map_leaves
from .._run.values import Placeholder, unwrap


@contextlib.contextmanager
def hooked_units(units: Mapping[str, tuple[int, nn.Module]], state: RunState) -> Iterator[None]:
    """Trace the calls of this rank's units inside this context; each comes with its stage.

    Hooks are registered again for each step, so they run before all other pre-hooks and after all other hooks.
    """
    handles = []
    for fqn, (stage, unit) in units.items():
        hooks = _UnitHooks(fqn, state, stage)
        handles.append(unit.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True))
        handles.append(unit.register_forward_hook(hooks.after))
        handles.append(unit.register_forward_hook(hooks.left, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _UnitHooks:
    """Begin and finish the event of a unit's call."""

    def __init__(self, fqn: str, state: RunState, stage: int) -> None:
        self._fqn = fqn
        self._state = state
        self._stage = stage
        self._call: Call | None = None
        self._inside: InnerCalls | None = None
        self._depth = 0  # of the calls of the unit inside its own, as those that record it as a static program

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        mode = self._state.mode
        if mode is None or mode.unit is not None:  # recomputation in the backward, or a call from inside a unit
            self._depth += mode is not None and mode.unit == self._fqn
            return _unwrapped(args, kwargs, self._stage)
        with mode.paused():
            self._call = mode.frame.begin(self._fqn, *flatten((args, kwargs)), owner=self._stage)
            inputs = self._call.inputs
        if mode.frame.notes_inside(self._call):
            self._inside = InnerCalls(module, lambda: not self._depth)
        mode.enter_unit(self._fqn)
        return inputs

    def after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        del args
        mode, call = self._state.mode, self._call
        if mode is None or call is None or mode.unit != self._fqn or self._depth:
            return None
        self._call = None
        inside = self._no_longer_inside()
        mode.leave_unit()
        with mode.paused():
            result = mode.frame.finish(call, module, output, is_operator=False, inside=inside)
        return None if result is output else result

    def left(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Note the end of a call from inside, also of one that raises."""
        del module, args, output
        if self._depth:
            self._depth -= 1
        else:
            self._no_longer_inside()

    def _no_longer_inside(self) -> list[InnerCall]:
        inside, self._inside = self._inside, None
        if inside is None:
            return []
        inside.close()
        return inside.noted


def _unwrapped(args: tuple, kwargs: dict, stage: int) -> tuple[tuple, dict] | None:
    leaves, _ = flatten((args, kwargs))
    if not any(isinstance(leaf, Placeholder) for leaf in leaves):
        return None
    args, kwargs = map_leaves(lambda leaf: unwrap(leaf, stage), (args, kwargs))
    return args, kwargs
