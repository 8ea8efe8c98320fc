"""Placements as users write them, checked and turned into one placement per mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Placement, Replicate, Shard

from .errors import PlanError

__all__ = ["check_dims", "is_placement_spec", "normalize"]


def is_placement_spec(value: object) -> bool:
    """Tell placements of one tensor (``{"tp": Shard(0)}`` or ``[Shard(0)]``) from a structure of several."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(v, Placement) for v in value.values())
    return isinstance(value, Sequence) and bool(value) and all(isinstance(v, Placement) for v in value)


def normalize(spec: object, axes: Sequence[str], where: str) -> tuple[Placement, ...]:
    """Return one placement per mesh axis; axes that a dict does not name are ``Replicate()``.

    Raises:
        PlanError: an axis that the mesh lacks, a list of another length, or something that is no placement.

    Example:
        >>> normalize({"tp": Shard(0)}, ("dp", "tp"), "q_proj.weight")
        (Replicate(), Shard(dim=0))
    """
    if not is_placement_spec(spec):
        raise PlanError(f"{where}: expected placements such as {{'tp': Shard(0)}} or [Shard(0)], got {spec!r}")
    if isinstance(spec, Mapping):
        unknown = [axis for axis in spec if axis not in axes]
        if unknown:
            raise PlanError(f"{where}: axis {unknown[0]!r} is not in the mesh; its axes are {tuple(axes)}")
        return tuple(spec.get(axis, Replicate()) for axis in axes)
    if len(spec) != len(axes):
        raise PlanError(
            f"{where}: {len(spec)} placements for a mesh of {len(axes)} axes {tuple(axes)}; name them in a dict"
        )
    return tuple(spec)


def check_dims(placements: Sequence[Placement], shape: Sequence[int], where: str) -> None:
    """Refuse a shard dim that the tensor does not have.

    Raises:
        PlanError: the dim is out of range, naming the tensor and its shape.
    """
    for placement in placements:
        if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
            raise PlanError(f"{where}: {placement} on a tensor of shape {tuple(shape)}, which has {len(shape)} dims")
