"""Boundaries without hooks: while a program is open, modules with boundaries are called directly.

``nn.Module.__call__`` takes a slow path for a module with hooks, and a boundary is a hook. While a program runs on
local tensors, a call of a module whose only hooks are its boundaries runs three functions::

    module(x)    recorded conversion of x    module.forward    recorded conversion of the result

A value that is not one plain tensor goes through the hooks of the boundary. Modules with user hooks use the normal
``__call__``; this is checked on each call. All modules use it while a profiler runs or a report is open.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .. import _torch
from .._boundary.hooks import InputBoundary, OutputBoundary
from .._execution.patch import ModulePatch
from .parts import Parts

__all__ = ["Steps", "direct_calls"]

Steps = dict[str, dict[tuple[int, ...], Callable[[Tensor], Tensor]]]
"""Conversions of boundaries, by boundary and local shape."""


def direct_calls(parts: Parts, steps: Steps) -> ModulePatch:
    """Return the patch that calls modules directly, except the root of the program, whose hooks open the program.

    Args:
        parts: of the program.
        steps: the recorded conversions; later additions to it take effect.
    """
    rows = []
    for name, module in parts.modules.items():
        hooks = None if module is parts.module or parts.is_eager(name) else _boundaries(module)
        if hooks is not None and _torch.DIRECT_CALL not in vars(module):
            rows.append((vars(module), _torch.DIRECT_CALL, _call(steps, module, *hooks)))
    return ModulePatch(rows)


def _boundaries(module: nn.Module) -> tuple[InputBoundary | None, OutputBoundary | None] | None:
    """Return the input and the output boundary of a module; None if it has no boundary or any other hook."""
    before, after, *others = _torch.module_hook_tables(module)
    if any(others) or len(before) > 1 or len(after) > 1 or not (before or after):
        return None
    entry, leave = next(iter(before.values()), None), next(iter(after.values()), None)
    is_ours = type(entry) in (InputBoundary, type(None)) and type(leave) in (OutputBoundary, type(None))
    return (entry, leave) if is_ours else None


def _call(steps: Steps, module: nn.Module, entry: InputBoundary | None, leave: OutputBoundary | None) -> Callable:
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


def _entering(steps: Steps, entry: InputBoundary | None) -> tuple[int, dict]:
    """Return the position of the only planned argument of a module and its conversions; empty if it has several."""
    if entry is None or entry.simple is None or len(entry.simple) != 1:
        return 0, {}
    position, _, placements, where = entry.simple[0]
    return position, steps.setdefault(where, {}) if type(placements) is tuple else {}
