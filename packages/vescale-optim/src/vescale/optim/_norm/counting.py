"""Sums and maxima over all ranks in which every element counts once, by one collective.

Parameters are sorted into classes by the axes over which they are sharded. A rank has a number for each class. Along
the other axes of the span this number has replicas, of which only the first counts:

    span {dp 2, tp 2}           rank (0, 0)    (0, 1)     (1, 0)     (1, 1)
    class {}                           s
    class {tp}                         s         s
    class {dp}                         s                    s
    class {dp, tp}                     s         s          s          s
                                all-reduce of each rank's sum of its numbers

There is no division by a number of replicas, so replicated integers and powers of two keep their bits. All ranks
receive the same bits, also where backends add in a different order in each group. An axis outside the span is reduced
before it, for the classes that it shards; one of ``norm_axes`` outside the span is reduced after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .._ranks.axis import Axis
from .._ranks.span import KnownAxis, Ranks, span_of

__all__ = ["Counting", "Share"]


@dataclass(frozen=True)
class Share:
    """This rank's contribution to a class.

    Attributes:
        counts: Whether its number counts in the sum over the span.
        before: Axes outside the span, over which it is reduced first.
    """

    counts: bool = True
    before: Mapping[Ranks, Axis] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether this rank must compute its number of the class."""
        return self.counts or bool(self.before)


@dataclass(frozen=True)
class Counting:
    """How numbers of classes are added over ranks. By default over this rank only.

    Attributes:
        shares: One share per class.
        span: Ranks that one collective adds.
        after: Axes, outside the span, whose ranks have other parameters.
        replicas: Axes, outside the span, whose ranks compute the same sum separately.
    """

    shares: Sequence[Share]
    span: Axis | None = None
    after: Sequence[Axis] = ()
    replicas: Sequence[Axis] = ()

    @classmethod
    def of(
        cls,
        classes: Sequence[Mapping[Ranks, Axis]],
        known: Mapping[Ranks, KnownAxis],
        norm_axes: Sequence[KnownAxis],
        replicas: Iterable[Axis],
    ) -> Counting:
        """Plan the reduction. All ranks of the axes call it alike; in the first call they compare their axes.

        Args:
            classes: For each class, the axes of more than one rank over which it is sharded.
            known: Axes of the meshes of the parameters, also those along which they are replicated.
            norm_axes: Axes whose ranks have other parameters.
            replicas: Axes whose ranks have the same parameters as this one, and must receive the same bits.
        """
        span = span_of(known, norm_axes, is_sharded=any(classes))
        inside = [span.dims_of(each) for each in norm_axes]
        other = frozenset().union(*(dims or () for dims in inside))
        shares = []
        for axes in classes:
            dims = {ranks: span.dims_of(known.get(ranks)) for ranks in axes}
            sharded = other.union(*(found or () for found in dims.values()))
            before = {ranks: axis for ranks, axis in axes.items() if dims[ranks] is None}
            shares.append(Share(span.is_first_along(span.dims - sharded), before))
        after = [each.axis for each, dims in zip(norm_axes, inside, strict=True) if dims is None]
        apart = [axis for axis in replicas if axis.size > 1 and span.dims_of(known.get(axis.ranks)) is None]
        return cls(shares, span.axis, after, apart)

    @property
    def axes(self) -> list[Axis]:
        """All axes that numbers are reduced over, in this order."""
        before = {ranks: axis for share in self.shares for ranks, axis in share.before.items()}
        return [*before.values(), *([self.span] if self.span else []), *self.after]

    def sum(self, numbers: Sequence[Tensor], *, zero: Tensor) -> Tensor:
        """Return the sum over classes and ranks.

        Args:
            numbers: One tensor per class, of one shape; the values of a class that is not needed are ignored.
            zero: The sum of no classes.
        """
        numbers = list(numbers)
        for ranks, axis in {r: a for share in self.shares for r, a in share.before.items()}.items():
            involved = [i for i, share in enumerate(self.shares) if ranks in share.before]
            reduced = _reduce(torch.stack([numbers[i] for i in involved]), dist.ReduceOp.SUM, axis)
            for i, value in zip(involved, reduced.unbind(), strict=True):
                numbers[i] = value
        counted = [number for number, share in zip(numbers, self.shares, strict=True) if share.counts]
        total = torch.stack([*counted, zero]).sum(0)
        for axis in [*([self.span] if self.span else []), *self.after]:
            total = _reduce(total, dist.ReduceOp.SUM, axis)
        return total

    def largest(self, number: Tensor) -> Tensor:
        """Return the largest number of all ranks, element by element; it must not be nan."""
        for axis in self.axes:
            number = _reduce(number, dist.ReduceOp.MAX, axis)
        return number

    def same(self, number: Tensor) -> Tensor:
        """Return the same bits of a separately computed sum on all replicas."""
        for axis in self.replicas:
            number = _reduce(number, dist.ReduceOp.MAX, axis)
        return number


def _reduce(tensor: Tensor, op: dist.ReduceOp, axis: Axis) -> Tensor:
    pending = axis.all_reduce(tensor, op, what="the gradient norm")
    if pending is not None:
        pending.wait()
    return tensor
