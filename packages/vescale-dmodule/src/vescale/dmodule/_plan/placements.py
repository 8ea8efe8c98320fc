"""Placements as users write them, checked and turned into one placement per mesh axis.

An entry of a plan is one of::

    {"tp": Shard(0)}                    a tensor, by axis name; other axes are Replicate()
    [Shard(0)]                          a tensor, one placement per mesh axis
    [entry, entry, ...]                 values by position: a tuple, a list, positional arguments
    {"name": entry, ...}                values by name: arguments, dict keys, dataclass fields
    Repeat({"tp": Shard(-1)}, ...)      a tensor: repeat parts of a dim, then place it
    None                                leave the value as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale.dtensor import InterleavedShard, RaggedShard
from vescale.dtensor.extension import Count, checked, chunk

from ..errors import PlanError

__all__ = ["MeshAxes", "Repeat", "check_entry", "check_shards", "is_placements", "normalize", "on_shape"]


class MeshAxes(Protocol):
    """The names and sizes of mesh axes: a ``DeviceMesh``, or its description where there are no ranks."""

    mesh_dim_names: tuple[str, ...] | None
    ndim: int

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along an axis."""


@checked
@dataclass(frozen=True)
class Repeat:
    """Repeat equal parts of a dim, each ``times`` times in a row, then place the tensor as ``entry`` says.

    For grouped queries with fewer key-value heads than ranks: repeated heads are as many as ranks, each rank computes
    with one, and the gradients of the copies are summed. ::

        parts=2, times=2              k0 k1        ->  k0 k0 k1 k1            Shard(-1) over 4 ranks: one head each
        parts=(2, 2), times=(1, 2)    q0 q1 k0 v0  ->  q0 q1 k0 k0 v0 v0      three equal sections of a merged dim

    Args:
        entry: placements of the repeated tensor.
        dim: the dim, counted from the front or the end.
        parts: how many equal parts, such as heads, the dim is made of; or how many each section of it has.
        times: how often each part comes; or how often in each section.

    Raises:
        PlanError: numbers that are not positive, or sections that do not correspond.

    Example:
        >>> Repeat({"tp": Shard(-1)}, parts=2, times=2).apply(torch.tensor([0, 0, 1, 1])).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """

    entry: Mapping[str, Placement] | Sequence[Placement]
    dim: int = -1
    parts: Count | tuple[Count, ...] = 1
    times: Count | tuple[Count, ...] = 1

    def __post_init__(self):
        if not is_placements(self.entry):
            raise PlanError(f"Repeat: expected placements such as {{'tp': Shard(0)}} for entry, got {self.entry!r}")
        sections = self._sections() if isinstance(self.parts, int) == isinstance(self.times, int) else []
        if not sections:
            raise PlanError(
                f"Repeat: expected as many numbers for times as for parts, got parts={self.parts} and "
                f"times={self.times}; pass a number for each section"
            )

    def apply(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with its parts repeated: plain, local or a DTensor whose ``dim`` is not sharded.

        Raises:
            PlanError: the tensor lacks the dim, its size is no multiple of the number of parts, or it is sharded.
        """
        sections = self._sections()
        num_parts = sum(parts for parts, _ in sections)
        if not -tensor.ndim <= self.dim < tensor.ndim or tensor.shape[self.dim] % num_parts:
            raise PlanError(
                f"{self}: expected a dim {self.dim} of {num_parts} equal parts, got a tensor of shape "
                f"{tuple(tensor.shape)}; fix dim or parts"
            )
        dim = self.dim % tensor.ndim
        if isinstance(tensor, DTensor) and any(getattr(p, "dim", None) == dim for p in tensor.placements):
            raise PlanError(
                f"{self}: expected a dim that is not sharded, got placements {tuple(tensor.placements)}; bring the "
                "value to Replicate() by a boundary before"
            )
        size = tensor.shape[dim] // num_parts
        pieces = tensor.split([parts * size for parts, _ in sections], dim) if len(sections) > 1 else [tensor]
        repeated = [_repeat(piece, dim, *section) for piece, section in zip(pieces, sections, strict=True)]
        return torch.cat(repeated, dim) if len(repeated) > 1 else repeated[0]

    def _sections(self) -> list[tuple[int, int]]:
        if isinstance(self.parts, int):
            return [(self.parts, self.times)]
        return list(zip(self.parts, self.times, strict=True)) if len(self.parts) == len(self.times) else []


def _repeat(tensor: Tensor, dim: int, parts: int, times: int) -> Tensor:
    if times == 1:
        return tensor
    # (..., parts, 1, size) -> (..., parts, times, size): the backward of expand sums the copies
    apart = tensor.unflatten(dim, (parts, 1, -1))
    shape = [*apart.shape[: dim + 1], times, *apart.shape[dim + 2 :]]
    return apart.expand(shape).flatten(dim, dim + 2)


def is_placements(entry: object) -> bool:
    """Return whether an entry is that of one tensor (``{"tp": Shard(0)}`` or ``[Shard(0)]``), not a structure."""
    if isinstance(entry, Repeat):
        return True
    if isinstance(entry, Mapping):
        return bool(entry) and all(isinstance(v, Placement) for v in entry.values())
    return isinstance(entry, Sequence) and bool(entry) and all(isinstance(v, Placement) for v in entry)


def normalize(entry: object, mesh: MeshAxes, where: str) -> tuple[Placement, ...]:
    """Return one placement per axis of ``mesh``; axes that a dict does not name are ``Replicate()``.

    Raises:
        PlanError: an axis that the mesh lacks, a list of another length, or an entry that is no placement.

    Example:
        >>> normalize({"tp": Shard(0)}, mesh, "q_proj.weight")      # doctest: +SKIP
        (Replicate(), Shard(dim=0))                                 # on a mesh with axes ("dp", "tp")
    """
    names = mesh.mesh_dim_names or ()
    entry = entry.entry if isinstance(entry, Repeat) else entry
    if not is_placements(entry):
        raise PlanError(f"{where}: expected placements such as {{'tp': Shard(0)}} or [Shard(0)], got {entry!r}")
    if isinstance(entry, Mapping):
        unknown = [axis for axis in entry if axis not in names]
        if unknown:
            raise PlanError(f"{where}: expected one of the mesh's axes {tuple(names)}, got {unknown[0]!r}")
        return tuple(entry.get(axis, Replicate()) for axis in names)
    if len(entry) != mesh.ndim:
        raise PlanError(
            f"{where}: expected placements for all axes of the mesh, {tuple(names)}, got {len(entry)}; name them in a "
            "dict"
        )
    return tuple(entry)


def check_entry(entry: object, mesh: MeshAxes, where: str) -> None:
    """Check an entry for a value whose structure is not known yet.

    Raises:
        PlanError: no entry, or placements that do not fit the mesh, at any depth.
    """
    if entry is None:
        return
    if is_placements(entry):
        normalize(entry, mesh, where)
    elif isinstance(entry, Mapping):
        for name, inner in entry.items():
            check_entry(inner, mesh, f"{where} {name!r}")
    elif isinstance(entry, list | tuple):
        for position, inner in enumerate(entry):
            check_entry(inner, mesh, f"{where} [{position}]")
    else:
        raise PlanError(
            f"{where}: expected placements such as {{'tp': Shard(0)}}, a list or dict of them, or None; got {entry!r}"
        )


def on_shape(placements: Sequence[Placement], shape: Sequence[int], where: str) -> tuple[Placement, ...]:
    """Return ``placements`` with dims counted from the front, for a tensor of ``shape``.

    Raises:
        PlanError: a dim is out of range, naming the tensor and its shape.
    """
    for placement in placements:
        if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
            raise PlanError(f"{where}: {placement!r} on a tensor of shape {tuple(shape)}, which has {len(shape)} dims")
    return tuple(Shard(p.dim % len(shape)) if type(p) is Shard else p for p in placements)


def check_shards(
    placements: Sequence[Placement], shape: Sequence[int], mesh: MeshAxes, where: str, *, allow_empty: bool
) -> None:
    """Check that a tensor of ``shape`` can be cut as ``placements`` say, so that every rank gets some of it.

    Raises:
        PlanError: a rank would hold nothing and ``allow_empty`` is False, or a special placement does not fit the
            shape, or the placement is partial.
    """
    sizes = [{size} for size in shape]  # of each dim, all that occur on some rank
    for axis, placement in enumerate(placements):
        num_ranks = mesh.size(axis)
        if isinstance(placement, Partial):
            raise PlanError(f"{where}: {placement!r} is for activations; a parameter is sharded or replicated")
        if isinstance(placement, RaggedShard):
            _check_ragged(placement, shape, num_ranks, where)
        elif isinstance(placement, InterleavedShard):
            _check_interleaved(placement, shape, num_ranks, where)
        elif isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            sizes[dim] = {chunk(size, num_ranks, coord)[1] for size in sizes[dim] for coord in range(num_ranks)}
            if 0 in sizes[dim] and shape[dim] and not allow_empty:
                name = (mesh.mesh_dim_names or range(mesh.ndim))[axis]
                raise PlanError(
                    f"{where}: {placement!r} of a tensor of shape {tuple(shape)} over the {num_ranks} ranks of axis "
                    f"{name!r} leaves a rank without any of it; use fewer ranks, another dim, or allow_empty=True"
                )


def _check_interleaved(placement: InterleavedShard, shape: Sequence[int], num_ranks: int, where: str) -> None:
    if placement.dim >= len(shape):
        raise PlanError(f"{where}: {placement!r} on a tensor of shape {tuple(shape)}, which has {len(shape)} dims")
    size, k = shape[placement.dim], placement.k
    if size % k:
        raise PlanError(f"{where}: {placement!r} on a dim of {size} elements, which is not made of {k} equal parts")
    if (size // k) % num_ranks:
        raise PlanError(
            f"{where}: {placement!r} cuts each of {k} parts of {size // k} elements over {num_ranks} ranks, which do "
            "not divide it; use a degree that does"
        )


def _check_ragged(placement: RaggedShard, shape: Sequence[int], num_ranks: int, where: str) -> None:
    try:
        placement.check(shape, num_ranks)
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error
