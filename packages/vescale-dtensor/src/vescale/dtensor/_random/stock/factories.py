"""``torch.distributed.tensor.rand`` and ``randn``: what one device draws, cut by the placements.

Stock torch draws them on the shard, on CUDA from an offset of its own, and not at all on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from ..._torch import dispatch as _torch

__all__ = ["draw_as_one_device"]


def draw_as_one_device(stock: Callable) -> Callable:
    """Return the function behind both factories that draws by the rules for ``uniform_`` and ``normal_``."""

    @functools.wraps(stock)
    def helper(init_op: Callable, *args: object, **kwargs: object) -> DTensor:
        if init_op in (torch.rand, torch.randn):
            tensor = stock(torch.empty, *args, **kwargs)
            if _fill(init_op, tensor):
                return tensor
        return stock(init_op, *args, **kwargs)

    return helper


def _fill(factory: Callable, tensor: DTensor) -> bool:
    """Fill a new tensor, unless the rules are disabled."""
    if torch.ops.aten.uniform_.default not in _torch.handler_table():
        return False
    with torch.no_grad():
        tensor.uniform_() if factory is torch.rand else tensor.normal_()
    return True
