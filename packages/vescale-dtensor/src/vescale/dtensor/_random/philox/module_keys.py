"""Number draws per module instead of per program, by hooks on the modules.

The number of a draw then does not depend on what other modules have drawn before: pipeline stages that run on different
ranks, in any order and split, draw the masks of the undivided model.
"""

from __future__ import annotations

import threading

from torch import nn

from .. import streams as _streams
from . import state as _state

__all__ = ["ModuleKeys"]

_QUIET = {
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Conv1d,
    nn.Conv2d,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Softmax,
    nn.Tanh,
}
"""Modules that draw nothing: hooks on them would only cost time."""


class ModuleKeys:
    """Hooks that tell the stream which module runs; see :func:`vescale.dtensor.random.key_by_module`."""

    def __init__(self, model: nn.Module, prefix: str):
        self._running = threading.local()
        self._handles = []
        for name, module in model.named_modules():
            if type(module) in _QUIET:
                continue
            number = _state.module_id(".".join(filter(None, (prefix, name))))
            self._handles.append(module.register_forward_pre_hook(self._enter(number), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, number: int):
        def enter(_module: nn.Module, _args: tuple) -> None:
            in_force = _streams.current() == _streams.PHILOX
            self._outer().append(_state.swap_module(number) if in_force else None)

        return enter

    def _leave(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        outer = self._outer().pop()
        if outer is not None and _streams.current() == _streams.PHILOX:
            _state.swap_module(outer)

    def _outer(self) -> list[int | None]:
        """Return, for each keyed module that runs in this thread, the module that it was called from."""
        if not hasattr(self._running, "outer"):
            self._running.outer = []
        return self._running.outer

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
