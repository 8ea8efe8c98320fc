"""Where this rank's elements lie in the tensor that one device would draw.

A random operator on a shard must know three things: the **global shape**, the **box** of this rank in it, and the
**memory order** of the global tensor (stock generators fill memory, not logical, order). Two sources say so:

* a ``DTensor``: its placements give the box;
* an enclosing :func:`vescale.dtensor.random.local_batch`: dim 0 of every tensor is this rank's part of a larger batch.

Both compose: attention scores of a tensor-parallel model inside data parallelism are a box in dims 1 (heads) and 0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch
from ._boxes import Box
from .errors import UnsupportedRandomOperator

__all__ = ["BatchWindow", "Place", "memory_layout", "place_of"]


@dataclass(frozen=True)
class BatchWindow:
    """Part ``index`` of ``count`` equal parts of the global batch, along dim 0; ``ranks`` hold the parts in order."""

    index: int
    count: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """A box of a global tensor.

    Attributes:
        shape: shape of the tensor that one device would draw.
        box: ``(offsets, sizes)`` of this rank's elements in it.
        layout: dims of that tensor from the slowest to the fastest varying in memory.
    """

    shape: tuple[int, ...]
    box: Box
    layout: tuple[int, ...]

    @property
    def is_row_major(self) -> bool:
        """Whether memory order is logical order, so that flat ranges of memory are flat ranges of elements."""
        return self.layout == tuple(range(len(self.shape)))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(*self.box, strict=True))


def place_of(op: object, tensor: Tensor, windows: tuple[BatchWindow, ...]) -> Place:
    """Return the place of ``tensor``'s local elements.

    Raises:
        UnsupportedRandomOperator: the placements do not give one box (Partial, strided), the memory is not dense, or a
            batch window is declared around a tensor without dims, or around a DTensor that spans the window's ranks.
    """
    shape, box = tuple(tensor.shape), (tuple(0 for _ in tensor.shape), tuple(tensor.shape))
    if isinstance(tensor, DTensor):
        if any(p.is_partial() or _torch.is_strided_shard(p) for p in tensor.placements):
            raise UnsupportedRandomOperator.for_tensor(
                op, tensor, "redistribute to Shard or Replicate before the random operator"
            )
        box = _torch.local_box(shape, tensor.device_mesh, tensor.placements)
    layout = memory_layout(shape, tensor.stride())
    if layout is None:
        raise UnsupportedRandomOperator.for_tensor(op, tensor, "call .contiguous() first: its memory is not dense")
    for window in windows:
        _check_window(op, tensor, window)
        box = ((box[0][0] + window.index * shape[0], *box[0][1:]), box[1])
        shape = (shape[0] * window.count, *shape[1:])
    return Place(shape, box, layout)


def _check_window(op: object, tensor: Tensor, window: BatchWindow) -> None:
    if tensor.ndim == 0:
        raise UnsupportedRandomOperator.for_tensor(
            op, tensor, "a tensor without dims has no batch dim: draw it outside random.local_batch"
        )
    if isinstance(tensor, DTensor) and len(_mesh_ranks(tensor.device_mesh).intersection(window.ranks)) > 1:
        raise UnsupportedRandomOperator.for_tensor(
            op, tensor, "its mesh spans the axis of random.local_batch already: use one of the two"
        )


@functools.lru_cache(maxsize=64)
def _mesh_ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def memory_layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dims from slowest to fastest in memory, or None if the elements do not fill a block of memory.

    Example:
        >>> memory_layout((3, 4), (1, 3))
        (1, 0)
    """
    dims = range(len(shape))
    if 0 in shape:
        return tuple(dims)
    # dims of size 1 have no order of their own: leave them where they stand
    moving = sorted((d for d in dims if shape[d] != 1), key=lambda d: -stride[d])
    order = iter(moving)
    layout = tuple(next(order) if shape[d] != 1 else d for d in dims)
    expected = 1
    for d in reversed(moving):
        if stride[d] != expected:
            return None
        expected *= shape[d]
    return layout
