"""Which modules run, by name and by call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from ... import _torch

__all__ = ["ModuleCall", "Names"]


class ModuleCall(NamedTuple):
    """One call of a module.

    Attributes:
        number: of all calls of modules in order.
        name: of the module.
        is_repeat: whether activation checkpointing repeats an earlier call, in backward.
    """

    number: int
    name: str
    is_repeat: bool


@dataclass
class Names:
    """Hooks that record which modules are running, and which are recomputed in backward.

    Attributes:
        path: the running calls, outermost first.
        calls: all calls, in order.
        failed: name of the innermost module whose forward raised.
        recomputed: names of the outermost modules that autograd called.
    """

    path: list[ModuleCall] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    failed: str = ""
    recomputed: set[str] = field(default_factory=set)

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
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.path.clear()

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
