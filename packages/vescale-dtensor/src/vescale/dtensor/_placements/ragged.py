"""Find the ragged tensors among an operator's arguments, and refuse operators that do not support them.

The functions read only shapes, placements and meshes, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .._torch.dispatch import Op
from ..errors import UnsupportedPlacement
from .types import RaggedShard

__all__ = ["is_ragged", "ragged_operands", "refusal"]


def is_ragged(tensor: object) -> bool:
    """Return whether a value is a DTensor with a ragged placement."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, RaggedShard) for placement in tensor.placements)


def ragged_operands(args: Sequence, kwargs: dict) -> list[DTensor]:
    """Return the ragged tensors among the arguments of an operator."""
    return [tensor for tensor in tensors_in((args, kwargs)) if is_ragged(tensor)]


def refusal(op: Op, args: Sequence, kwargs: dict, reason: str) -> UnsupportedPlacement:
    """Return the error for an operator that cannot run on these operands; at least one is a DTensor."""
    operands = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)]
    return UnsupportedPlacement.for_operator(op, operands, reason)
