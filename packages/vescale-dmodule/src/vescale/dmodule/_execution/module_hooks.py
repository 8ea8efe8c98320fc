"""Hooks that belong to one parallelized module and not to its copies.

``copy.deepcopy`` of a module copies its hooks. A hook that refers to modules of the original would run the original's
code for the copy. So hooks are registered as :class:`OwnHook`, whose copies do nothing; the copied module installs
hooks of its own at its first call.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["OwnHook", "hook_calls"]


class OwnHook:
    """Calls ``fn``; a deep copy of it does nothing."""

    def __init__(self, fn: Callable):
        self.fn = fn

    def __call__(self, *args: object) -> object:
        return self.fn(*args)

    def __deepcopy__(self, _memo: dict) -> Callable:
        return _nothing


def _nothing(*_args: object) -> None:
    return None


def hook_calls(module: nn.Module, enter: Callable, leave: Callable) -> list[RemovableHandle]:
    """Call ``enter(module, args, kwargs)`` before all other hooks of a call, ``leave(module, args, output)`` after it.

    ``leave`` is also called, with None as the output, when the forward raises.
    """
    return [
        module.register_forward_pre_hook(OwnHook(enter), prepend=True, with_kwargs=True),
        module.register_forward_hook(OwnHook(leave), always_call=True),
    ]
