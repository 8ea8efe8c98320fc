"""What is around a call of a micro-batch, other than its arguments: contexts of torch and of Python."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._torch import modes, switches
from .values import PipelineError

PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class State:
    """What contexts around a call decide, and it may read: gradients, autocast, context variables.

    Attributes:
        grad: whether gradients are enabled.
        autocast: the device type, whether it is enabled, and the dtype.
        variables: context variables that the code has set, and their values.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    variables: tuple[tuple[ContextVar, Any], ...] = ()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Bring this state about."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            for variable, value in self.variables:
                stack.callback(variable.reset, variable.set(copy.deepcopy(value)))
            yield
            if (name := self.changed()) is not None:
                raise PipelineError(
                    f"expected modules that leave the context variable {name} as it was in an earlier micro-batch, got "
                    "another value; return values that vary between micro-batches as tensors"
                )

    @classmethod
    def present(cls, device_type: str, variables: contextvars.Context) -> State:
        """Return the present one.

        Args:
            device_type: the device for which autocast matters, other than the CPU.
            variables: the context variables as they were before the code ran.
        """
        kinds = dict.fromkeys(("cpu", device_type))
        enabled = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        present = contextvars.copy_context().items()
        own = ((each, value) for each, value in present if variables.get(each) is not value)
        copies = ((each, copy.deepcopy(value) if _is_plain(value) else value) for each, value in own)
        return cls(torch.is_grad_enabled(), tuple(enabled), tuple(copies))

    def refused(self) -> str | None:
        """Return why a call that ran in this state cannot be repeated; None if it can."""
        for variable, value in self.variables:
            if not _is_plain(value):
                return f"code outside of modules sets the context variable {variable.name}"
        if (changed := self.changed()) is not None:
            return f"a call changes the context variable {changed}, which code outside of modules sets"
        return None

    def changed(self) -> str | None:
        """Return the name of a variable that has another value now; None if there is none."""
        return next((variable.name for variable, value in self.variables if variable.get(None) != value), None)


def surroundings() -> dict[str, Any]:
    """Return what contexts around a call decide, other than a `State`."""
    own = [id(mode) for mode in modes() if not type(mode).__module__.startswith("vescale.pipe.")]
    return {"modes": own, **switches()}


def is_of_torch(function: Any) -> bool:
    """Return whether a function is one of torch, and no module."""
    owner = getattr(function, "__self__", None)
    where = function if owner is None else owner  # of an autograd.Function's `apply`
    package = str(getattr(where, "__module__", "torch")).partition(".")[0]
    return package == "torch" and not isinstance(function, nn.Module)


def _is_plain(value: Any) -> bool:
    """Return whether a value is made of plain ones alone, so that a copy does what it does."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return _is_plain([*value, *value.values()])
    return isinstance(value, PLAIN)
