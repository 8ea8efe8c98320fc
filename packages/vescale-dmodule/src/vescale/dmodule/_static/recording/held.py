"""What hooks of modules store something in, restored after a dry run.

A hook runs in dry runs, too, as it may change what the module computes. What it stores is for the call alone::

    def hook(module, args, output):
        stored.append(output)     a list, set or dict: of a closure, a global or a context variable, or within one
        count += 1                a variable of a closure, or a global
        self.last = output        an attribute of the object whose method it is
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CellType

from torch import nn

BUILTIN = (list, set, dict)
DEPTH = 3  # of containers within others


class Held:
    """Variables and containers that hooks can change.

    Args:
        hooks: of modules.
        others: further lists, sets and dicts; other values are ignored.
    """

    def __init__(self, hooks: Iterable[Callable], others: Iterable[object] = ()):
        self._cells: list[tuple[CellType, object]] = []
        self._names: list[tuple[dict[str, object], dict[str, object]]] = []
        values = [*others, *contextvars.copy_context().values()]
        for hook in hooks:
            values += self._variables_of(hook)
        self._contents = [(each, copy.copy(each)) for each in _containers(values, DEPTH)]

    def _variables_of(self, hook: Callable) -> Iterator[object]:
        while isinstance(hook, functools.partial):
            yield from (*hook.args, *hook.keywords.values())
            hook = hook.func
        if str(getattr(hook, "__module__", "")).startswith("vescale."):
            return  # ours watch the dry run
        owner = getattr(hook, "__self__", None if hasattr(hook, "__code__") else hook)
        if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module | type):
            yield from self._named(vars(owner), list(vars(owner)))
        function = getattr(hook, "__func__", hook)
        if not hasattr(function, "__code__"):
            function = type(hook).__call__
        if hasattr(function, "__code__"):
            yield from function.__defaults__ or ()
            yield from self._named(function.__globals__, function.__code__.co_names)
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # nothing is in it yet
                    self._cells.append((cell, cell.cell_contents))
                    yield cell.cell_contents

    def _named(self, space: dict[str, object], names: Iterable[str]) -> list[object]:
        found = {name: space[name] for name in names if name in space}
        self._names.append((space, found))
        return list(found.values())

    def restore(self) -> None:
        """Give variables the values that they had, and containers the items."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for space, found in self._names:
            for name, value in found.items():
                if space.get(name) is not value:
                    space[name] = value
        for each, before in self._contents:
            if len(each) != len(before):
                each.clear()
                (each.extend if isinstance(each, list) else each.update)(before)


def _containers(values: Iterable[object], depth: int) -> Iterator[list | set | dict]:
    for value in values:
        if type(value) in BUILTIN:
            yield value
            if depth:
                yield from _containers(value.values() if isinstance(value, dict) else value, depth - 1)
