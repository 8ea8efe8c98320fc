"""What an optimizer updates on this rank, and the outside view of its state.

A **piece** is a flat range of a parameter's local tensor: all of it, or with ZeRO 1 to 3 the part that this rank owns,
which may be empty. The torch optimizer gets one tensor per parameter of its group, on every rank. So hyperparameters
and step counts are the same everywhere, and state exists only for the elements that are owned.

In state dicts, state is indexed like the parameter: a `StatePiece` lists the rectangles of the global tensor that it
holds.

    local tensor (3, 4), a row shard      0 . . .          boxes (at row 3 of the global tensor):
    at row 3, elements [5, 10)            . 5 6 7            (4, 1) + (1, 3)
                                          8 9 . .            (5, 0) + (1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import flat_range_boxes, pieces

from .. import _torch
from .._gradients.placeholder import ShardedGradient, local_gradient
from .._parameters.home import Home
from .spread import Spread

__all__ = ["Piece", "StatePiece"]

Rectangle = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Offsets in the global tensor, offsets in the local tensor, and sizes."""


class Piece:
    """A flat range ``[start, stop)`` of a parameter's local tensor.

    Attributes:
        fqn: Name of the parameter.
        param: The parameter.
        tensor: The tensor that the torch optimizer updates: the parameter, its local tensor, a flat view of a part of
            it, or a copy of that in a wider dtype (`masters.py`).
        value: The memory that gets the rounded values of ``tensor``, if that is such a copy.
        spread: How the parameter is distributed over the data-parallel ranks, if there are such.
        home: The memory of the parameter, if ``tensor`` or ``value`` is a view of it and no bucket keeps it.
        loaded: The ``param.grad`` whose part ``tensor.grad`` is, if that stays valid between steps.
    """

    def __init__(
        self,
        fqn: str,
        param: nn.Parameter,
        tensor: Tensor,
        start: int,
        stop: int,
        *,
        value: Tensor | None = None,
        spread: Spread | None = None,
    ):
        self.fqn = fqn
        self.param = param
        self.tensor = tensor
        self.start = start
        self.stop = stop
        self.value = value
        self.spread = spread
        self.home: Home | None = None
        self.loaded: Tensor | None = None

    def gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient, in the dtype in which it is kept.

        Raises:
            RuntimeError: If it has not been reduced, or belongs to a ``DDP`` other than that of the optimizer.
        """
        grad = local_gradient(self.param)
        if grad is not None and grad.shape != self.tensor.shape:
            raise RuntimeError(f"the gradient of {self.fqn!r} is sharded by a DDP; pass that DDP as model=")
        return grad

    def load_gradient(self) -> None:
        """Set ``tensor.grad`` to this rank's part of the gradient."""
        if self.tensor is self.param:
            return
        grad = self.gradient()
        in_bucket = isinstance(self.param.grad, ShardedGradient)
        if grad is not None and grad.dtype != self.tensor.dtype:
            grad, in_bucket = grad.to(self.tensor.dtype), False
        self.tensor.grad = grad
        self.loaded = self.param.grad if in_bucket else None

    def drop_gradient(self) -> None:
        """Drop ``tensor.grad``, if that frees memory; a part of a bucket stays for the next step."""
        if self.loaded is None and self.tensor is not self.param:
            self.tensor.grad = None

    def __repr__(self) -> str:
        return f"Piece({self.fqn!r}, [{self.start}, {self.stop}) of {_torch.local_tensor(self.param).numel()})"


class StatePiece:
    """A piece of optimizer state, as rectangles of a tensor of the parameter's global shape.

    Attributes:
        piece: The piece of the parameter to which it belongs.
        tensor: The state itself: as many elements as the piece.
    """

    def __init__(self, piece: Piece, tensor: Tensor):
        self.piece = piece
        self.tensor = tensor

    @property
    def __global_shape__(self) -> tuple[int, ...]:
        return tuple(self.piece.param.shape)

    def __boxes__(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return ``(offsets in the global tensor, view of the state)`` for each rectangle; may be empty."""
        shape, held = _torch.local_tensor(self.piece.param).shape, _rectangles(self.piece.param)
        if self.tensor.shape == shape and self.tensor.numel():  # the full local tensor, in any memory format
            return [(there, self.tensor[_slices(here, sizes)]) for there, here, sizes in held]
        flat, position, boxes = self.tensor.view(-1), 0, []
        for start, sizes in flat_range_boxes(shape, self.piece.start, self.piece.stop):
            numel = math.prod(sizes)
            view = flat[position : position + numel].view(sizes)
            boxes += [(offsets, view[inside]) for offsets, inside in _overlaps(start, sizes, held)]
            position += numel
        return boxes

    def to_dtensor(self) -> DTensor:
        """Return the state as a DTensor of the global shape over the data-parallel axis, in the same memory.

        Its placement there is `vescale.dtensor.RaggedShard`, or ``Replicate`` where ranks hold all of it (ZeRO 0).
        State of a tensor-parallel parameter is a DTensor over the axes of both. State of a parameter without dims has
        the shape (1,) where one rank owns it. ``full_tensor()`` and ``redistribute`` work, and checkpoints store and
        reshard it. A write into the DTensor changes the state.

        Raises:
            ValueError: If the model is not a ``DDP``: this tensor is then all of the state on any data-parallel rank.
            NotImplementedError: If no placement describes the ranks' parts: for tensor-parallel shards of unequal size.
                The rectangles (``__boxes__``) do.

        Example:
            >>> state = optimizer.state_dict()["state"]                               # doctest: +SKIP
            >>> state["layers.0.weight"]["exp_avg"].to_dtensor().placements           # doctest: +SKIP
            (RaggedShard(dims=(0, 1), local_units=(5, 0, 7)),)
        """
        return self._spread().to_dtensor(self.tensor, self.piece.param)

    def full_tensor(self) -> Tensor:
        """Return the full tensor, of the global shape, on this rank's device; all ranks of the model call it alike.

        Parts go over the data-parallel axis first, and then over those of the parameter; any layout has a full tensor.

        Raises:
            ValueError: If the model is not a ``DDP``: this tensor is then all of the state on any data-parallel rank.

        Example:
            >>> weight = model.state_dict()["layers.0.weight"].full_tensor()          # doctest: +SKIP
        """
        return self._spread().full_tensor(self.tensor, self.piece.param)

    def _spread(self) -> Spread:
        if self.piece.spread is None:
            raise ValueError(
                f"the state of {self.piece.fqn!r} belongs to a model without DDP, so it is on no data-parallel mesh; "
                "use .tensor, which is all of this rank's state"
            )
        return self.piece.spread

    def load(self, value: object) -> None:
        """Copy in place from another value with the same boxes, or from a full tensor of the global shape.

        A full tensor may be a DTensor. It has the parameter's mesh and placements, or it is over the mesh of
        `to_dtensor` in any placements; then all ranks call this method alike and exchange data.

        Raises:
            ValueError: If shapes or boxes do not match, or a DTensor is distributed otherwise.
        """
        if isinstance(value, DTensor) and tuple(value.shape) in (self.__global_shape__, self.__global_shape__ or (1,)):
            self._load_distributed(value)
            return
        ours = self.__boxes__()
        if isinstance(value, Tensor) and tuple(value.shape) == self.__global_shape__:
            theirs = [(offsets, value[_slices(offsets, view.shape)]) for offsets, view in ours]
        elif hasattr(value, "__boxes__") and tuple(value.__global_shape__) == self.__global_shape__:
            theirs = value.__boxes__()
        else:
            came = tuple(getattr(value, "shape", getattr(value, "__global_shape__", ()))) or type(value).__name__
            raise ValueError(
                f"state of {self.piece.fqn!r} has global shape {self.__global_shape__}, got {came}; load the state of "
                "a model with the same shapes"
            )
        if _layout(ours) != _layout(theirs):
            raise ValueError(
                f"state of {self.piece.fqn!r} holds other rectangles than this rank's ({_layout(theirs)}, expected "
                f"{_layout(ours)}); load a checkpoint of another layout with vescale.checkpoint.load"
            )
        for (_, target), (_, source) in zip(ours, theirs, strict=True):
            target.copy_(source)

    def _load_distributed(self, value: DTensor) -> None:
        piece, param, part = self.piece, self.piece.param, None
        if _has_layout_of(value, param):
            part = _torch.local_tensor(value).reshape(-1)[piece.start : piece.stop]
        elif piece.spread is not None:
            part = piece.spread.part_of(value, param)
        if part is None:
            here = f" with placements {param.placements} over {param.device_mesh}" if isinstance(param, DTensor) else ""
            raise ValueError(
                f"{piece.fqn!r} is loaded from a DTensor with placements {value.placements} over {value.device_mesh}, "
                f"and has shape {self.__global_shape__}{here}; redistribute it to that, or over the data-parallel mesh "
                "of to_dtensor()"
            )
        self.tensor.copy_(part.reshape(self.tensor.shape))

    def __repr__(self) -> str:
        boxes = [f"{offsets} + {tuple(view.shape)}" for offsets, view in self.__boxes__()]
        return f"StatePiece({self.piece.fqn!r}, shape={self.__global_shape__}, boxes=[{', '.join(boxes)}])"


def _has_layout_of(value: DTensor, param: Tensor) -> bool:
    alike = isinstance(param, DTensor) and value.device_mesh == param.device_mesh
    return alike and value.placements == param.placements


def _rectangles(param: Tensor) -> list[Rectangle]:
    """Return the rectangles of the global tensor that make up a parameter's local tensor."""
    local = _torch.local_tensor(param)
    nowhere = (0,) * local.ndim
    if not isinstance(param, DTensor):
        return [(nowhere, nowhere, tuple(local.shape))]
    if not _torch.has_strided_shard(param):
        return [(_torch.shard_offsets(param), nowhere, tuple(local.shape))]
    mesh = param.device_mesh
    found = pieces(tuple(param.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), tuple(param.placements))
    return [(piece.box[0], piece.origin, piece.box[1]) for piece in found]


def _overlaps(
    start: tuple[int, ...], sizes: tuple[int, ...], held: Iterable[Rectangle]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield intersections of rectangles with a box of the local tensor: global offsets, positions in the box."""
    for there, here, lengths in held:
        first = [max(a, b) for a, b in zip(start, here, strict=True)]
        last = [min(a + n, b + m) for a, n, b, m in zip(start, sizes, here, lengths, strict=True)]
        if all(a < b for a, b in zip(first, last, strict=True)):
            offsets = tuple(g + a - b for g, a, b in zip(there, first, here, strict=True))
            yield offsets, tuple(slice(a - s, b - s) for a, b, s in zip(first, last, start, strict=True))


def _slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


def _layout(boxes: list[tuple[tuple[int, ...], Tensor]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(offsets), tuple(view.shape)) for offsets, view in boxes]
