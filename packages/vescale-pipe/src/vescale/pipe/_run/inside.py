"""Forward hooks of modules inside of units, on every stage.

Hooks may store tensors that code outside of units uses, as models of Hugging Face capture the logits of routers. Such a
module is on one stage. On the others something stands in for it, and has its hooks::

    stage of the unit    gate(x) runs inside of the unit           a hook stores its output r
    other stages         the unit is absent; so is gate            the hook stores a placeholder of r

The stage of the unit notes the calls of modules with hooks, and announces them with the outcome of its call. The
tensors that the unit has made are values then, as its outputs are. Later micro-batches note them if the recorded
forward has used one of them.

A hook that computes cannot do so with placeholders: it does something on its own stage alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._torch import forward_hooks
from .tree import Leaf
from .values import PipelineError

logger = logging.getLogger("vescale.pipe")

# the name of a module in its unit, whether it is before its forward, positional and keyword arguments, the output
InnerCall = tuple[str, bool, tuple, dict[str, Any], Any]


@dataclass(frozen=True)
class Opaque(Leaf):
    """What stands for an argument or output of a module in a unit that is no value: a number, an object."""

    kind: str


class InnerCalls:
    """Notes the calls of modules with hooks inside of a unit, until it is closed.

    Args:
        unit: the unit.
        is_on: whether a call counts; the unit may be tried before it runs.
    """

    def __init__(self, unit: nn.Module, is_on: Callable[[], bool]) -> None:
        self.noted: list[InnerCall] = []
        self._is_on = is_on
        self._handles: list[Any] = []
        for name, module in unit.named_modules():
            if name and (users_hooks(module, before=True) or users_hooks(module, before=False)):
                before = functools.partial(self._note, name, True)
                after = functools.partial(self._note, name, False)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, prepend=True, with_kwargs=True))

    def _note(
        self, name: str, is_before: bool, _module: nn.Module, args: tuple, kwargs: dict, output: Any = None
    ) -> None:
        if self._is_on():
            self.noted.append((name, is_before, args, kwargs, output))

    def close(self) -> None:
        """Note no more."""
        for handle in self._handles:
            handle.remove()


def users_hooks(module: nn.Module, *, before: bool) -> list[tuple[Callable[..., Any], bool]]:
    """Return the hooks before or after a module's forward, other than our own, and whether they get keywords."""
    return [(hook, with_kwargs) for hook, with_kwargs in forward_hooks(module, before=before) if not is_ours(hook)]


def run_hooks(
    module: nn.Module,
    numbers_of: Callable[[Callable[..., Any]], tuple] | None,
    is_before: bool,
    args: tuple,
    kwargs: dict[str, Any],
    output: Any = None,
) -> None:
    """Run the hooks of a module of another stage, or of what stands in for it, with placeholders.

    Args:
        module: what has the hooks.
        numbers_of: returns the numbers that a hook has kept, where this rank runs it once for each of its stages.
        is_before: whether those that run before its forward.
        args: positional arguments.
        kwargs: keyword arguments.
        output: the output.

    Raises:
        PipelineError: a hook changes such a number.
    """
    for hook, with_kwargs in users_hooks(module, before=is_before):
        given = (args, kwargs) if with_kwargs else (args,)
        before = numbers_of and numbers_of(hook)
        try:
            hook(module, *given) if is_before else hook(module, *given, output)
        except Exception as error:  # its own stage raises errors that are no fault of placeholders
            logger.debug("a hook of a module of another stage does nothing here: %s", error)
        if numbers_of and numbers_of(hook) != before:
            raise PipelineError(
                f"a forward hook of {type(module).__name__}: expected one that keeps tensors, since a rank of several "
                "stages runs it once for each stage, got one that changes numbers that it keeps; count in a module "
                "with parameters, or use one stage per rank"
            )


def is_ours(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of veScale's own."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("vescale.")
