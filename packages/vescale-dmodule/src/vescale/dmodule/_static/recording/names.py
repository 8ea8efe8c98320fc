"""Which modules run, by name and by call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ... import _torch
from ..._execution.surroundings import surrounding

__all__ = ["ModuleCall", "Names"]


class ModuleCall(NamedTuple):
    """One call of a module.

    Attributes:
        number: of all calls of modules in order.
        name: of the module.
        is_repeat: whether activation checkpointing repeats an earlier call, in backward.
        begin: number of calls of torch functions before it, if only a function inside of the earlier call is repeated.
    """

    number: int
    name: str
    is_repeat: bool
    begin: int = 0


@dataclass
class Names:
    """Hooks that record which modules are running, and which are recomputed in backward.

    Attributes:
        path: the running calls, outermost first.
        calls: all calls, in order.
        failed: name of the innermost module whose forward raised.
        recomputed: names of the outermost modules that autograd called, or of which it repeated a function.
        position_in: returns the number of calls of torch functions in a running call so far.
    """

    path: list[ModuleCall] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    failed: str = ""
    recomputed: set[str] = field(default_factory=set)
    position_in: Callable[[ModuleCall], int] = lambda call: call.begin

    @property
    def running(self) -> str:
        """Name of the innermost running module."""
        return self.path[-1].name if self.path else ""

    @contextlib.contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Record the calls of some modules while the context is open."""
        handles = []
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with surrounding(self._carry):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self.path.clear()

    def _carry(self) -> Callable[[], AbstractContextManager] | None:
        if not self.path:
            return None
        return functools.partial(self._repeated, self.path[-1].name, self.position_in(self.path[-1]))

    @contextlib.contextmanager
    def _repeated(self, name: str, begin: int) -> Iterator[None]:
        """Repeat a function of a module, in which no hook of it runs."""
        if not self.path:
            self.recomputed.add(name)
        self.path.append(ModuleCall(len(self.calls), name, is_repeat=True, begin=begin))
        self.calls.append(self.path[-1])
        depth = len(self.path)
        try:
            with surrounding(self._carry):
                yield
        finally:
            del self.path[depth - 1 :]

    def _enter(self, name: str) -> Callable:
        def enter(_module: nn.Module, _args: tuple) -> None:
            is_repeat = _torch.in_backward()
            if not self.path and is_repeat:
                self.recomputed.add(name)
            self.path.append(ModuleCall(len(self.calls), name, is_repeat))
            self.calls.append(self.path[-1])

        return enter

    def _leave(self, _module: nn.Module, _args: tuple, output: object) -> None:
        if self.path:
            name = self.path.pop().name
            self.failed = self.failed or (name if output is None else "")
