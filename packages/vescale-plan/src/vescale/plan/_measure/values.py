"""Run operators on shapes, and on data where it is known: integers and masks, which code reads.

A tensor of floating-point numbers is fake: it has a shape and no data. An integer or boolean tensor is real as long as
it is small, so that code may look at it: positions, masks, the tokens of each expert. Where integers come from unknown
numbers, such as the experts of a router, they are made up:

    indices (topk, sort, argmax)      0, 1, 2, ... modulo the size of the dim: an even load of experts
    comparisons                       False: nothing is infinite, no token is dropped
    a number as a Python value        0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, FakeTensorMode, is_random, is_written, tree_leaves, tree_map

aten = torch.ops.aten
_MAX_INTEGER_BYTES, _MAX_FLOATS = 2**26, 2**18
_INDICES = ("topk", "sort", "argsort", "argmax", "argmin", "multinomial", "max", "min", "kthvalue", "mode", "median")


class Values:
    """Runs operators on fake and real tensors; `run` is the only way in."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_like(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the shape, strides and dtype of any tensor, as if it were on a CPU."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operator below autograd, and return its result, made up where it is unknown."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_known = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if operator is aten._local_scalar_dense.default and not is_known:
            return False if args[0].dtype == torch.bool else args[0].dtype.is_floating_point * 0.0 or 0
        if is_known:
            return self._on_data(operator, args, kwargs)
        if is_written(operator) and not isinstance(args[0], FakeTensor):
            return args[0]  # unknown numbers written to known ones: the shape is all that counts
        args, kwargs = _without_masks(operator, args, kwargs)
        if operator is aten.masked_select.default:
            return args[0].new_empty(int(args[1].sum()))
        if operator.overloadpacket is aten._grouped_mm:
            return self._grouped(operator, args, kwargs)
        result = operator(*args, **kwargs)
        return tree_map(lambda leaf: _made_up(operator, args, leaf), result)

    def _grouped(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Run a product of groups of matrices, which torch has for bfloat16 only, in any dtype."""
        dtype = args[0].dtype
        with self.mode:
            narrow = [each.to(torch.bfloat16) if i < 2 else each for i, each in enumerate(args)]
            result: Tensor = operator(*narrow, **kwargs)
            return torch.empty_strided(result.shape, result.stride(), dtype=dtype)

    def _on_data(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator whose operands are all known; on shapes if it makes large results, or draws."""
        if is_written(operator):
            return operator(*args, **kwargs)
        try:
            with self.mode:
                probe = operator(*args, **kwargs)
        except Exception:  # shapes that depend on data, such as those of nonzero
            return operator(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(probe) if isinstance(leaf, Tensor)]
        if made and (is_random(operator) or not all(map(_is_small, made))):
            return probe
        kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        return operator(*args, **kwargs)


def _is_small(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= _MAX_FLOATS
    return tensor.numel() * tensor.element_size() <= _MAX_INTEGER_BYTES


def _without_masks(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Replace known boolean masks that select elements by the indices of these, so that shapes are known."""
    if operator.overloadpacket not in (aten.index, aten.index_put, aten.index_put_) or len(args) < 2:
        return args, kwargs
    indices: list[Tensor | None] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:]), kwargs


def _made_up(operator: Any, args: Sequence[Any], leaf: Any) -> Any:
    """Return a fake result, or real integers in place of unknown ones."""
    if not isinstance(leaf, Tensor) or leaf.dtype.is_floating_point or leaf.dtype.is_complex or not _is_small(leaf):
        return leaf
    if is_written(operator) and leaf is args[0]:
        return leaf
    name = operator.overloadpacket.__name__
    if name not in _INDICES or leaf.dtype == torch.bool or not args[0].dim():
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    dim = next((arg for arg in args[2 if name in ("topk", "kthvalue") else 1 :] if isinstance(arg, int)), -1)
    size = max(args[0].shape[dim], 1)
    return torch.arange(math.prod(leaf.shape)).remainder(size).reshape(leaf.shape).to(leaf.dtype)
