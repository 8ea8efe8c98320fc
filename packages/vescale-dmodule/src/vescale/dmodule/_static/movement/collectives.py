"""Steps (see ``steps``) as functions on local tensors.

Shapes, offsets and groups are constants of the functions. So a call runs only its collective and the copies around it,
and a compiler can trace it. Results equal those of ``DTensor.redistribute`` bit for bit, with the same strides: no gaps
where padding was cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import functional as F

from vescale.dtensor.extension import chunk

from ... import _torch
from . import steps as _steps

__all__ = ["Local", "chain", "run_step", "through_dtensor"]

Local = Callable[[Tensor], Tensor]


def chain(functions: Sequence[Local]) -> Local | None:
    """Return the composition of the functions, first one first; None if there are none."""
    if len(functions) < 2:
        return functions[0] if functions else None

    def run(tensor: Tensor) -> Tensor:
        for function in functions:
            tensor = function(tensor)
        return tensor

    return run


def run_step(step: _steps.Step, mesh: DeviceMesh) -> Local:
    """Return the function of one step; its argument has the shape ``step.local``.

    This may create the process group of several axes, so all ranks of that group must call it together.
    """
    group = _torch.Collectives(_torch.flat_group(mesh, step.axes))
    return _MAKERS[type(step)](step, group, mesh.get_local_rank(step.axes[0]), mesh)


def _reduce(step: _steps.Reduce, group: _torch.Collectives, _index: int, mesh: DeviceMesh) -> Local:
    if len(step.ops) == 1:
        op = step.ops[0]
        return lambda tensor: group.all_reduce(tensor.resolve_neg(), op)
    divisor = math.prod(mesh.size(axis) for axis, op in zip(step.axes, step.ops, strict=True) if op == "avg")
    op = "sum" if divisor > 1 else step.ops[0]

    def reduce(tensor: Tensor) -> Tensor:
        result = group.all_reduce(tensor.resolve_neg(), op)
        return result if divisor == 1 else result.div_(divisor)

    return reduce


def _reduce_scatter(step: _steps.ReduceScatter, group: _torch.Collectives, index: int, _mesh: DeviceMesh) -> Local:
    dim, op, num = step.dim, step.op, group.size
    front = _Front(step.local, dim, num)
    shape, length = front.part, chunk(step.local[dim], num, index)[1]

    def reduce_scatter(tensor: Tensor) -> Tensor:
        shard = group.reduce_scatter(front.bring(tensor.resolve_neg()), op, shape)
        return shard if shape[dim] == length else shard.narrow(dim, 0, length).contiguous()

    return reduce_scatter


def _gather(step: _steps.Gather, group: _torch.Collectives, _index: int, _mesh: DeviceMesh) -> Local:
    dim, size = step.dim, step.size
    back = _Back(step.local, dim, size, group.size)

    def gather(tensor: Tensor) -> Tensor:
        full = back.bring(group.all_gather(back.padded(tensor.resolve_neg())))
        return full if back.joined[dim] == size else full.narrow(dim, 0, size).contiguous()

    return gather


def _split(step: _steps.Split, group: _torch.Collectives, index: int, _mesh: DeviceMesh) -> Local:
    dim = step.dim
    start, length = chunk(step.local[dim], group.size, index)
    if not length:
        return lambda tensor: tensor.new_empty((*step.local[:dim], 0, *step.local[dim + 1 :]))
    return lambda tensor: tensor.narrow(dim, start, length).clone()


def _exchange(step: _steps.Exchange, group: _torch.Collectives, index: int, _mesh: DeviceMesh) -> Local:
    dim, new_dim, num, size = step.dim, step.new_dim, group.size, step.size
    padded = list(step.local)
    padded[dim] = _padded_length(size, num)
    front = _Front(tuple(padded), new_dim, num)
    back = _Back(front.part, dim, size, num)
    length = chunk(step.local[new_dim], num, index)[1]

    def exchange(tensor: Tensor) -> Tensor:
        tensor = _pad(tensor.resolve_neg(), dim, padded[dim])
        shard = back.bring(group.all_to_all(front.bring(tensor).view(back.shape)))
        shard = shard if back.joined[dim] == size else shard.narrow(dim, 0, size)
        shard = shard if back.joined[new_dim] == length else shard.narrow(new_dim, 0, length)
        return shard.contiguous()

    return exchange


_MAKERS: dict[type, Callable] = {
    _steps.Reduce: _reduce,
    _steps.ReduceScatter: _reduce_scatter,
    _steps.Gather: _gather,
    _steps.Split: _split,
    _steps.Exchange: _exchange,
}


def _padded_length(size: int, num: int) -> int:
    """Return the length of the largest of ``num`` shards; that of all others after padding."""
    return chunk(size, num, 0)[1]


def _pad(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = size - tensor.size(dim)
    return F.pad(tensor, [0, 0] * (tensor.ndim - dim - 1) + [0, missing]) if missing else tensor


class _Front:
    """Cut a dim into one part per rank and move the parts to the first dim, the order in which they are sent.

    Args:
        shape: of the tensor.
        dim: the dim.
        num: number of ranks.

    Attributes:
        part: shape of a part, which is padded to the largest shard.
    """

    def __init__(self, shape: tuple[int, ...], dim: int, num: int):
        self.num = num
        full = _padded_length(shape[dim], num)
        self.dim, self.size, self.first = dim, full * num, math.prod(shape[:dim]) == 1
        self.part = (*shape[:dim], full, *shape[dim + 1 :])
        self.flat = (num * self.part[0], *self.part[1:])
        self.cut = (*shape[:dim], num, full, *shape[dim + 1 :])
        self.order = (dim, *range(dim), *range(dim + 1, len(self.cut)))  # the dim of ranks comes first
        self.padded = full * num != shape[dim]

    def bring(self, tensor: Tensor) -> Tensor:
        tensor = _pad(tensor, self.dim, self.size) if self.padded else tensor
        if self.first:
            return tensor.contiguous().view(self.flat)
        return tensor.reshape(self.cut).permute(self.order).reshape(self.flat).contiguous()


class _Back:
    """Join the parts of all ranks, which arrive along the first dim, along another dim.

    Args:
        shape: of this rank's part.
        dim: the dim.
        size: of the joined tensor along it.
        num: number of ranks.

    Attributes:
        shape: of the parts of all ranks; the first dim is the rank.
        joined: shape of the joined tensor, padding included.
    """

    def __init__(self, shape: tuple[int, ...], dim: int, size: int, num: int):
        self.dim, self.full = dim, _padded_length(size, num)
        part = (*shape[:dim], self.full, *shape[dim + 1 :])
        self.joined = (*shape[:dim], self.full * num, *shape[dim + 1 :])
        self.first = math.prod(shape[:dim]) == 1
        self.shape, self.pads = (num, *part), shape[dim] != self.full
        self.order = (*range(1, dim + 1), 0, *range(dim + 1, len(self.shape)))  # the dim of ranks comes before dim

    def padded(self, tensor: Tensor) -> Tensor:
        return (_pad(tensor, self.dim, self.full) if self.pads else tensor).contiguous()

    def bring(self, came: Tensor) -> Tensor:
        if self.first:
            return came.view(self.joined)
        return came.view(self.shape).permute(self.order).reshape(self.joined).contiguous()


def through_dtensor(
    shape: tuple[int, ...], mesh: DeviceMesh, source: tuple[Placement, ...], target: tuple[Placement, ...]
) -> Local:
    """Return a function that calls ``DTensor.redistribute``; a compiler does not trace it."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    @torch.compiler.disable
    @torch.no_grad()
    def redistribute(tensor: Tensor) -> Tensor:
        with _torch.no_function_modes():
            value = DTensor.from_local(tensor, mesh, source, run_check=False, shape=torch.Size(shape), stride=stride)
            return value.redistribute(placements=target).to_local()

    return redistribute
