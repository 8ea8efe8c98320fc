"""Collectives over any set of mesh axes, with parts of unequal sizes and without padding where the backend allows it.

The ranks of several axes form one group. The first use creates it, by its members only. Moves transfer bytes, so every
backend can move every dtype.

Guarantee: a reduction over several axes is one collective; its result is the same on all of its ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._exact_context import exact_num_blocks
from .._layout.groups import group_of_ranks, ranks_of
from .._torch.placements import all_gather_single
from .._torch.waits import name_group, waits_of
from ..errors import UnsupportedOperator
from .plan import peers

__all__ = [
    "Group",
    "all_reduce",
    "exchange",
    "gather",
    "group_of",
    "in_group_order",
    "reduce_scatter",
]

# The default process group is a part of the key: another one may be initialized after this one has ended.
_groups: dict[tuple[object, DeviceMesh, tuple[int, ...]], Group] = {}

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: not every backend averages
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

_COMBINE = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Group:
    """The ranks that differ from this one on some mesh axes only.

    Attributes:
        process_group: their process group.
        waits: for its collectives; errors name lost ranks.
        order: for each rank of the process group, its index in row-major order of the coordinates.
    """

    def __init__(self, process_group: dist.ProcessGroup, members: Sequence[int]):
        self.process_group, self.waits = process_group, waits_of(process_group)
        place = {rank: index for index, rank in enumerate(members)}
        self.order = [place[rank] for rank in dist.get_process_group_ranks(process_group)]

    def arranged(self, items: Sequence) -> list:
        """Permute items from row-major order of the coordinates to the order of the process group."""
        return [items[place] for place in self.order]


@functools.lru_cache(maxsize=64)
def in_group_order(mesh: DeviceMesh) -> bool:
    """Return whether the ranks ascend along every axis, as in the axis's process group.

    Torch shards by coordinate but gathers in the order of the group. If the orders differ, the result of a gather has
    its shards in the wrong order.
    """
    ranks, shape = ranks_of(mesh), tuple(mesh.shape)
    for axis, size in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        along = [place for place in range(len(ranks)) if place // stride % size < size - 1]
        if any(ranks[place] > ranks[place + stride] for place in along):
            return False
    return True


def group_of(mesh: DeviceMesh, axes: Sequence[int]) -> Group:
    """Return the group of this rank on ``axes``, a non-empty set of mesh axes in ascending order."""
    key = (dist.group.WORLD, mesh, tuple(axes))
    if key not in _groups:
        shape = tuple(mesh.shape)
        rank_at = dict(zip(itertools.product(*map(range, shape)), ranks_of(mesh), strict=True))
        members = [rank_at[coord] for coord in peers(shape, tuple(mesh.get_coordinate()), axes)]
        process_group = mesh.get_group(axes[0]) if len(axes) == 1 else group_of_ranks(members)
        name_group(process_group, mesh, axes)
        _groups[key] = Group(process_group, members)
    return _groups[key]


def gather(group: Group, local: Tensor, sizes: Sequence[int], out: Tensor) -> list[Tensor]:
    """Gather flat tensors of ``sizes`` into ``out``, in the order of the process group; return them in mesh order."""
    if len(set(sizes)) == 1:
        group.waits.run("all-gather", all_gather_single, _bytes(out), _bytes(local))
    else:  # one copy per rank: the backends share no all-gather of unequal parts
        copies = local.repeat(len(sizes))
        _all_to_all(group, out, group.arranged(sizes), copies, [len(local)] * len(sizes))
    return _split(group, out, sizes)


def exchange(group: Group, sends: Sequence[Tensor], sizes: Sequence[int], out: Tensor) -> list[Tensor]:
    """Send one flat tensor to each rank; return the flat parts of ``out`` received from each, in mesh order."""
    arranged = group.arranged(sends)
    _all_to_all(group, out, group.arranged(sizes), torch.cat(arranged), [len(send) for send in arranged])
    return _split(group, out, sizes)


def _all_to_all(group: Group, out: Tensor, out_sizes: list[int], buffer: Tensor, sizes: list[int]) -> None:
    unit = out.element_size()
    out_bytes, bytes_ = [size * unit for size in out_sizes], [size * unit for size in sizes]
    group.waits.run("all-to-all", dist.all_to_all_single, _bytes(out), _bytes(buffer), out_bytes, bytes_)


def _split(group: Group, out: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    by_place = dict(zip(group.order, out.split(group.arranged(sizes)), strict=True))
    return [by_place[place] for place in range(len(sizes))]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def all_reduce(group: Group, local: Tensor, ops: Sequence[str], *, divisor: int) -> Tensor:
    """Reduce over the group by the ``ops`` of its axes (all alike, or sums and averages), and divide averages.

    Backends have no product of complex numbers: their factors are gathered.
    """
    if ops[0] == "product" and local.is_complex():
        num_ranks, flat = len(group.order), local.flatten()
        factors = gather(group, flat, [len(flat)] * num_ranks, flat.new_empty(len(flat) * num_ranks))
        return functools.reduce(torch.mul, factors).view(local.shape)
    _refuse_sum(local, ops)
    result = local.clone(memory_format=torch.contiguous_format)
    group.waits.run("all-reduce", dist.all_reduce, result, op=_OPS[ops[0]])
    return _averaged(result, divisor)


def reduce_scatter(group: Group, sends: Sequence[Tensor], ops: Sequence[str], *, divisor: int, place: int) -> Tensor:
    """Reduce one flat tensor per destination rank over the group; return that of this rank, whose index is ``place``.

    Parts of unequal size are exchanged and combined in mesh order, without padding.
    """
    _refuse_sum(sends[0], ops)
    sizes = [len(send) for send in sends]
    out = sends[0].new_empty(sizes[place])
    is_known = ops[0] != "product" or not sends[0].is_complex()  # to the backends
    if len(set(sizes)) == 1 and is_known:
        buffer = torch.cat(group.arranged(sends))
        group.waits.reduce_scatter(out, buffer, _OPS[ops[0]])
        return _averaged(out, divisor)
    received = exchange(group, sends, [sizes[place]] * len(sizes), sends[0].new_empty(sizes[place] * len(sizes)))
    out.copy_(received[0])
    for part in received[1:]:
        _COMBINE[ops[0]](out, part, out=out)
    return _averaged(out, divisor)


def _refuse_sum(local: Tensor, ops: Sequence[str]) -> None:
    """Refuse a sum whose order of additions depends on the ranks, inside of ``exact``.

    Raises:
        UnsupportedOperator: it would round.
    """
    is_rounded = local.is_floating_point() or local.is_complex()
    if exact_num_blocks() is not None and is_rounded and ops[0] not in ("max", "min"):
        raise UnsupportedOperator(
            f"the {ops[0]} over ranks of a tensor of shape {tuple(local.shape)} inside of vescale.dtensor.exact: "
            "expected values that no rank has a part of, got partial ones; reduce them before the context, or make "
            "them inside"
        )


def _averaged(tensor: Tensor, divisor: int) -> Tensor:
    return tensor if divisor == 1 else tensor.div_(divisor)
