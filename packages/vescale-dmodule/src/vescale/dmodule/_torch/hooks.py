"""Hooks of tensors and of modules, and ``autograd.Function``."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = [
    "direct_apply",
    "functions_applied_by",
    "gradient_hooks",
    "has_global_hooks",
    "have_backward_hooks",
    "hook_first",
    "hook_tables",
    "hooks_registered_by",
    "module_hook_tables",
    "nodes_before",
    "share_hooks",
    "without_hooks",
]


def hook_tables(leaf: Tensor) -> tuple[dict, dict]:
    """Return the tables of the gradient hooks and of the post-accumulate hooks of a leaf; create missing tables.

    Later registrations use the same tables.
    """
    if leaf._backward_hooks is None:
        leaf._backward_hooks = OrderedDict()
    if leaf._post_accumulate_grad_hooks is None:
        leaf._post_accumulate_grad_hooks = OrderedDict()
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


def hook_first(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Register a gradient hook of a tensor that runs before those that it has."""
    others = list((tensor._backward_hooks or {}).items())
    for key, _ in others:  # autograd uses the insertion order, not that of an OrderedDict
        del tensor._backward_hooks[key]
    tensor.register_hook(hook)
    tensor._backward_hooks.update(others)


def nodes_before(tensor: Tensor, edges: Container[object]) -> list[torch.autograd.graph.Node]:
    """Return the nodes of autograd that made a tensor, from its own back to some edges, which are left out."""
    found: dict[torch.autograd.graph.Node, None] = {}
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in edges or node in found or not node.next_functions:
            continue
        found[node] = None
        waiting += [before for before, _ in node.next_functions]
    return list(found)


def gradient_hooks(tensor: Tensor) -> dict[int, Callable]:
    """Return the table of the gradient hooks of a tensor; an empty one if it has none yet."""
    return tensor._backward_hooks or {}


def have_backward_hooks(modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> bool:
    """Return whether any of the modules has hooks for backward, or any of the tensors gradient hooks."""
    return any(t._backward_hooks for t in tensors) or any(m._backward_hooks or m._backward_pre_hooks for m in modules)


def share_hooks(source: Tensor, target: Tensor) -> None:
    """Give a leaf the tables of the gradient hooks of another one, so that handles remove them from both."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


@contextlib.contextmanager
def hooks_registered_by(convert: Callable[[Callable], Callable]) -> Iterator[None]:
    """Register ``convert(hook)`` in place of each gradient hook while the context is open."""
    stock = Tensor.register_hook

    def register_hook(tensor: Tensor, hook: Callable) -> RemovableHandle:
        return stock(tensor, convert(hook))

    Tensor.register_hook = register_hook
    try:
        yield
    finally:
        Tensor.register_hook = stock


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove the gradient hooks of some leaf tensors while the context is open."""
    hooked = [t for t in tensors if t._backward_hooks or t._post_accumulate_grad_hooks]
    kept = [(t, t._backward_hooks, t._post_accumulate_grad_hooks) for t in hooked]
    for tensor in hooked:
        # torch ignores an assignment of None to the second
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for tensor, before, after in kept:
            tensor._backward_hooks = OrderedDict() if before is None else before
            tensor._post_accumulate_grad_hooks = OrderedDict() if after is None else after


def direct_apply(function: type[torch.autograd.Function]) -> Callable:
    """Return ``function.apply`` without its support of ``torch.func`` transforms, which takes half its time.

    Backward calls ``function.backward`` directly. A compiler must trace ``function.apply`` instead.
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


@contextlib.contextmanager
def functions_applied_by(
    apply: Callable[[type, Callable, tuple], object], *, has_gradients: bool = False
) -> Iterator[None]:
    """Apply each ``autograd.Function`` by ``apply(function, stock, args)`` while the context is open.

    Code may have kept ``function.apply`` before. Until torch 2.13 it finds the method behind it in a base class at each
    call. Since then it is bound to the function alone, which looks up its forward: that applies the function again.

    Args:
        apply: makes the call.
        has_gradients: whether backward of the calls runs, which the second way does not allow.
    """
    is_python = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
    base = torch.autograd.function._SingleLevelFunction if is_python else torch.autograd.Function
    before, meta, depth = vars(base).get("apply"), type(base), 0
    getter = vars(meta).get("__getattribute__")

    def instead(function: type, *args: object, **kwargs: object) -> object:
        nonlocal depth
        depth += 1
        try:
            return apply(function, functools.partial(super(base, function).apply, **kwargs), args)
        finally:
            depth -= 1

    def look_up(function: type, name: str) -> object:
        value = type.__getattribute__(function, name)
        if name != "forward" or depth or function.__module__.startswith(("torch.", "vescale.")):
            return value
        if has_gradients:
            raise RuntimeError(
                f"{function.__qualname__} (torch.autograd.Function) was applied by a method that the program has kept "
                f"before; call {function.__qualname__}.apply(...) itself"
            )
        takes_context = function.setup_context is torch.autograd.function._SingleLevelFunction.setup_context
        return lambda *args: instead(function, *args[takes_context:])

    base.apply = classmethod(instead)
    if not is_python:
        meta.__getattribute__ = look_up
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before
        if not is_python:
            if getter is None:
                del meta.__getattribute__
            else:
                meta.__getattribute__ = getter


def module_hook_tables(module: nn.Module) -> list[dict]:
    """Return the tables of the forward and backward hooks of a module, without submodules."""
    return [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]


def has_global_hooks() -> bool:
    """Return whether hooks for the calls of all modules are registered."""
    return nn.modules.module._has_any_global_hook()
