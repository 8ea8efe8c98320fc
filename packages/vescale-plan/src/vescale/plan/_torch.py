"""The only module of this package with private names of torch.

- ``FakeTensor``, ``FakeTensorMode``: tensors with shapes, strides and dtypes, and without data.
- ``OperatorMode``: base class of a mode that intercepts every operator below autograd.
- ``tree_leaves``, ``tree_map``: torch's pytree.
- ``storage_key``: identity of the memory of a tensor, for as long as it lives.
- ``is_written``: whether an operator writes into its first argument.
- ``flops_of``, ``grouped_flops``: multiplications and additions of an operator, by torch's formulas.
- ``is_random``: whether an operator draws from a generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as OperatorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OperatorMode",
    "flops_of",
    "grouped_flops",
    "is_random",
    "is_written",
    "storage_key",
    "tree_leaves",
    "tree_map",
]


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory; it may belong to another memory once this one is freed."""
    return int(tensor.untyped_storage()._cdata)


def is_written(operator: Any) -> bool:
    """Return whether an operator writes into its first argument, as ``add_`` does."""
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the multiplications and additions of an operator; 0 for those that are not products of matrices."""
    packet = operator.overloadpacket
    if packet is torch.ops.aten._grouped_mm:  # torch has no formula for it
        return grouped_flops(args[0].shape, args[1].shape)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def grouped_flops(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the operations of a product of groups of rows, of columns, or of a sum over groups, by its operands.

    A matrix whose rows or columns are groups has two dims and a stack of matrices has three. Each element of the
    larger operand's groups meets the other operand once, so of two stacks the groups count, and otherwise they do not.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * int(groups * left[-2] * left[-1] * right[-1])


def is_random(operator: Any) -> bool:
    """Return whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags
