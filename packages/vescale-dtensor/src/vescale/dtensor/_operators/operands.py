"""The tensors among an operator's arguments: find them, check them, and describe them in errors.

The functions read only global shapes, placements and meshes, which are equal on all ranks. So their decisions and
errors are the same on all ranks and need no communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from .._containers import tensors_in
from .._layout.boxes import chunk
from .._placements.types import BlockShard
from .._torch import dispatch
from .._torch.plain import counts_as_replicated
from ..errors import UnsupportedOperator

__all__ = [
    "are_norms",
    "block_axes",
    "check_operands",
    "dtensors",
    "empty_axes",
    "has_shared_elements",
    "mesh_of",
    "uneven_axes",
    "written_arguments",
]


EXACT_REACH = 1 << 24
"""Elements of memory up to which strides that may overlap are followed; those of a larger tensor count as shared."""


def dtensors(args: tuple, kwargs: dict) -> Iterator[DTensor]:
    """Yield the DTensors among the arguments, those in lists too, in order."""
    yield from (tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor))


def mesh_of(op: dispatch.Op, args: tuple, kwargs: dict) -> DeviceMesh:
    """Return the mesh of the operands.

    Raises:
        UnsupportedOperator: they are on different meshes.
    """
    first, *others = dtensors(args, kwargs)
    for other in others:
        if other.device_mesh != first.device_mesh:
            raise UnsupportedOperator.for_operands(
                op, (first, other), "bring them to one mesh with full_tensor() and distribute_tensor()"
            )
    return first.device_mesh


def check_operands(op: dispatch.Op, args: tuple, kwargs: dict) -> None:
    """Refuse plain operands beside DTensors where torch does: unless implicit replication is on.

    Raises:
        UnsupportedOperator: a plain tensor of more than one element is among the operands.
    """
    for tensor in tensors_in((args, kwargs)):
        if not isinstance(tensor, DTensor) and tensor.numel() > 1 and not counts_as_replicated(tensor):
            raise UnsupportedOperator.for_mixed(op, tensor)


def written_arguments(op: dispatch.Op, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """Yield the tensors that ``op`` writes to (``self`` of in-place operators, ``out``, running statistics)."""
    for position, name in dispatch.written_arguments(op):
        argument = args[position] if position < len(args) else kwargs.get(name)
        yield from tensors_in(argument)


def are_norms(tensor: DTensor) -> bool:
    """Return whether the values of the ranks are norms of parts."""
    return any(map(dispatch.is_norm, dispatch.placements_of(tensor)))


def has_shared_elements(tensor: DTensor | dispatch.Spec) -> bool:
    """Return whether elements share memory, as those of an expanded tensor and of the windows of `unfold` do."""
    strides = tensor.tensor_meta.stride if isinstance(tensor, dispatch.Spec) else tensor.stride()
    shape = tuple(tensor.shape)
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    if 0 in shape or not dims:
        return False
    reach, fits = 0, True
    for stride, size in dims:
        fits = fits and stride > reach
        reach += (size - 1) * stride
    if fits or dims[0][0] == 0 or reach > EXACT_REACH:
        return not fits
    places = torch.arange(reach + 1).as_strided(shape, tuple(strides)).flatten()
    return bool(places.bincount().max() > 1)


def block_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh axes along which ``tensor`` is sharded in blocks."""
    return tuple(axis for axis, p in enumerate(dispatch.placements_of(tensor)) if isinstance(p, BlockShard))


def empty_axes(tensor: DTensor | dispatch.Spec) -> tuple[int, ...]:
    """Return the mesh axes along which some rank's shard of ``tensor`` is empty, although the tensor is not.

    Example: 5 rows over 4 ranks are 2 + 2 + 1 + 0.
    """
    return _axes_where(tensor, lambda sizes: min(sizes) == 0 < max(sizes))


def uneven_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh axes along which the shards of ``tensor`` differ in size."""
    return _axes_where(tensor, lambda sizes: len(set(sizes)) > 1)


def _axes_where(tensor: DTensor | dispatch.Spec, holds: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    found, sizes = [], [[size] for size in tensor.shape]  # the different local sizes of each dim so far
    for axis, placement in enumerate(tensor.placements):
        if not is_sharded(placement):
            continue
        cut = [_cut_sizes(size, placement, tensor.device_mesh.size(axis)) for size in sizes[placement.dim]]
        if any(map(holds, cut)):
            found.append(axis)
        sizes[placement.dim] = sorted({size for each in cut for size in each})
    return tuple(found)


def is_sharded(placement: Placement) -> bool:
    """Return whether a placement shards one dim, contiguous or interleaved."""
    return isinstance(placement, Shard) or dispatch.is_strided_shard(placement)


@functools.lru_cache(maxsize=4096)
def _cut_sizes(size: int, placement: Placement, num_ranks: int) -> tuple[int, ...]:
    """Return what each rank of an axis holds of a dim."""
    num_parts = placement.split_factor if dispatch.is_strided_shard(placement) else 1
    parts = [chunk(size, num_parts, part)[1] for part in range(num_parts)]
    return tuple(sum(chunk(part, num_ranks, rank)[1] for part in parts) for rank in range(num_ranks))
