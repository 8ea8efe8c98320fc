"""Errors of the placements that torch lacks."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor

__all__ = ["UnsupportedPlacement"]


class UnsupportedPlacement(NotImplementedError):  # noqa: N818 - it names what is unsupported
    """What was asked of a tensor cannot be done in its placements; the message names a way out."""

    @classmethod
    def for_operator(cls, op: object, tensors: Sequence[DTensor], reason: str) -> UnsupportedPlacement:
        """Describe operator and operands (shapes, placements, mesh) and why they do not go together."""
        operands = ", ".join(f"{tuple(tensor.shape)} placed {tensor.placements}" for tensor in tensors[:4])
        more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
        return cls(
            f"{op} on {operands}{more}, mesh {tensors[0].device_mesh}: {reason}; redistribute the ragged tensors "
            f"first, for instance x.redistribute(placements=[Replicate()] * {tensors[0].device_mesh.ndim})"
        )
