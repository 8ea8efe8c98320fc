"""Flat buckets: partial gradients of many parameters, reduced by one collective per mesh axis.

    parameters, last of the module first     head.bias   norm.weight   up.weight   ...
    bucket by size, fixed when attached      [---------- 0 ----------] [--- 1 ---]
    partial over                                tp          tp            dp
    collectives of one backward              [    all-reduce over tp ] [ over dp ]

The bucket of a parameter depends on the order of the module, the dtype and the global shapes alone, so that it is the
same on all ranks, in every mode, whatever order gradients come in. A launch takes the members of one bucket that have a
gradient, over the same axes, and lays them out in that order: the additions inside of a collective may depend on where
in the buffer an element is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from .. import _torch

__all__ = ["Bucket", "FlatReduction", "Slot", "has_partial", "num_buckets", "pack", "partial_dims"]


def partial_dims(gradient: Sequence[Placement], parameter: Sequence[Placement]) -> tuple[int, ...] | None:
    """Return the mesh dims over which a gradient must be summed to have the placements of its parameter.

    None if that takes anything else than sums, such as a reduce-scatter or an all-gather.

    Example:
        >>> partial_dims([Partial(), Shard(0)], [Replicate(), Shard(0)])
        (0,)
        >>> partial_dims([Shard(0)], [Replicate()]) is None
        True
    """
    dims = []
    for dim, (has, wants) in enumerate(zip(gradient, parameter, strict=True)):
        if has == wants:
            continue
        if type(has) is not Partial or has.reduce_op != "sum" or not wants.is_replicate():
            return None
        dims.append(dim)
    return tuple(dims)


def has_partial(tensor: Tensor | None) -> bool:
    """Tell whether a gradient is a sum over ranks that has not been carried out."""
    return isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)


def pack(parameters: Iterable[DTensor], *, bucket_bytes: int, first: int = 0) -> list[int]:
    """Return the number of the bucket of each parameter.

    A bucket is closed when it has reached ``bucket_bytes``; each dtype fills its own. A parameter without a replicated
    mesh dim never has a gradient to be summed and takes no room.

    Args:
        parameters: in the order in which gradients are expected, the last of the module first.
        bucket_bytes: size of a bucket on one rank.
        first: number of the first bucket.
    """
    numbers, following, current, filled = [], first, {}, {}
    for parameter in parameters:
        dtype = parameter.dtype
        if dtype not in current or filled[dtype] >= bucket_bytes:
            current[dtype], filled[dtype], following = following, 0, following + 1
        numbers.append(current[dtype])
        filled[dtype] += _largest_shard_bytes(parameter)
    return numbers


def _largest_shard_bytes(parameter: DTensor) -> int:
    """Return the bytes of the largest shard: shards may be uneven, but the ranks must agree on the buckets."""
    if not any(p.is_replicate() for p in parameter.placements):
        return 0
    mesh = parameter.device_mesh
    num_shards = math.prod(mesh.size(dim) for dim, p in enumerate(parameter.placements) if not p.is_replicate())
    return math.ceil(parameter.numel() / num_shards) * parameter.dtype.itemsize


def num_buckets(numbers: Sequence[int]) -> int:
    """Return how many buckets ``numbers`` of :func:`pack` name."""
    return len(set(numbers))


class Slot(Protocol):
    """One parameter; compared by identity.

    Attributes:
        position: order of the parameter in its module.
        parameter: the DTensor.
    """

    position: int

    @property
    def parameter(self) -> DTensor: ...


class Bucket:
    """Gradients that one collective per axis reduces: of one bucket of parameters, axes and dtype.

    Attributes:
        order: sort key; buckets are launched in this order, on all ranks.
        reductions: what begin the sums over the axes, one after the other.
        waits: whether some of its members are handed in at the end of a pass, so that it leaves no earlier.
    """

    MANY = 64  # orders of arrival that are remembered

    def __init__(self, number: int, dims: tuple[int, ...], mesh: DeviceMesh, dtype: torch.dtype):
        self.order = number, tuple(mesh.mesh_dim_names or ()), dims, str(dtype)
        self.reductions = [_torch.sum_later(mesh.get_group(dim)) for dim in dims if mesh.size(dim) > 1]
        self.waits = False
        self._orders: dict[tuple[Slot, ...], Callable[[tuple], tuple]] = {}

    def order_of(self, slots: tuple[Slot, ...]) -> Callable[[tuple], tuple]:
        """Return what brings values of ``slots``, none of them twice, into the order of a launch."""
        order = self._orders.get(slots)
        if order is None:
            positions = sorted(range(len(slots)), key=lambda index: -slots[index].position)
            order = operator.itemgetter(*positions) if len(slots) > 1 else tuple
            if len(self._orders) == self.MANY:
                self._orders.clear()
            self._orders[slots] = order
        return order


class FlatReduction:
    """The sum over ranks of several tensors, under way.

    The first axis is launched here; each further one when the one before has ended, which is at :meth:`advance`.

    Args:
        bucket: says what to sum over.
        locals_: this rank's summands, in the order of the parameters; they are copied, and stay as they are.
    """

    def __init__(self, bucket: Bucket, locals_: Sequence[Tensor]):
        self._shapes = [tensor.shape for tensor in locals_]
        self._flat = torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in locals_])
        # Empty on all ranks or on none: along the axes of the sum every shard has the same shape.
        self._left = iter(bucket.reductions if self._flat.numel() else ())
        self._work: dist.Work | None = None
        self._launch_next()

    def _launch_next(self) -> None:
        launch = next(self._left, None)
        self._work = None if launch is None else launch(self._flat)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._work is None

    def advance(self) -> None:
        """Wait for the axis that is under way, and launch the next."""
        if self._work is not None:
            self._work.wait()
            self._launch_next()

    def results(self) -> list[Tensor]:
        """Return the sums, in the order of the summands; each owns its memory, so that none keeps the buffer alive."""
        sizes = [shape.numel() for shape in self._shapes]
        pieces = [self._flat] if len(sizes) == 1 else torch.split_with_sizes_copy(self._flat, sizes)
        return [p if len(shape) == 1 else p.view(shape) for p, shape in zip(pieces, self._shapes, strict=True)]
