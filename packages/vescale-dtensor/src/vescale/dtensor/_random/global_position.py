"""Global positions: where the local elements of a tensor lie in the tensor that one device would draw.

A rule for a random operator needs three facts: the **global shape**, the **boxes** of it that this rank holds, and the
**memory order** of the global tensor. Stock generators fill memory, not logical order: the dims in the order of their
strides, whether the memory is dense or not. Two sources give them:

* the placements and the global strides of a DTensor;
* batch windows, from `random.local_batch` and `random.micro_batches`: dim 0 of every tensor is one part of a batch.

Both compose. Attention scores of a tensor-parallel model under data parallelism are a box in dims 1 (heads) and 0::

    placements   Shard(1) on tp, coord 1 of 2          global shape (B, H)
    window       index 1 of 2 on dp                    . . . .
                                                       . . x x      the box of this rank
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
from .._torch import dispatch
from ..errors import UnsupportedRandomOperator

__all__ = ["WINDOWS", "BatchWindow", "GlobalPosition", "fills_memory", "local_of", "memory_order", "position_of"]


@dataclass(frozen=True)
class BatchWindow:
    """Some of ``count`` equal parts of the global batch, along dim 0.

    Args:
        index: the first part.
        count: the number of parts of the batch.
        ranks: those that hold one part each, in order; none for micro-batches.
        size: the number of parts from the first on.
    """

    index: int
    count: int
    ranks: tuple[int, ...] = ()
    size: int = 1


# The batch windows around the running code, innermost first (set by `random.local_batch`, `random.micro_batches`).
WINDOWS: ContextVar[tuple[BatchWindow, ...]] = ContextVar("vescale_batch_windows", default=())


def in_batch_window() -> bool:
    """Return whether the running code is in `random.local_batch` or `random.micro_batches`."""
    return bool(WINDOWS.get())


@dataclass(frozen=True, eq=False)
class GlobalPosition:
    """The boxes of a global tensor that a rank holds.

    Attributes:
        shape: shape of the tensor that one device would draw.
        order: dims of that tensor from the slowest to the fastest varying in memory.
        is_contiguous: whether that tensor is row-major and dense; `normal_` draws another stream where it is not.
        pieces: the boxes that this rank holds, each with its position in the local tensor.
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
        (box,) = self.memory_boxes
        return _index(box)

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
        """Return the global boxes in logical order, each with the view of ``local`` that stores it."""
        return [(box, piece.view(local)) for box, piece in zip(self.boxes, self.pieces, strict=True)]

    def keep(self, full: Tensor, local: Tensor) -> None:
        """Copy this rank's part of the global tensor ``full`` to ``local``."""
        for box, view in self.boxed_views(local):
            view.copy_(full[_index(box)])

    def put(self, local: Tensor, full: Tensor) -> None:
        """Copy ``local`` to this rank's part of the global tensor ``full``."""
        for box, view in self.boxed_views(local):
            full[_index(box)] = view


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; a plain tensor is its own."""
    return dispatch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def position_of(
    op: object, tensor: Tensor, windows: tuple[BatchWindow, ...] | None = None, *, logical: bool = False
) -> GlobalPosition:
    """Return the global position of the local elements of ``tensor``.

    Args:
        op: the random operator, for messages.
        tensor: a DTensor or a plain tensor.
        windows: batch windows, innermost first; None takes those in force.
        logical: number the elements in logical order, for any memory order of the tensor.

    Raises:
        UnsupportedRandomOperator: a placement is `Partial`, or mesh axes shard one dim in another order than from left
            to right; in memory order, several elements share memory (an expanded tensor); in a batch window, the tensor
            has no dims, has one row of unknown memory order, or is a DTensor over ranks of the window.
    """
    if isinstance(tensor, DTensor):
        spec = dispatch.spec(tensor)
        position, stride = _sharded(spec), tuple(spec.stride)
    else:
        position, stride = _plain(tuple(tensor.shape)), tensor.stride()
    if isinstance(position, GlobalPosition) and not logical:
        position = _in_memory(position, stride)
    if isinstance(position, str):
        raise UnsupportedRandomOperator.for_tensor(op, tensor, position)
    for window in WINDOWS.get() if windows is None else windows:
        _check_window(op, tensor, window, logical=logical)
        position = _cut(position, window)
    return position


@functools.lru_cache(maxsize=4096)
def _sharded(spec: dispatch.Spec) -> GlobalPosition | str:
    """Return the position in logical order, or the fix to name in the error for a DTensor without one."""
    if any(placement.is_partial() for placement in spec.placements):
        return "redistribute to Shard or Replicate before the random operator"
    if not dispatch.has_default_order(spec):
        return "its mesh axes shard one dim in an order of their own: redistribute to the default order first"
    mesh, shape = spec.mesh, tuple(spec.shape)
    coord = mesh.get_coordinate()
    held = pieces(shape, tuple(mesh.shape), None if coord is None else tuple(coord), tuple(spec.placements))
    return GlobalPosition(shape, tuple(range(len(shape))), True, held)


@functools.lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...]) -> GlobalPosition:
    origin = tuple(0 for _ in shape)
    held = (Piece((origin, shape), origin),) if 0 not in shape else ()
    return GlobalPosition(shape, tuple(range(len(shape))), True, held)


@functools.lru_cache(maxsize=4096)
def _in_memory(position: GlobalPosition, stride: tuple[int, ...]) -> GlobalPosition | str:
    """Return the position in memory order, or the fix to name in the error if elements share memory."""
    shape = position.shape
    if any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)) and 0 not in shape:
        return "call .contiguous() first: several of its elements share memory"
    order = memory_order(shape, stride)
    is_contiguous = order == position.order and fills_memory(shape, stride)
    return position if is_contiguous else GlobalPosition(shape, order, False, position.pieces)


@functools.lru_cache(maxsize=4096)
def _cut(position: GlobalPosition, window: BatchWindow) -> GlobalPosition:
    """Return the position in the global batch for a tensor that is a part of it."""
    rows, *others = position.shape
    of_part = rows // window.size
    shift = position.shift + window.index * of_part
    shape = (of_part * window.count, *others)
    return GlobalPosition(shape, position.order, position.is_contiguous, position.pieces, shift)


def _check_window(op: object, tensor: Tensor, window: BatchWindow, *, logical: bool) -> None:
    if tensor.ndim == 0:
        way_out = "a tensor without dims has no batch dim: call it outside random.local_batch"
    elif tensor.shape[0] % window.size:
        way_out = (
            f"dim 0 of size {tensor.shape[0]} is no multiple of {window.size}, which a micro-batch of "
            f"{window.size}/{window.count} of the batch has: use micro-batches of equal sizes"
        )
    elif isinstance(tensor, DTensor) and len(rank_set(tensor.device_mesh).intersection(window.ranks)) > 1:
        way_out = "its mesh spans the axis of random.local_batch already: use one of the two"
    elif not logical and tensor.shape[0] == 1 and tensor.numel() > 0 and tensor.stride(0) != tensor.numel():
        # With more rows, dim 0 has a known position in memory order. The stride of a single row is arbitrary.
        contiguous = ".clone(memory_format=torch.contiguous_format)"
        way_out = f"one row does not determine the memory order of the batch: call {contiguous} on it"
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
    # the stride of a dim of size 1 is arbitrary: keep its position
    moving = iter(sorted((d for d in dims if shape[d] != 1), key=lambda d: -stride[d]))
    return tuple(next(moving) if shape[d] != 1 else d for d in dims)


def fills_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill one block of memory without gaps.

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
