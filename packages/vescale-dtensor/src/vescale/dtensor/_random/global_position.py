"""Where this rank's elements lie in the tensor that one device would draw.

A random operator on a shard must know three things: the **global shape**, the **boxes** of this rank in it, and the
**memory order** of the global tensor, since stock generators fill memory, not logical, order: the dims in the order of
their strides, whether the memory is dense or not. Two sources say so:

* a ``DTensor``: its placements give the boxes, its global strides the order;
* an enclosing :func:`vescale.dtensor.random.local_batch`: dim 0 of every tensor is this rank's part of a larger batch.

Both compose: attention scores of a tensor-parallel model inside data parallelism are a box in dims 1 (heads) and 0.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._layout.boxes import Box
from .._layout.groups import rank_set
from .._layout.shards import Piece, pieces
from .._torch import dispatch as _torch
from ..errors import UnsupportedRandomOperator
from .stock.pieces import NORMAL_BLOCK
from .stock.spans import Span, spans

__all__ = ["WINDOWS", "BatchWindow", "Place", "fills_memory", "memory_order", "place_of"]


@dataclass(frozen=True)
class BatchWindow:
    """Part ``index`` of ``count`` equal parts of the global batch, along dim 0; ``ranks`` hold the parts in order."""

    index: int
    count: int
    ranks: tuple[int, ...] = ()


# The batch windows declared around the running code, innermost first (set by ``random.local_batch``).
WINDOWS: ContextVar[tuple[BatchWindow, ...]] = ContextVar("vescale_batch_windows", default=())


@dataclass(frozen=True, eq=False)
class Place:
    """The boxes of a global tensor that a rank holds.

    Attributes:
        shape: shape of the tensor that one device would draw.
        order: dims of that tensor from the slowest to the fastest varying in memory.
        is_contiguous: whether that tensor is row-major and dense; `normal_` draws another stream where it is not.
        pieces: what this rank holds, each piece with its place in the local tensor.
        shift: what the batch windows add to the row of a piece's box.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    is_contiguous: bool
    pieces: tuple[Piece, ...]
    shift: int = 0

    @functools.cached_property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape, slowest dim first."""
        return tuple(self.shape[d] for d in self.order)

    @functools.cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes ``(offsets, sizes)`` held, in the global tensor."""
        shift = (self.shift, *(0 for _ in self.shape[1:]))[: len(self.shape)]
        return tuple((tuple(map(sum, zip(p.box[0], shift, strict=True))), p.box[1]) for p in self.pieces)

    @functools.cached_property
    def memory_boxes(self) -> tuple[Box, ...]:
        """The boxes, slowest dim first."""
        return tuple((tuple(o[d] for d in self.order), tuple(s[d] for d in self.order)) for o, s in self.boxes)

    @functools.cached_property
    def memory_slices(self) -> tuple[slice, ...]:
        """The only box, as an index into the global tensor with its slowest dim first."""
        ((offsets, sizes),) = self.memory_boxes
        return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """What of the draw to skip, to draw in place, and to draw in scratch."""
        return spans(self.memory_shape, self.memory_boxes)

    @functools.cached_property
    def block_spans(self) -> tuple[Span, ...]:
        """The same with all cuts where `normal_` allows them."""
        return spans(self.memory_shape, self.memory_boxes, NORMAL_BLOCK)

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether the local tensor, in row-major order, is the one box in the order of the draw."""
        return self.order == tuple(range(len(self.shape))) and len(self.pieces) == 1 and self.pieces[0].rows is None

    def views(self, local: Tensor) -> list[Tensor]:
        """Return the views of ``local`` that store the boxes, slowest dim first."""
        if self.is_local:
            return [local]
        return [piece.view(local).permute(self.order) for piece in self.pieces]

    def boxed_views(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Return the global boxes, each with the view of the local tensor that stores it, in logical order."""
        return [(box, piece.view(local)) for box, piece in zip(self.boxes, self.pieces, strict=True)]

    def keep(self, whole: Tensor, local: Tensor) -> None:
        """Copy what this rank holds of the global tensor ``whole`` to ``local``."""
        for (offsets, sizes), piece in zip(self.boxes, self.pieces, strict=True):
            index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            piece.view(local).copy_(whole[index])


def place_of(op: object, tensor: Tensor, windows: tuple[BatchWindow, ...]) -> Place:
    """Return the place of ``tensor``'s local elements.

    Raises:
        UnsupportedRandomOperator: no rank holds elements (`Partial`), several elements share memory (an expanded
            tensor), or a batch window is declared around a tensor without dims, around one row of unknown memory
            order, or around a DTensor that spans the window's ranks.
    """
    place = (
        _sharded(_torch.spec(tensor)) if isinstance(tensor, DTensor) else _plain(tuple(tensor.shape), tensor.stride())
    )
    if isinstance(place, str):
        raise UnsupportedRandomOperator.for_tensor(op, tensor, place)
    for window in windows:
        _check_window(op, tensor, window)
        place = _cut(place, window)
    return place


@functools.lru_cache(maxsize=4096)
def _sharded(spec: _torch.Spec) -> Place | str:
    """Return the place, or what to do about a tensor that has none."""
    if any(placement.is_partial() for placement in spec.placements):
        return "redistribute to Shard or Replicate before the random operator"
    if not _torch.has_default_order(spec):
        return "its mesh axes cut one dim in an order of their own: redistribute to the default order first"
    mesh, shape, stride = spec.mesh, tuple(spec.shape), tuple(spec.stride)
    coord = mesh.get_coordinate()
    held = pieces(shape, tuple(mesh.shape), None if coord is None else tuple(coord), tuple(spec.placements))
    return _laid_out(shape, stride, held)


@functools.lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...], stride: tuple[int, ...]) -> Place | str:
    origin = tuple(0 for _ in shape)
    return _laid_out(shape, stride, (Piece((origin, shape), origin),) if 0 not in shape else ())


def _laid_out(shape: tuple[int, ...], stride: tuple[int, ...], held: tuple[Piece, ...]) -> Place | str:
    if any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)) and 0 not in shape:
        return "call .contiguous() first: several of its elements share memory"
    order = memory_order(shape, stride)
    is_contiguous = order == tuple(range(len(shape))) and fills_memory(shape, stride)
    return Place(shape, order, is_contiguous, held)


@functools.lru_cache(maxsize=4096)
def _cut(place: Place, window: BatchWindow) -> Place:
    rows = place.shape[0]
    shape = (rows * window.count, *place.shape[1:])
    return Place(shape, place.order, place.is_contiguous, place.pieces, place.shift + window.index * rows)


def _check_window(op: object, tensor: Tensor, window: BatchWindow) -> None:
    if tensor.ndim == 0:
        way_out = "a tensor without dims has no batch dim: draw it outside random.local_batch"
    elif isinstance(tensor, DTensor) and len(rank_set(tensor.device_mesh).intersection(window.ranks)) > 1:
        way_out = "its mesh spans the axis of random.local_batch already: use one of the two"
    elif tensor.shape[0] == 1 and tensor.numel() > 0 and tensor.stride(0) != tensor.numel():
        # with more rows, dim 0 may come anywhere in memory: the strides of a single row do not tell
        way_out = "one row does not tell the memory order of the batch: .clone(memory_format=torch.contiguous_format)"
    else:
        return
    raise UnsupportedRandomOperator.for_tensor(op, tensor, way_out)


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims from slowest to fastest in memory: the order in which stock kernels fill a tensor.

    Example:
        >>> memory_order((3, 4), (1, 3))
        (1, 0)
    """
    dims = range(len(shape))
    if 0 in shape:
        return tuple(dims)
    # dims of size 1 have no order of their own: leave them where they stand
    moving = iter(sorted((d for d in dims if shape[d] != 1), key=lambda d: -stride[d]))
    return tuple(next(moving) if shape[d] != 1 else d for d in dims)


def fills_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Tell whether the elements fill one block of memory without gaps.

    Example:
        >>> fills_memory((3, 4), (1, 3)), fills_memory((3, 2), (4, 1))
        (True, False)
    """
    if 0 in shape:
        return True
    expected = 1
    for d in reversed(memory_order(shape, stride)):
        if shape[d] != 1:
            if stride[d] != expected:
                return False
            expected *= shape[d]
    return True
