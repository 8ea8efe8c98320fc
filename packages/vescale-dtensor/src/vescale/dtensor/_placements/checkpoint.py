"""The boxes of a shard, for checkpoints: as ``__boxes__``, and in the protocol of DCP.

Only tensors with ragged or strided (interleaved) placements have ``__boxes__`` and ``__global_shape__``. Torch's own
placements give one box, which checkpoints compute from the DTensor itself. DCP gets one item for each box.

Guarantee: over all ranks the boxes cover the tensor exactly once for each copy of it. The views share the shard's
memory, so reading into them fills the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .._layout.shards import local_views
from .._torch.placements import local_of
from .redistribute import is_own

__all__ = ["PROTOCOL", "boxes", "global_shape"]


def held(tensor: DTensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return ``(offsets, view)`` of every box that this rank holds of a tensor.

    Raises:
        UnsupportedPlacement: the tensor is not reduced yet (Partial).
    """
    views = local_views(local_of(tensor).detach(), tensor.shape, tensor.device_mesh, tensor.placements)
    return [(offsets, view) for (offsets, _), view in views]


@property
def boxes(self: DTensor) -> Callable[[], list[tuple[tuple[int, ...], Tensor]]]:
    """The method that lists ``(offsets, view)`` for each box of this rank; for our placements only."""
    if not is_own(self.placements, self.device_mesh):
        raise AttributeError("__boxes__")
    return lambda: held(self)


@property
def global_shape(self: DTensor) -> tuple[int, ...]:
    """The shape of the global tensor; for our placements only."""
    if not is_own(self.placements, self.device_mesh):
        raise AttributeError("__global_shape__")
    return tuple(self.shape)


def _chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), view.shape) for offsets, view in held(tensor)]


def _write_items(tensor: DTensor, fqn: str, _: object) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(local_of(tensor))
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in _chunks(tensor)
    ]


def _shard(tensor: DTensor, index: MetadataIndex) -> Tensor:
    return next(view for offsets, view in held(tensor) if torch.Size(offsets) == index.offset)


PROTOCOL: dict[str, Callable] = {
    "__create_chunk_list__": _chunks,
    "__create_write_items__": _write_items,
    "__get_tensor_shard__": _shard,
}
"""Our implementations of the DTensor methods that DCP calls."""
