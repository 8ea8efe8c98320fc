"""Tensors in what a module returns or keeps, whatever it wraps them in, and the autograd nodes behind them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import _torch

__all__ = ["autograd_nodes", "tensors_in", "tensors_in_container"]

#: How deep to look for tensors in attributes of objects of unknown types.
DEPTH = 4


def autograd_nodes(output: object) -> set[Node]:
    """Return the autograd nodes of what a module returned."""
    tensors = list(tensors_in(output))
    # Writing to a view takes its own node out of the graph, and leaves that of its base.
    bases = [base for tensor in tensors if (base := _torch.base_of(tensor)) is not None]
    return {tensor.grad_fn for tensor in (*tensors, *bases) if tensor.grad_fn is not None}


def tensors_in(value: object, depth: int = DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each, depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from tensors_in(each, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for each in vars(value).values():
            yield from tensors_in(each, depth - 1)


def tensors_in_container(value: object) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in a list, tuple or dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, Tensor))
    elif type(value) is dict:
        yield from (each for each in value.values() if isinstance(each, Tensor))
