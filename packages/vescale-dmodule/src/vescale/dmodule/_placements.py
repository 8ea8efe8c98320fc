"""Placements as users write them, checked and turned into one placement per mesh axis.

An entry of a plan is one of::

    {"tp": Shard(0)}                    a tensor, by axis name; other axes are Replicate()
    [Shard(0)]                          a tensor, one placement per mesh axis
    [entry, entry, ...]                 values by position: a tuple, a list, positional arguments
    {"name": entry, ...}                values by name: arguments, dict keys, dataclass fields
    None                                leave the value as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.distributed.tensor import Placement, Replicate, Shard

from .errors import PlanError

__all__ = ["MeshAxes", "check_entry", "is_placements", "normalize", "on_shape"]


class MeshAxes(Protocol):
    """The names and sizes of mesh axes: a ``DeviceMesh``, or its description where there are no ranks."""

    mesh_dim_names: tuple[str, ...] | None
    ndim: int

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks along an axis."""


def is_placements(entry: object) -> bool:
    """Tell the placements of one tensor (``{"tp": Shard(0)}`` or ``[Shard(0)]``) from a structure of several."""
    if isinstance(entry, Mapping):
        return bool(entry) and all(isinstance(v, Placement) for v in entry.values())
    return isinstance(entry, Sequence) and bool(entry) and all(isinstance(v, Placement) for v in entry)


def normalize(entry: object, mesh: MeshAxes, where: str) -> tuple[Placement, ...]:
    """Return one placement per axis of ``mesh``; axes that a dict does not name are ``Replicate()``.

    Raises:
        PlanError: an axis that the mesh lacks, a list of another length, or something that is no placement.

    Example:
        >>> normalize({"tp": Shard(0)}, mesh, "q_proj.weight")      # doctest: +SKIP
        (Replicate(), Shard(dim=0))                                 # on a mesh with axes ("dp", "tp")
    """
    names = mesh.mesh_dim_names or ()
    if not is_placements(entry):
        raise PlanError(f"{where}: expected placements such as {{'tp': Shard(0)}} or [Shard(0)], got {entry!r}")
    if isinstance(entry, Mapping):
        unknown = [axis for axis in entry if axis not in names]
        if unknown:
            raise PlanError(f"{where}: axis {unknown[0]!r} is not in the mesh; its axes are {tuple(names)}")
        return tuple(entry.get(axis, Replicate()) for axis in names)
    if len(entry) != mesh.ndim:
        raise PlanError(
            f"{where}: {len(entry)} placements for a mesh of {mesh.ndim} axes {tuple(names)}; name them in a dict"
        )
    return tuple(entry)


def check_entry(entry: object, mesh: MeshAxes, where: str) -> None:
    """Check an entry for a value whose structure is not known yet.

    Raises:
        PlanError: something that is no entry, or placements that do not fit the mesh, in any depth.
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
