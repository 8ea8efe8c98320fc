"""The autograd nodes by which a backward enters a module: those of its outputs, and of tensors in its attributes.

Outputs may be nested in containers and in objects of any type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import _torch
from .sharded_values import ShardedValues

__all__ = ["attribute_nodes", "autograd_nodes", "returns_memory_of"]

#: How deep to look for tensors in attributes of objects of unknown types.
DEPTH = 4

#: Metadata of an autograd node that has been returned by `attribute_nodes`.
_MARK = "vescale.optim.unit"


def autograd_nodes(output: object) -> set[Node]:
    """Return the autograd nodes of what a module returned."""
    tensors = list(_tensors_in(output))
    # Writing to a view takes its own node out of the graph, and leaves that of its base.
    bases = [base for tensor in tensors if (base := _torch.base_of(tensor)) is not None]
    return {tensor.grad_fn for tensor in (*tensors, *bases) if tensor.grad_fn is not None}


def attribute_nodes(module: nn.Module) -> set[Node]:
    """Return the autograd nodes of tensors that a module stores as attributes (an auxiliary loss), each node once.

    Attributes that stand for a parameter are left out.
    """
    table = _torch.own_parameters(module)
    values = [value for key, value in vars(module).items() if value is not table and key not in table]
    nodes = set()
    for tensor in (t for value in values for t in _tensors_in_container(value)):
        if tensor.grad_fn is not None and _MARK not in tensor.grad_fn.metadata:
            tensor.grad_fn.metadata[_MARK] = True
            nodes.add(tensor.grad_fn)
    return nodes


def returns_memory_of(buckets: Sequence[ShardedValues], output: object) -> Tensor | None:
    """Return a tensor of an output that shares memory with the parameters of ``buckets``, None without one."""
    for tensor in _tensors_in(output):
        if any(bucket.holds(_torch.local_tensor(tensor)) for bucket in buckets):
            return tensor
    return None


def _tensors_in(value: object, depth: int = DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each, depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors_in(each, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for each in vars(value).values():
            yield from _tensors_in(each, depth - 1)


def _tensors_in_container(value: object) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in a list, tuple or dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, Tensor))
    elif type(value) is dict:
        yield from (each for each in value.values() if isinstance(each, Tensor))
