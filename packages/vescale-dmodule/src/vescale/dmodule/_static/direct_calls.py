"""Boundaries without hooks: while a program is open, the modules that have one are called directly.

``nn.Module`` takes a slow way through a call as soon as a module has hooks, and a boundary is a hook. So while a
program runs on local tensors, a call of a module whose only hooks are its boundaries is this::

    module(x)    recorded conversion of x    module.forward    recorded conversion of the result

Values that are not one plain tensor go through the hooks of the boundary all the same. A module that somebody else has
hooked takes the ordinary way; every call asks. So does the whole program while a profiler runs or a report is open.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import contains, setitem
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .. import _torch
from .._boundary.hooks import InputBoundary, OutputBoundary

if TYPE_CHECKING:
    from .program import StaticProgram

__all__ = ["DirectCalls"]


class DirectCalls:
    """The direct calls of the parts of a program, for the findings that it runs by.

    Args:
        program: the program; its own module is called from outside, and keeps its hooks.
    """

    def __init__(self, program: StaticProgram):
        self._tables: list[dict[str, object]] = []
        self._calls: list[Callable] = []
        self._is_put = False
        for name, module in program.modules.items():
            hooks = None if module is program.module or program.is_in_region(name) else _boundaries(module)
            if hooks is not None and _torch.DIRECT_CALL not in vars(module):
                self._tables.append(vars(module))
                self._calls.append(_call(program.steps, module, *hooks))

    def put(self) -> None:
        """Call the modules directly from now on."""
        if _torch.has_global_hooks() or any(map(contains, self._tables, repeat(_torch.DIRECT_CALL))):
            return
        self._is_put = True
        _torch.for_each(setitem, self._tables, repeat(_torch.DIRECT_CALL), self._calls)

    def take_back(self) -> None:
        """Call them as usual again; nothing if they are."""
        if self._is_put:
            self._is_put = False
            _torch.for_each(dict.pop, self._tables, repeat(_torch.DIRECT_CALL), repeat(None))


def _boundaries(module: nn.Module) -> tuple[InputBoundary | None, OutputBoundary | None] | None:
    """Return the hooks of a module, at most one at each end; None if it has others or none."""
    before, after, *others = _torch.module_hook_tables(module)
    if any(others) or len(before) > 1 or len(after) > 1 or not (before or after):
        return None
    entry, leave = next(iter(before.values()), None), next(iter(after.values()), None)
    is_ours = type(entry) in (InputBoundary, type(None)) and type(leave) in (OutputBoundary, type(None))
    return (entry, leave) if is_ours else None


def _call(
    steps: dict[str, dict], module: nn.Module, entry: InputBoundary | None, leave: OutputBoundary | None
) -> Callable:
    before, after, *others = _torch.module_hook_tables(module)
    pre_backward, backward = others
    num_hooks, ordinary = len(before) + len(after), _torch.ordinary_call(module)
    position, entering = _entering(steps, entry)
    leaving = {} if leave is None else steps.setdefault(leave.where, {})

    def call(*args: object, **kwargs: object) -> object:
        if len(before) + len(after) != num_hooks or backward or pre_backward:
            return ordinary(*args, **kwargs)
        if entry is not None:
            value = args[position] if len(args) > position else None
            step = entering.get(value.shape) if type(value) is Tensor else None
            if step is None:
                args, kwargs = entry(module, args, kwargs)
            else:
                args = (*args[:position], step(value), *args[position + 1 :])
        output = module.forward(*args, **kwargs)
        if leave is None:
            return output
        step = leaving.get(output.shape) if type(output) is Tensor else None
        return leave(module, args, output) if step is None else step(output)

    return call


def _entering(steps: dict[str, dict], entry: InputBoundary | None) -> tuple[int, dict]:
    """Return the position of the only planned argument of a module and its conversions; none if there are several."""
    if entry is None or entry.simple is None or len(entry.simple) != 1:
        return 0, {}
    position, _, placements, where = entry.simple[0]
    return position, steps.setdefault(where, {}) if type(placements) is tuple else {}
