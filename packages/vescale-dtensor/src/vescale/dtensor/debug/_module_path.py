"""Which module of a model an operator belongs to, in the forward pass and in the backward pass.

In the forward pass, hooks track the path of the running modules. They add nothing to autograd's graph. The backward
pass uses autograd's sequence numbers of operators. Each call of a module covers an interval of them:

    module       block          block.mlp       block
    numbers      0 1 2 3        4 5 6           7 8
    backward of operator 5 -> block.mlp

The accumulation of a parameter's gradient has the path of that parameter.
"""

from __future__ import annotations

import bisect
import contextlib

from torch import nn

from .._torch.debugging import backward_position, sequence_number

__all__ = ["ModulePath"]

ROOT = "(root)"


class ModulePath:
    """Track which module of ``model`` runs while the context is open. Without a model the path is always empty.

    Args:
        model: the module itself, not a wrapper that prefixes its names.
    """

    def __init__(self, model: nn.Module | None):
        self.model = model
        self._running: list[str] = []
        self._numbers: list[int] = []  # ascending; from number i on, the operators belong to path i
        self._paths: list[str] = []
        self._hooks = contextlib.ExitStack()
        self._parameters: dict[int, str] = {}

    def __enter__(self) -> ModulePath:
        if self.model is not None:
            self._parameters = {id(p): name for name, p in self.model.named_parameters()}
            for name, module in self.model.named_modules():
                self._install(module, name or ROOT)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.close()
        self._running.clear()

    def now(self) -> tuple[str, str]:
        """Return the path of the running module in this thread, and ``"forward"`` or ``"backward"``."""
        backward = backward_position()
        if backward is None:
            return self._current(), "forward"
        if self._running:  # recomputation
            return self._current(), "backward"
        if backward.sequence_number is None:
            return self._parameters.get(id(backward.variable), ""), "backward"
        position = bisect.bisect_right(self._numbers, backward.sequence_number) - 1
        return (self._paths[position] if position >= 0 else ""), "backward"

    def _current(self) -> str:
        return self._running[-1] if self._running else ""

    def _install(self, module: nn.Module, name: str) -> None:
        # run first on entry and last on exit, so that the module's other hooks count as part of the module
        before = module.register_forward_pre_hook(lambda *_: self._enter(name), prepend=True)
        after = module.register_forward_hook(lambda *_: self._leave(name), always_call=True)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)

    def _enter(self, name: str) -> None:
        self._running.append(name)
        self._mark()

    def _leave(self, name: str) -> None:
        while self._running and self._running.pop() != name:  # modules that an exception ended early
            pass
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(sequence_number())
        self._paths.append(self._current())
