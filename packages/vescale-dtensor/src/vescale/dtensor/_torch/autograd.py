"""Private names of autograd: its accumulation, for gradient receivers, and views (torch 2.11 to 2.14)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

__all__ = [
    "accumulates",
    "accumulation_node",
    "has_gradient",
    "hook_tables",
    "is_viewed",
    "local_of",
    "put_first",
    "runs_in_backward",
]

HookTable = dict[int, Callable]


def hook_tables(leaf: Tensor) -> tuple[HookTable, HookTable]:
    """Return the tables of the gradient hooks and of the post-accumulate hooks of a leaf; create missing ones."""
    if leaf._backward_hooks is None:
        leaf._backward_hooks = OrderedDict()
    if leaf._post_accumulate_grad_hooks is None:
        leaf._post_accumulate_grad_hooks = OrderedDict()
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


def put_first(table: HookTable, key: int) -> None:
    """Let autograd run a hook before all others. Autograd uses the insertion order, not that of an OrderedDict."""
    hook, others = table.pop(key), list(table.items())
    table.clear()
    table[key] = hook
    table.update(others)


def accumulation_node(leaf: Tensor) -> Node:
    """Return the node that adds to ``leaf.grad``; the node keeps the leaf alive.

    The call bypasses the class of the leaf: reading a parameter with an all-gather in flight would wait for it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(leaf).node


def runs_in_backward(node: Node) -> bool:
    """Return whether the running backward pass has executed or will execute an accumulation node.

    False if ``torch.autograd.grad`` computes the gradient of the leaf: it accumulates nothing.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch reports a captured leaf in this way
        return False


def accumulates(leaf: Tensor) -> bool:
    """Return whether the running backward pass adds to ``leaf.grad``."""
    return runs_in_backward(accumulation_node(leaf))


def has_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor has a gradient, or is a view of one that has."""
    return tensor.requires_grad or (tensor._is_view() and tensor._base.requires_grad)


def is_viewed(tensor: Tensor) -> bool:
    """Return whether a tensor is a view, or others than its Python object hold it, as its views do."""
    return tensor._is_view() or tensor._use_count() > 1


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, outside autograd, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
