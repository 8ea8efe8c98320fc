"""Interleaved shards as plain shards of a view with one dim more, so that their conversions are steps, too.

``InterleavedShard(d, k)`` views dim ``d`` as ``(k, size / k)`` and shards the second factor. So a value in it is, as a
view, in ``Shard(d + 1)``, and whatever moves it moves the view::

    shape   (2, 7, 3 * 8)     Replicate    ->  InterleavedShard(2, 3)
    view    (2, 7, 3, 8)      Replicate    ->  Shard(3)                   cut here, joined in backward

The view of a local tensor splits the same dim into ``k`` strips, so no element changes its place: values are those of
``DTensor.redistribute`` bit for bit. Gradients often come in torch's own strided shards, which interleaved ones are a
kind of; alone on their dim they say the same.
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
    """Dim ``dim`` seen as two, the first of size ``k``.

    Attributes:
        dim: the dim that is split; None where nothing is, and all methods return what they get.
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
        """Return ``move``, which goes from view to view, as a function from local tensor to local tensor."""
        if self.dim is None or move is None:
            return move
        dim, k = self.dim, self.k

        def run(tensor: Tensor) -> Tensor:
            shape = tensor.shape
            moved = move(tensor.reshape(*shape[:dim], k, shape[dim] // k, *shape[dim + 1 :]))
            return moved.flatten(dim, dim + 1)

        return run


def view_of(shape: tuple[int, ...], *layouts: Placements) -> View | None:
    """Return the view in which all layouts are plain; None where there is none.

    There is none where two different interleavings meet, or one and a plain shard of the same dim.

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
    """Return into how many parts an interleaved or strided shard sees its dim divided; None for other placements."""
    return getattr(placement, "split_factor", None)
