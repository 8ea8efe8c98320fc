"""Convolutions of a sharded batch.

Each sample is convolved on its own, so an input sharded over the batch and whole weights need no communication, and the
weight's gradient is a sum over ranks: what stock DTensor does. Its rules for everything else (channels, space, partial
operands) fail on some ranks or return another value, so those run on whole operands.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Shard

from .._torch import dispatch as _torch
from .gather import gather
from .operands import empty_axes

__all__ = ["convolution"]

NUM_OPERANDS = {"convolution": 1, "convolution_backward": 2}  # that have a batch: input; grad_output and input


def convolution(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule where the batch alone is sharded, alike in all operands that have one."""
    batched = args[: NUM_OPERANDS[op._overloadpacket.__name__]]
    others = [arg for arg in args[len(batched) :] if isinstance(arg, DTensor)]
    placements = {_torch.placements_of(tensor) if isinstance(tensor, DTensor) else None for tensor in batched}
    fits = (
        len(placements) == 1
        and None not in placements
        and all(p == Shard(0) or p.is_replicate() for p in next(iter(placements)))
        and all(p.is_replicate() for tensor in others for p in _torch.placements_of(tensor))
        and not any(map(empty_axes, batched))
    )
    return _torch.stock_dispatch(op, args, kwargs) if fits else gather(op, args, kwargs)
