"""The collectives of one mesh axis: thin, and silent where the axis has one rank.

Every call here is made by all ranks of the axis in the same order; who calls is responsible for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import _torch

__all__ = ["Axis"]


@dataclass(frozen=True)
class Axis:
    """A mesh axis: its size, this rank's coord, and the collectives that the package needs.

    Asynchronous calls return a ``Work`` to wait for, or None where there is nothing to wait for.
    """

    name: str
    size: int
    coord: int
    group: dist.ProcessGroup
    device_type: str

    @classmethod
    def of(cls, mesh: DeviceMesh, *, role: str) -> Axis:
        """Return the only axis of ``mesh``; ``role`` begins the error.

        Raises:
            ValueError: If the mesh is not 1-D.
        """
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            came = f"axes {mesh.mesh_dim_names}" if isinstance(mesh, DeviceMesh) else repr(mesh)
            raise ValueError(f'{role} expects a 1-D DeviceMesh such as mesh["dp"], got {came}')
        return cls.of_dim(mesh, 0)

    @classmethod
    def of_dim(cls, mesh: DeviceMesh, dim: int) -> Axis:
        """Return axis number ``dim`` of ``mesh``."""
        name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"mesh axis {dim}"
        return cls(name, mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim), mesh.device_type)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the axis: its identity, whatever mesh it was sliced from."""
        return tuple(dist.get_process_group_ranks(self.group))

    def __repr__(self) -> str:
        return f"{self.name}({self.coord} of {self.size})"

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> dist.Work | None:
        """Start the reduction of ``tensor``, in place."""
        return None if self.size == 1 else dist.all_reduce(tensor, op=op, group=self.group, async_op=True)

    def reduce_scatter(self, shard: Tensor, buffer: Tensor) -> dist.Work | None:
        """Start summing ``buffer`` over the ranks; this coord's part of the sum goes to ``shard``."""
        if self.size == 1:
            shard.copy_(buffer)
            return None
        return _torch.reduce_scatter(shard, buffer, group=self.group, async_op=True)

    def all_gather(self, buffer: Tensor, shard: Tensor) -> dist.Work | None:
        """Start filling ``buffer`` with every coord's ``shard``, which may be its own part of ``buffer``."""
        return None if self.size == 1 else _torch.all_gather(buffer, shard, group=self.group, async_op=True)

    def broadcast_(self, tensors: Iterable[Tensor], *, chunk_bytes: int) -> None:
        """Overwrite ``tensors``, of any dtype and bit for bit, by those of coord 0, a few chunks at a time."""
        if self.size == 1:
            return
        chunk: list[Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            chunk.append(tensor)
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= chunk_bytes:
                self._broadcast_chunk(chunk)
                chunk, num_bytes = [], 0
        self._broadcast_chunk(chunk)

    def _broadcast_chunk(self, chunk: list[Tensor]) -> None:
        if not chunk:
            return
        pieces = [t.contiguous().view(-1).view(torch.uint8) for t in chunk]
        flat = torch.cat(pieces)
        dist.broadcast(flat, group=self.group, group_src=0)
        if self.coord != 0:
            for tensor, bytes_ in zip(chunk, flat.split([p.numel() for p in pieces]), strict=True):
                # clone: a slice of bytes need not be aligned for the wider dtype
                tensor.copy_(bytes_.clone().view(tensor.dtype).view(tensor.shape))

    def check_same(self, text: str, *, what: str) -> None:
        """Compare a description over the axis.

        Raises:
            ValueError: On every rank, with the coords whose description differs from that of coord 0.
        """
        if self.size == 1:
            return
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        mine = torch.tensor([digest], dtype=torch.int64, device=self.device_type)
        every = torch.empty(self.size, dtype=torch.int64, device=mine.device)
        _torch.all_gather(every, mine, group=self.group)
        other = [coord for coord, value in enumerate(every.tolist()) if value != every[0].item()]
        if other:
            texts: list[str | None] = [None] * self.size
            dist.all_gather_object(texts, text, group=self.group)
            raise ValueError(f"{what} differ over axis {self.name!r}:\n{_first_difference(texts, other[0])}")


def _first_difference(texts: list[str | None], other: int) -> str:
    """Return the first line in which the description of coord ``other`` is not that of coord 0."""
    ours, theirs = (str(texts[coord]).splitlines() for coord in (0, other))
    length = max(len(ours), len(theirs))
    pairs = zip(ours + ["(none)"] * (length - len(ours)), theirs + ["(none)"] * (length - len(theirs)), strict=True)
    a, b = next((a, b) for a, b in pairs if a != b)
    return f"  coord 0: {a}\n  coord {other}: {b}"
