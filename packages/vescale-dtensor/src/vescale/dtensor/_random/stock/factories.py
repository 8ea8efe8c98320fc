"""``torch.distributed.tensor.rand`` and ``randn``: what one device draws, cut by the placements.

Stock torch draws them on the shard, on CUDA from an offset of its own, and not at all on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from ..._torch import dispatch as _torch

__all__ = ["install_factories"]


def install_factories() -> None:
    """Route both factories through the rules for ``uniform_`` and ``normal_``. Called once, on import."""
    _torch.hook_random_factories(_fill)


def _fill(factory: Callable, tensor: DTensor) -> bool:
    """Fill a new tensor, unless the rules are disabled."""
    if torch.ops.aten.uniform_.default not in _torch.handler_table():
        return False
    with torch.no_grad():
        tensor.uniform_() if factory is torch.rand else tensor.normal_()
    return True
