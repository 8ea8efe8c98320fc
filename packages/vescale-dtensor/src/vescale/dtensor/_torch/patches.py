"""Patches: replace one attribute, table entry or rule of torch, and restore it.

``install`` replaces the present object; ``remove`` restores it. A repeated call changes nothing.
`vescale.dtensor._install` lists all patches of this package.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Partial, _api, _dispatch, _redistribute
from torch.distributed.tensor.parallel import loss as loss_parallel

__all__ = [
    "AttributePatch",
    "ExitPatch",
    "HandlerPatch",
    "LossParallelPatch",
    "Patch",
    "PatchGroup",
    "SafeGlobalsPatch",
    "division_into_partials",
    "dtensor_attribute",
    "global_shape_of_local",
    "handler_table",
    "moves_of_operands",
    "random_factories",
    "redistribution_of_shards",
    "stock_handlers",
    "to_local_backward",
    "torch_version",
]

Op = torch._ops.OpOverload
Handler = Callable[[Op, tuple, dict], object]

ABSENT = object()
"""Stands for an attribute that its owner does not have."""


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class Patch(Protocol):
    """One change of torch that can be undone.

    Attributes:
        place: the replaced attribute or table, as text.
    """

    place: str

    def install(self) -> None:
        """Apply the change."""

    def remove(self) -> None:
        """Restore the original."""

    def is_installed(self) -> bool:
        """Return whether the change is in force."""


# ------------------------------------------------------------------------------------------------- attributes


class AttributePatch:
    """Replace an attribute of some modules or classes.

    Args:
        owners: modules or classes that all refer to the same object under ``name``.
        name: the attribute.
        make: takes the stock attribute (None if there is none) and returns its replacement.
    """

    def __init__(self, owners: Sequence[object], name: str, make: Callable[[object], object]):
        self.owners = owners
        self.name = name
        self.make = make
        self.place = ", ".join(f"{_full_name(owner)}.{name}" for owner in owners)
        self.stock: object = ABSENT  # the raw entry of the owner's dict: a staticmethod object, not its function
        self.new: object = ABSENT

    def install(self) -> None:
        """Replace the attribute."""
        if self.new is not ABSENT:
            return
        first = self.owners[0]
        self.stock = vars(first).get(self.name, ABSENT)
        self.new = self.make(getattr(first, self.name, None))
        for owner in self.owners:
            setattr(owner, self.name, self.new)

    def remove(self) -> None:
        """Put the stock attribute back, or delete the attribute where there was none."""
        if self.new is ABSENT:
            return
        for owner in self.owners:
            if self.stock is ABSENT:
                delattr(owner, self.name)
            else:
                setattr(owner, self.name, self.stock)
        self.new = ABSENT

    def is_installed(self) -> bool:
        """Return whether all owners have the replacement."""
        return self.new is not ABSENT and all(
            inspect.getattr_static(owner, self.name, ABSENT) is self.new for owner in self.owners
        )


class PatchGroup:
    """Several patches that are installed and removed as one.

    Args:
        place: what they replace, as text.
        patches: the patches.
    """

    def __init__(self, place: str, patches: Sequence[Patch]):
        self.place = place
        self.patches = list(patches)

    def install(self) -> None:
        """Apply all changes."""
        for patch in self.patches:
            patch.install()

    def remove(self) -> None:
        """Undo all changes."""
        for patch in reversed(self.patches):
            patch.remove()

    def is_installed(self) -> bool:
        """Return whether all changes are in force."""
        return all(patch.is_installed() for patch in self.patches)


def _full_name(owner: object) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__


def dtensor_attribute(name: str, make: Callable[[object], object]) -> AttributePatch:
    """Return the patch of a method or property of DTensor."""
    return AttributePatch((DTensor,), name, make)


def redistribution_of_shards(make: Callable[[Callable], Callable]) -> AttributePatch:
    """Return the patch of the one function through which torch redistributes shards, wherever torch refers to it.

    It takes ``(local tensor, current spec, target spec, **options)`` and returns the new local tensor.
    """
    return AttributePatch((_redistribute, _api, _dispatch), "redistribute_local_tensor", make)


def global_shape_of_local(make: Callable[[Callable], Callable]) -> AttributePatch:
    """Return the patch of the function that guesses a global shape: ``(local tensor, mesh, placements)``."""
    return AttributePatch((_api,), "compute_global_tensor_info", make)


def to_local_backward(needed: Callable, backward: Callable) -> AttributePatch:
    """Return the patch of the backward of ``to_local``.

    Args:
        needed: ``needed(placements)`` returns whether ``backward`` takes the place of torch's.
        backward: ``backward(gradient, spec, placements)`` returns the gradient of the DTensor.
    """

    def make(stock: Callable) -> staticmethod:
        def chosen(ctx, gradient):
            if gradient is None or not needed(ctx.dtensor_spec.placements):
                return stock(ctx, gradient)
            return backward(gradient, ctx.dtensor_spec, ctx.grad_placements), None

        return staticmethod(chosen)

    return AttributePatch((_api._ToTorchTensor,), "backward", make)


def random_factories(make: Callable[[Callable], Callable]) -> AttributePatch:
    """Return the patch of the function behind ``torch.distributed.tensor.rand`` and its relatives.

    It takes ``(factory for local tensors, *sizes, **options)``.
    """
    return AttributePatch((_api,), "_dtensor_init_helper", make)


def division_into_partials(make: Callable[[Callable], Callable]) -> AttributePatch:
    """Return the patch of the method that turns a replicated tensor into a partial one: ``(tensor, mesh, axis)``."""
    return AttributePatch((Partial,), "_partition_value", make)


def moves_of_operands(check: Callable[[Op, Sequence[DTensor], Sequence[DTensor]], None]) -> AttributePatch:
    """Return the patch by which ``check(op, written, moved)`` is called before an operator that writes moves operands.

    It is called in every run, with a cached decision, too.
    """

    def make(stock: Callable) -> staticmethod:
        def checked(op_info, suggested_input_schema, *rest):
            op = suggested_input_schema.op
            if op._schema.is_mutable:
                written, moved = _written_and_moved(op_info, suggested_input_schema)
                if moved:
                    check(op, written, moved)
            return stock(op_info, suggested_input_schema, *rest)

        return staticmethod(checked)

    return AttributePatch((_dispatch.OpDispatcher,), "redistribute_local_args", make)


def _written_and_moved(op_info: _dispatch.OpInfo, target: _dispatch.OpSchema) -> tuple[list[DTensor], list[DTensor]]:
    """Return the operands that an operator writes, and those that are redistributed for it."""
    given, needed = op_info.flat_args_schema, torch.utils._pytree.tree_leaves(target.args_schema)
    tensors = [
        _of_spec(local, spec) if isinstance(spec, _dispatch.DTensorSpec) else None
        for local, spec in zip(op_info.local_args, given, strict=True)
    ]
    moved = [t for t, old, new in zip(tensors, given, needed, strict=False) if t is not None and old != new]
    if op_info.args_tree_spec is not None:
        tensors = torch.utils._pytree.tree_unflatten(tensors, op_info.args_tree_spec)
    named = zip(target.op._schema.arguments, tensors, strict=False)
    written = [value for each, value in named if each.alias_info is not None and each.alias_info.is_write]
    return [t for t in torch.utils._pytree.tree_leaves(written) if isinstance(t, DTensor)], moved


def _of_spec(local: torch.Tensor, spec: _dispatch.DTensorSpec) -> DTensor:
    return DTensor(local.detach(), spec, requires_grad=False)


# ------------------------------------------------------------------------------------------------- handlers


def handler_table() -> dict[Op, Handler]:
    """Return DTensor's table of operators that are handled before sharding propagation and its own RNG tracker."""
    return DTensor._op_dispatcher._custom_op_handlers


# Torch's own handlers, before any of ours was installed.
_STOCK_HANDLERS = dict(handler_table())


def stock_handlers() -> Mapping[Op, Handler]:
    """Return torch's own handlers."""
    return _STOCK_HANDLERS


class HandlerPatch:
    """Put handlers of operators into DTensor's table.

    A handler that is neither ours nor torch's own stays: torch's ``loss_parallel`` or the program has installed it.

    Args:
        make: returns the handlers; called once, at the first installation.
    """

    place = "DTensor's table of handlers, by operator"

    def __init__(self, make: Callable[[], Mapping[Op, Handler]]):
        self.handlers = functools.cache(make)

    def install(self) -> None:
        """Put the handlers in the table."""
        table = handler_table()
        for op, handler in self.handlers().items():
            if table.get(op) is _STOCK_HANDLERS.get(op):
                table[op] = handler

    def remove(self) -> None:
        """Remove the handlers from the table, and restore torch's own."""
        table = handler_table()
        for op, handler in self.handlers().items():
            if table.get(op) is not handler:
                continue
            del table[op]
            if op in _STOCK_HANDLERS:
                table[op] = _STOCK_HANDLERS[op]

    def is_installed(self) -> bool:
        """Return whether the table has all handlers."""
        table = handler_table()
        return all(table.get(op) is handler for op, handler in self.handlers().items())


class LossParallelPatch:
    """Let torch's ``loss_parallel`` restore at its end the handlers that it has replaced.

    Stock removes all handlers of its operators at the end, including those that existed before.
    """

    place = "torch.distributed.tensor.parallel.loss: what loss_parallel calls at its start and end"

    def __init__(self) -> None:
        self.replaced: list[dict[Op, Handler]] = []
        self.enable = AttributePatch((loss_parallel,), "_enable_custom_loss_ops", self._enable)
        self.disable = AttributePatch((loss_parallel,), "_disable_custom_loss_ops", self._disable)

    def _enable(self, stock: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(stock)
        def enable_and_remember() -> None:
            table = handler_table()
            self.replaced.append({op: table[op] for op in loss_parallel.customized_loss_ops if op in table})
            stock()

        return enable_and_remember

    def _disable(self, stock: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(stock)
        def disable_and_restore() -> None:
            stock()
            handler_table().update(self.replaced.pop() if self.replaced else {})

        return disable_and_restore

    def install(self) -> None:
        """Replace both functions."""
        self.enable.install()
        self.disable.install()

    def remove(self) -> None:
        """Put both functions back."""
        self.enable.remove()
        self.disable.remove()

    def is_installed(self) -> bool:
        """Return whether both functions are replaced."""
        return self.enable.is_installed() and self.disable.is_installed()


# ------------------------------------------------------------------------------------------------- the process


class SafeGlobalsPatch:
    """Let ``torch.load`` read some classes with ``weights_only=True``."""

    place = "torch.serialization: classes that are safe to load"

    def __init__(self, classes: Sequence[type]):
        self.classes = list(classes)

    def install(self) -> None:
        """Add the classes to those that are safe to load."""
        torch.serialization.add_safe_globals(self.classes)

    def remove(self) -> None:
        """Remove the classes."""
        torch._weights_only_unpickler._remove_safe_globals(self.classes)

    def is_installed(self) -> bool:
        """Return whether all classes are safe to load."""
        return set(self.classes) <= set(torch.serialization.get_safe_globals())


class ExitPatch:
    """Call a function when the program ends."""

    place = "atexit: functions called when the program ends"

    def __init__(self, function: Callable[[], object]):
        self.function = function
        self._is_installed = False

    def install(self) -> None:
        """Register the function."""
        if not self._is_installed:
            atexit.register(self.function)
            self._is_installed = True

    def remove(self) -> None:
        """Unregister the function."""
        atexit.unregister(self.function)
        self._is_installed = False

    def is_installed(self) -> bool:
        """Return whether the function is registered."""
        return self._is_installed
