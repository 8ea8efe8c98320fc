"""The Python value of a sharded scalar: ``x.sum().item()``, ``if mask.any():``.

Stock DTensor reads the number that this rank happens to hold, which for a partial sum is a part of it, so ranks
silently take different branches. Here the value is reduced first: an implicit redistribution, refused where those are
refused.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate

from . import _torch

__all__ = ["scalar_handlers"]


def scalar_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handler of ``item()``, which ``bool()``, ``int()`` and ``float()`` call."""
    return {torch.ops.aten._local_scalar_dense.default: _item}


def _item(op: _torch.Op, args: tuple, kwargs: dict) -> float | int | bool | complex:
    (tensor,) = args
    return op(_torch.redistributed(tensor, [Replicate()] * tensor.device_mesh.ndim, for_op=op), **kwargs)
