"""Errors that ``vescale.dtensor`` raises for programs it cannot run as one device would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["UnsupportedOperator", "UnsupportedPlacement", "UnsupportedRandomOperator"]


def describe_operand(tensor: Tensor | None) -> str:
    """Return shape, placements and mesh of an operand in words."""
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {tuple(tensor.shape)}, placements {tensor.placements}, mesh {tensor.device_mesh}"
    if tensor is not None:
        return f"a tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
    return "these arguments"


class UnsupportedOperator(NotImplementedError):  # noqa: N818 - it names what is unsupported
    """An operator whose sharded result could differ from that of a single device.

    It is raised on all ranks alike, before any communication.
    """

    @classmethod
    def for_operands(cls, op: object, tensors: Iterable[Tensor], way_out: str) -> UnsupportedOperator:
        """Describe the operator and its operands (shape, placements, mesh), and name the fix."""
        operands = ", ".join(map(describe_operand, tensors)) or describe_operand(None)
        return cls(f"{op} on {operands} cannot give what one device gives; {way_out}")

    @classmethod
    def for_mixed(cls, op: object, plain: Tensor) -> UnsupportedOperator:
        """Name a plain tensor among DTensors."""
        return cls(
            f"{op}: got mixed torch.Tensor and DTensor; distribute the tensor of shape {tuple(plain.shape)} first, or "
            "use torch.distributed.tensor.experimental.implicit_replication()"
        )


class UnsupportedRandomOperator(UnsupportedOperator):
    """A random operator whose sharded result could differ from that of a single device."""

    @classmethod
    def for_tensor(cls, op: object, tensor: Tensor | None, way_out: str) -> UnsupportedRandomOperator:
        """Describe the operator and its tensor (shape, placements, mesh), and name the fix."""
        return cls(f"{op} on {describe_operand(tensor)} cannot draw what one device draws; {way_out}")


class UnsupportedPlacement(NotImplementedError):  # noqa: N818 - it names what is unsupported
    """An operation that the placements of a tensor do not support; the message names a fix."""

    @classmethod
    def for_operator(cls, op: object, tensors: Sequence[DTensor], reason: str) -> UnsupportedPlacement:
        """Describe the operator, its operands (shapes, placements, mesh) and the reason of the refusal."""
        operands = ", ".join(f"{tuple(tensor.shape)} placed {tensor.placements}" for tensor in tensors[:4])
        more = f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
        return cls(
            f"{op} on {operands}{more}, mesh {tensors[0].device_mesh}: {reason}; redistribute the ragged tensors "
            f"first, for instance x.redistribute(placements=[Replicate()] * {tensors[0].device_mesh.ndim})"
        )
