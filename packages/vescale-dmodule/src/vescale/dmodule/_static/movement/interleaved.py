"""Interleaved shards as plain shards of a view with one more dim, so that steps can convert them.

``InterleavedShard(d, k)`` views dim ``d`` as ``(k, size / k)`` and shards the second factor. So the view has the plain
placement ``Shard(d + 1)``, and a conversion moves the view::

    shape   (2, 7, 3 * 8)     Replicate    ->  InterleavedShard(2, 3)
    view    (2, 7, 3, 8)      Replicate    ->  Shard(3)                   cut here, joined in backward

The view of a local tensor splits the same dim into ``k`` strips and moves no element, so values equal those of
``DTensor.redistribute`` bit for bit. Gradients often have torch's own strided shards, the base of interleaved shards.
Both describe the same layout if no other placement shards their dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import Placement, Shard

__all__ = ["View", "view_of"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class View:
    """A view that splits dim ``dim`` into two dims, the first of size ``k``.

    Attributes:
        dim: the dim that is split; None for no split, and all methods then return their argument.
        k: number of parts.
    """

    dim: int | None = None
    k: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the view.

        Example:
            >>> View(1, 3).shape((2, 12))
            (2, 3, 4)
        """
        if self.dim is None:
            return shape
        return (*shape[: self.dim], self.k, shape[self.dim] // self.k, *shape[self.dim + 1 :])

    def placements(self, placements: Placements) -> Placements:
        """Return the placements of the view.

        Example:
            >>> from vescale.dtensor import InterleavedShard
            >>> View(1, 3).placements((InterleavedShard(1, 3), Shard(2), Shard(0)))
            (Shard(dim=2), Shard(dim=3), Shard(dim=0))
        """
        if self.dim is None:
            return placements

        def seen(placement: Placement) -> Placement:
            is_shard = type(placement) is Shard or _num_parts(placement) is not None
            return Shard(placement.dim + (placement.dim >= self.dim)) if is_shard else placement

        return tuple(map(seen, placements))

    def through(self, move: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
        """Return ``move``, a function of views, as a function of local tensors."""
        if self.dim is None or move is None:
            return move
        dim, k = self.dim, self.k

        def run(tensor: Tensor) -> Tensor:
            shape = tensor.shape
            moved = move(tensor.reshape(*shape[:dim], k, shape[dim] // k, *shape[dim + 1 :]))
            return moved.flatten(dim, dim + 1)

        return run


def view_of(shape: tuple[int, ...], *layouts: Placements) -> View | None:
    """Return the view in which all layouts are plain; None if no such view exists.

    No such view exists for two different interleavings, or for an interleaving and a plain shard of the same dim.

    Example:
        >>> from vescale.dtensor import InterleavedShard
        >>> view_of((2, 12), (Shard(0),), (InterleavedShard(1, 3),))
        View(dim=1, k=3)
        >>> view_of((2, 12), (Shard(1),), (InterleavedShard(1, 3),)) is None
        True
    """
    placements = [p for layout in layouts for p in layout]
    kinds = {(p.dim, _num_parts(p)) for p in placements if _num_parts(p) is not None}
    if not kinds:
        return View()
    (dim, k), *others = kinds
    if others or shape[dim] % k or any(type(p) is Shard and p.dim == dim for p in placements):
        return None
    return View(dim, k)


def _num_parts(placement: Placement) -> int | None:
    """Return the number of parts into which an interleaved or strided shard divides its dim; None for others."""
    return getattr(placement, "split_factor", None)
