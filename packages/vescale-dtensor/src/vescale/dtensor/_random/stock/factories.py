"""The factories of ``torch.distributed.tensor`` make what those of ``torch`` make on one device.

``rand`` and ``randn`` are fills. Stock torch draws them on the shard, on CUDA from an offset of its own, and raises on
the CPU. ``linspace`` and ``logspace``, which torch has from 2.14 on, compute each shard from bounds of its own. Those
are rounded, so integers may differ by one; here every rank computes all values and keeps its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from ..._torch import dispatch
from .fills import UNIFORM

__all__ = ["make_as_one_device"]

DRAWN = {torch.rand: DTensor.uniform_, torch.randn: DTensor.normal_}
SPACED = (torch.linspace, torch.logspace)


def make_as_one_device(stock: Callable) -> Callable:
    """Return the function behind all factories of ``torch.distributed.tensor``: ours for those named above."""

    @functools.wraps(stock)
    def helper(init_op: Callable, *args: object, **kwargs: object) -> DTensor:
        if UNIFORM in dispatch.handler_table():  # else disabled
            if init_op in DRAWN:
                tensor = stock(torch.empty, *args, **kwargs)
                with torch.no_grad():
                    DRAWN[init_op](tensor)
                return tensor
            if init_op in SPACED:
                return _spaced(stock, init_op, *args, **kwargs)
        return stock(init_op, *args, **kwargs)

    return helper


def _spaced(stock: Callable, init_op: Callable, size: Sequence[int], *, dtype: torch.dtype | None, **given) -> DTensor:
    values = [given.pop(name) for name in ("start", "end")]
    base = {"base": given.pop("base")} if "base" in given else {}
    dtype = init_op(*values, 1, **base, dtype=dtype, device="meta").dtype
    tensor = stock(torch.empty, size, dtype=dtype, **given)
    local = dispatch.local_tensor(tensor)
    if tensor.device_mesh.get_coordinate() is not None:
        whole = init_op(*values, size[0], **base, dtype=dtype, device=local.device)
        with torch.no_grad():
            local.copy_(dispatch.part_of(whole, tensor))
    return tensor
