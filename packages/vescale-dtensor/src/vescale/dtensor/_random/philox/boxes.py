"""Which boxes of the global tensor this rank draws, for the counter-based stream.

Unlike the stock stream it follows the logical order of elements, so memory layout does not matter: any strides will do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._layout.boxes import Box
from ..._layout.groups import rank_set
from ..._layout.shards import local_views
from ..._torch import dispatch as _torch
from ...errors import UnsupportedRandomOperator
from ..global_position import BatchWindow
from .cipher import Key
from .elements import sample_box
from .values import Distribution

__all__ = ["Draw", "check", "local_of"]


@dataclass(frozen=True)
class Draw:
    """One draw: its key, and the part of the global batch that tensors are declared to be.

    Attributes:
        op: the operator, for messages.
        key: key of the draw.
        windows: batch windows, innermost first.
    """

    op: object
    key: Key
    windows: tuple[BatchWindow, ...]

    def each(self, distribution: Distribution, tensor: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield ``(values, view of tensor, views of others)`` for parts that together cover the local elements.

        Args:
            distribution: how words become values.
            tensor: the tensor whose elements' values are wanted.
            others: local tensors laid out like ``tensor``'s.

        Raises:
            UnsupportedRandomOperator: see `check`.
        """
        check(self.op, tensor, self.windows)
        local = local_of(tensor)
        for box, view, rest in self._boxes(tensor, local, others):
            whole, moved = self._window(tuple(tensor.shape), box)
            for index, values in sample_box(distribution, self.key, whole, moved, local.device):
                yield values, view[index], *(other[index] for other in rest)

    def _boxes(
        self, tensor: Tensor, local: Tensor, others: tuple[Tensor, ...]
    ) -> Iterator[tuple[Box, Tensor, list[Tensor]]]:
        if not isinstance(tensor, DTensor):
            yield ((0,) * local.ndim, tuple(local.shape)), local, list(others)
            return
        views = functools.partial(_views, shape=tuple(tensor.shape), like=tensor)
        columns = [views(each) for each in (local, *others)]
        for (box, view), *rest in zip(*columns, strict=True):
            yield box, view, [other for _, other in rest]

    def _window(self, shape: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
        """Return shape and box in the global batch, given those in this rank's part of it."""
        for window in self.windows:
            box = ((box[0][0] + window.index * shape[0], *box[0][1:]), box[1])
            shape = (shape[0] * window.count, *shape[1:])
        return shape, box

    def fill(self, distribution: Distribution, tensor: Tensor, put: Callable[[Tensor, Tensor], object]) -> Tensor:
        """Call ``put(view, values)`` for all local elements of ``tensor``, which is returned."""
        for values, view in self.each(distribution, tensor):
            put(view, values)
        return tensor


def check(op: object, tensor: Tensor, windows: tuple[BatchWindow, ...]) -> None:
    """Raise unless the elements of ``tensor`` have a place in the global draw.

    Raises:
        UnsupportedRandomOperator: the tensor has partial placements; or batch windows are declared around a tensor
            without dims, or around one that already spans their ranks.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedRandomOperator.for_tensor(
            op, tensor, "redistribute to Shard or Replicate before the random operator"
        )
    if isinstance(tensor, DTensor) and not _torch.has_default_order(_torch.spec(tensor)):
        raise UnsupportedRandomOperator.for_tensor(
            op, tensor, "its mesh axes cut one dim in an order of their own: redistribute to the default order first"
        )
    for window in windows:
        if tensor.ndim == 0:
            raise UnsupportedRandomOperator.for_tensor(
                op, tensor, "a tensor without dims has no batch dim: draw it outside random.local_batch"
            )
        if isinstance(tensor, DTensor) and len(rank_set(tensor.device_mesh).intersection(window.ranks)) > 1:
            raise UnsupportedRandomOperator.for_tensor(
                op, tensor, "its mesh spans the axis of random.local_batch already: use one of the two"
            )


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself."""
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _views(local: Tensor, *, shape: tuple[int, ...], like: DTensor) -> list[tuple[Box, Tensor]]:
    return local_views(local, shape, like.device_mesh, like.placements)
