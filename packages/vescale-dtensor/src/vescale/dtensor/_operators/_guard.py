"""Keep stock rules away from shards that they cannot take.

Many stock rules are right as long as every rank holds a part of the tensor. Where a dim is shorter than the ranks are
many, some hold nothing, and the local operator fails there (a maximum of no elements) while the others go on into a
collective; or a mean of local means counts parts of different sizes alike. Which ranks hold what follows from the
global shape, so every rank decides alike: the axes in question are gathered first, the rest stays sharded.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch
from ._gather import gather, gather_axes, map_tensors
from ._operands import dtensors, empty_axes, uneven_axes, written_arguments

__all__ = ["whole_where_empty", "whole_where_uneven"]

Axes = Callable[[DTensor], tuple[int, ...]]


def whole_where_empty(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule, after gathering operands along axes where a rank's shard is empty."""
    return _guarded(empty_axes, op, args, kwargs)


def whole_where_uneven(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule, after gathering operands along axes where shards differ in size."""
    return _guarded(uneven_axes, op, args, kwargs)


def _guarded(axes_of: Axes, op: _torch.Op, args: tuple, kwargs: dict) -> object:
    if not any(axes_of(tensor) for tensor in dtensors(args, kwargs)):
        return _torch.stock_dispatch(op, args, kwargs)
    if any(isinstance(tensor, DTensor) and axes_of(tensor) for tensor in written_arguments(op, args, kwargs)):
        return gather(op, args, kwargs)

    def bring(tensor: Tensor) -> Tensor:
        axes = axes_of(tensor) if isinstance(tensor, DTensor) else ()
        return gather_axes(op, tensor, axes) if axes else tensor

    return _torch.stock_dispatch(op, map_tensors(bring, args), map_tensors(bring, kwargs))
