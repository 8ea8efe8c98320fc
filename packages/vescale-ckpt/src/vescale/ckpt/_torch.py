"""The only module of this package with private names of torch (2.11 to 2.14).

``default_store`` is the store by which the processes found each other. ``distcp_prefix`` and ``distcp_place`` are
records of ``torch.distributed.checkpoint`` that its public writer takes and returns. ``dtensor_box`` is the box
of a DTensor's shard.

The offsets come from ``DTensor.__create_chunk_list__``, the protocol of torch's own checkpoint, which is the same in
these versions. It returns only the first index of a shard. For ``_StridedShard`` (FSDP2 over tensor parallel on the
same dim), this module also computes the indices, which must be consecutive.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ._errors import CheckpointError
from ._format.boxes import Box


def default_store() -> dist.Store:
    """Return the store by which the processes of the default process group found each other."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def dtensor_box(tensor: DTensor) -> tuple[Box, torch.Tensor] | None:
    """Return the box of the local shard and the local tensor, or None for an empty shard.

    Raises:
        CheckpointError: the local shard is not a box of the global tensor.
    """
    _refuse_unknown(tensor)
    coord = tensor.device_mesh.get_coordinate()
    with torch.no_grad():
        local = tensor.to_local()
    if coord is None or local.numel() == 0:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if box.sizes != tuple(local.shape):
        raise CheckpointError(
            f"expected local shape {box.sizes} for placements {tensor.placements}, global shape {tuple(tensor.shape)} "
            f"and mesh coordinate {tuple(coord)}, got {tuple(local.shape)}; pass shape and stride to "
            "DTensor.from_local for uneven shards"
        )
    for dim in {p.dim for p in tensor.placements if isinstance(p, _StridedShard)}:
        _check_consecutive(tensor, dim, tuple(coord), box)
    return box, local


def _refuse_unknown(tensor: DTensor) -> None:
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() or type(placement) in (Shard, _StridedShard):
            continue
        name = (tensor.device_mesh.mesh_dim_names or {axis: axis})[axis]
        if placement.is_partial():
            raise CheckpointError(
                f"expected a reduced value, got {placement!r} on mesh axis {name!r}; redistribute it first"
            )
        raise CheckpointError(
            f"expected Shard or Replicate, or a value with __global_shape__ and __boxes__(), got {placement!r} on mesh "
            f"axis {name!r}; redistribute it first"
        )


def _check_consecutive(tensor: DTensor, dim: int, coord: tuple[int, ...], box: Box) -> None:
    """Split the indices of ``dim`` by the placements, left to right, and compare them with the box."""
    indices = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        num_shards = tensor.device_mesh.size(axis)
        if isinstance(placement, _StridedShard):
            parts = [_nth(part, num_shards, coord[axis]) for part in indices.chunk(int(placement.split_factor))]
            indices = torch.cat(parts)
        else:
            indices = _nth(indices, num_shards, coord[axis])
    held = indices.tolist()
    if not held or held[0] != box.offsets[dim] or any(b - a != 1 for a, b in pairwise(held)):
        raise CheckpointError(
            f"expected consecutive indices of dim {dim} on a rank, got others for placements {tensor.placements}; "
            "redistribute the tensor to Shard or Replicate before save or load"
        )


def _nth(indices: torch.Tensor, num_chunks: int, n: int) -> torch.Tensor:
    chunks = indices.chunk(num_chunks)
    return chunks[n] if n < len(chunks) else indices[:0]


def distcp_prefix(text: str) -> _StoragePrefix:
    """Return what a plan of ``torch.distributed.checkpoint`` says of the names of a rank's files."""
    return _StoragePrefix(text)


def distcp_place(file: str, offset: int, length: int) -> _StorageInfo:
    """Return where a value is in the files of ``torch.distributed.checkpoint``."""
    return _StorageInfo(file, offset, length)
