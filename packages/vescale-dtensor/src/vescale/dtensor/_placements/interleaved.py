"""Cut the result of a merged projection into its parts without communication, and join their gradients again.

A merged QKV projection whose weight is `InterleavedShard(0, 3)` gives activations in `InterleavedShard(-1, 3)`: every
rank holds its strips of Q, of K and of V. Splitting into the parts gives each rank its shard of each::

    parts      q q | k k | v v          split ->  q q      k k      v v
    rank       0 1 | 0 1 | 0 1                    0 1      0 1      0 1       Shard(-1)

Torch's rules would gather first. Indexing (``y[..., :n]``) follows the same rule. A section of several parts (grouped
queries: Q is several times as wide as K) stays interleaved. The backward joins the gradients by the inverse operation.

All other operators on interleaved tensors run by torch's rules for strided shards. Those return strided shards for
interleaved ones, from torch 2.14 on also where nothing changes (``detach``); `keep_interleaved` gives them their class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from .._containers import tensors_in
from .._torch.dispatch import Op, wrap
from .._torch.placements import DTensorSpec, StridedShard, backward_operator, local_of
from .types import InterleavedShard

__all__ = ["keep_interleaved", "run_interleaved"]

aten = torch.ops.aten


def run_interleaved(op: Op, args: tuple, kwargs: dict) -> object:
    """Return the parts of an interleaved tensor, or the joined gradient of its parts; None if torch's rule applies."""
    if op is aten.split.Tensor:
        return _split(*_named(args, kwargs, ("self", "split_size", "dim")))
    if op in (aten.split_with_sizes.default, aten.split.sizes):
        return _split(*_named(args, kwargs, ("self", "split_sizes", "dim")))
    if op is aten.slice.Tensor:
        return _slice(*_named(args, kwargs, ("self", "dim", "start", "end", "step")))
    if op is aten.slice_backward.default:
        return _slice_backward(*_named(args, kwargs, ("grad_output", "input_sizes", "dim", "start", "end", "step")))
    if op is aten.cat.default and backward_operator() in ("Split", "SplitWithSizes"):
        return _cat(*_named(args, kwargs, ("tensors", "dim")))
    return None


def keep_interleaved(args: tuple, kwargs: dict, spec: DTensorSpec) -> tuple[Placement, ...]:
    """Return the placements of a result, interleaved where torch's rules return the strided shards of an operand."""
    if not any(type(placement) is StridedShard for placement in spec.placements):
        return spec.placements
    operands = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)]
    known = {(a, p.k) for t in operands for a, p in enumerate(t.placements) if isinstance(p, InterleavedShard)}

    def keep(axis: int, placement: Placement) -> Placement:
        if type(placement) is not StridedShard or (axis, placement.split_factor) not in known:
            return placement
        size = spec.tensor_meta.shape[placement.dim] if spec.tensor_meta is not None else 1
        return placement if size % placement.split_factor else InterleavedShard(placement.dim, placement.split_factor)

    return tuple(keep(axis, placement) for axis, placement in enumerate(spec.placements))


def _named(args: tuple, kwargs: dict, names: Sequence[str]) -> tuple:
    values = {"step": 1, "dim": 0} | dict(zip(names, args, strict=False)) | kwargs
    return tuple(values.get(name) for name in names)


def _split(tensor: Tensor, sizes: int | Sequence[int], dim: int) -> tuple[DTensor, ...] | None:
    if not isinstance(tensor, DTensor):
        return None
    dim = dim % tensor.ndim
    axis = _interleaved_axis(tensor.placements, dim)
    if axis is None:
        return None
    size, k = tensor.shape[dim], tensor.placements[axis].split_factor
    sizes = [min(sizes, size - start) for start in range(0, size, sizes)] if isinstance(sizes, int) else list(sizes)
    if size % k or size == 0 or any(section % (size // k) or section == 0 for section in sizes):
        return None  # a section ends inside a part: torch gathers
    local = local_of(tensor)
    strip = local.shape[dim] // k
    counts = [section // (size // k) for section in sizes]
    shards = local.split([count * strip for count in counts], dim)
    return tuple(_section(tensor, shard, axis, dim, count, k) for shard, count in zip(shards, counts, strict=True))


def _slice(tensor: DTensor, dim: int, start: int | None, end: int | None, step: int) -> DTensor | None:
    """Return a section made of complete parts, for models that split a merged projection by indexing."""
    dim = dim % tensor.ndim
    axis = _interleaved_axis(tensor.placements, dim)
    if axis is None or step != 1:
        return None
    size, k = tensor.shape[dim], tensor.placements[axis].split_factor
    start, end, _ = slice(start, end).indices(size)
    part = size // k
    if size % k or part == 0 or start % part or end % part or start >= end:
        return None
    local = local_of(tensor)
    strip, count = local.shape[dim] // k, (end - start) // part
    _SLICED[tuple(tensor.shape), dim, start, end] = k
    return _section(tensor, local.narrow(dim, start // part * strip, count * strip), axis, dim, count, k)


_SLICED: dict[tuple, int] = {}
"""Sections that were cut from interleaved tensors, by shape, dim, start and end, with the number of parts."""


def _slice_backward(
    gradient: DTensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> DTensor | None:
    """Return the gradient of :func:`_slice`: zeros for the other parts, sharded like the full tensor."""
    dim = dim % len(sizes)
    start, end, _ = slice(start, end).indices(sizes[dim])
    k = _SLICED.get((tuple(sizes), dim, start, end))
    axes = [axis for axis, placement in enumerate(gradient.placements) if getattr(placement, "dim", None) == dim]
    if k is None or step != 1 or len(axes) != 1:
        return None
    count = _num_parts(gradient.placements[axes[0]], dim)
    if count is None or (end - start) * k != count * sizes[dim]:
        return None
    local = local_of(gradient)
    strip, shape = local.shape[dim] // count, list(local.shape)
    shape[dim] = strip * k
    whole = local.new_zeros(shape)
    whole.narrow(dim, start * k // sizes[dim] * strip, count * strip).copy_(local)
    placements = list(gradient.placements)
    placements[axes[0]] = InterleavedShard(dim, k)
    return wrap(whole, gradient.device_mesh, placements, like=torch.empty(sizes, device="meta"))


def _interleaved_axis(placements: Sequence[Placement], dim: int) -> int | None:
    """Return the axis with interleaved shards of ``dim``, if that is the only axis that shards it."""
    axes = [axis for axis, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
    if len(axes) != 1 or not isinstance(placements[axes[0]], StridedShard):
        return None
    return axes[0]


def _section(tensor: DTensor, shard: Tensor, axis: int, dim: int, count: int, k: int) -> DTensor:
    shape = list(tensor.shape)
    shape[dim] = count * shape[dim] // k
    # strides of the view on one device
    like = torch.empty_strided(shape, tensor.stride(), device="meta")
    new = Shard(dim) if count == 1 else InterleavedShard(dim, count)
    placements = [new if a == axis else placement for a, placement in enumerate(tensor.placements)]
    return wrap(shard, tensor.device_mesh, placements, like=like)


def _cat(tensors: Sequence[Tensor], dim: int) -> DTensor | None:
    """Join gradients of sections, the inverse of a split, if they are sharded like the results of that split."""
    first = tensors[0]
    if not all(isinstance(tensor, DTensor) and tensor.device_mesh == first.device_mesh for tensor in tensors):
        return None
    dim = dim % first.ndim
    axes = [axis for axis, placement in enumerate(first.placements) if getattr(placement, "dim", None) == dim]
    if len(axes) != 1:
        return None
    axis = axes[0]
    counts = [_num_parts(tensor.placements[axis], dim) for tensor in tensors]
    others = {tuple(p for a, p in enumerate(tensor.placements) if a != axis) for tensor in tensors}
    if None in counts or len(others) != 1:
        return None
    parts = {tensor.shape[dim] / count for tensor, count in zip(tensors, counts, strict=True)}
    if len(parts) != 1:
        return None
    local = torch.cat([local_of(tensor) for tensor in tensors], dim)
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    placements = list(first.placements)
    placements[axis] = InterleavedShard(dim, sum(counts))
    return wrap(local, first.device_mesh, placements, like=torch.empty(shape, device="meta"))


def _num_parts(placement: Placement, dim: int) -> int | None:
    if isinstance(placement, StridedShard) and placement.dim == dim:
        return placement.split_factor
    return 1 if placement == Shard(dim) else None
