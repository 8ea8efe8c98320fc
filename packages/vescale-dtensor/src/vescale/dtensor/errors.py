"""Errors that ``vescale.dtensor`` raises for programs it cannot run as one device would."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["UnsupportedRandomOperator"]


class UnsupportedRandomOperator(NotImplementedError):  # noqa: N818 - it names what is unsupported
    """A random operator whose sharded result could differ from the one of a single device."""

    @classmethod
    def for_tensor(cls, op: object, tensor: Tensor | None, way_out: str) -> UnsupportedRandomOperator:
        """Describe operator and tensor (shape, placements, mesh) and name the way out."""
        if isinstance(tensor, DTensor):
            where = (
                f"a DTensor of shape {tuple(tensor.shape)}, placements {tensor.placements}, mesh {tensor.device_mesh}"
            )
        elif tensor is not None:
            where = f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
        else:
            where = "these arguments"
        return cls(f"{op} on {where} cannot draw what one device draws; {way_out}")
