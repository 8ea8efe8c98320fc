"""A norm that has the same bits however its elements are distributed and in whatever order they are added.

Addition of floating-point numbers depends on the order, addition of integers does not. So every |g|^p is scaled by a
power of two, the same on all ranks, to less than 1, and cut into two integers; integers are added over elements,
tensors and ranks. Only the total is converted back to a floating-point number:

    |g / 2^e|^p  =  0.hhhhhhhhhhhhhhhh llllllllllllllll ...      2^e > the largest |g| of all ranks: one all-reduce, MAX
                       31 bits          31 bits, rounded
    sums over elements and ranks:  [h >> 31, h & mask, l >> 31, l & mask]         one all-reduce, SUM, of integers

It takes two collectives (`counting.py`), because the scale depends on the largest element of all ranks.

The error of an element is at most 2^-63 of the largest one, so the error of a sum of n elements is less than
n * 2^-63 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .counting import Counting

__all__ = ["EXACT_NORMS", "exact_norm"]

#: Norm types whose power of an element is the same in every implementation: |g| and g * g.
EXACT_NORMS = (1.0, 2.0)

#: Bits of an integer: the sum over any chunk that fits into memory fits into 64 bits.
_BITS = 31

#: Elements that are widened to float64 at a time.
_CHUNK = 2**22


def exact_norm(parts: Sequence[Sequence[Tensor]], norm_type: float, counting: Counting, device: torch.device) -> Tensor:
    """Return the norm of all elements of all ranks, a 0-dim float64 tensor; the host does not wait.

    Args:
        parts: Local tensors of each class; only those of needed classes are read.
        norm_type: One of `EXACT_NORMS`.
        counting: How the classes are added over ranks.
        device: Where to compute.
    """
    parts = [part if share.is_needed else () for part, share in zip(parts, counting.shares, strict=True)]
    largest, nan = counting.largest(_largest([grad for part in parts for grad in part], device)).unbind()
    exponent = torch.frexp(largest).exponent.clamp(-1000, 1000)
    words = [_words(part, norm_type, _power_of_two(-exponent), device) for part in parts]
    norm = _as_float(counting.sum(words, zero=torch.zeros(4, dtype=torch.int64, device=device)))
    norm = (norm.sqrt() if norm_type == 2 else norm) * _power_of_two(exponent)
    return torch.where(nan > 0, math.nan, torch.where(torch.isfinite(largest), norm, largest))


def _largest(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return ``[the largest |g| apart from nan, whether there is a nan]`` in float64."""
    filled = [grad for grad in grads if grad.numel()]
    if not filled:
        return torch.zeros(2, dtype=torch.float64, device=device)
    found = torch.stack([torch.linalg.vector_norm(g, math.inf).to(device, torch.float64) for g in filled])
    nan = found.isnan()
    return torch.stack([found.masked_fill(nan, 0.0).max(), nan.any().double()])


def _words(grads: Sequence[Tensor], norm_type: float, scale: Tensor, device: torch.device) -> Tensor:
    """Return the scaled sum of the powers of the elements, as four integers; the first is the integer part."""
    total = torch.zeros(4, dtype=torch.int64, device=device)
    for chunk in _chunks(grads, device):
        powers = chunk.mul_(scale)
        powers = powers.mul_(powers) if norm_type == 2 else powers.abs_()
        high = powers.mul_(2**_BITS).floor()
        low = powers.sub_(high).mul_(2**_BITS).round_()
        sums = torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])
        total += torch.stack([sums >> _BITS, sums & (2**_BITS - 1)], dim=1).view(-1)
    return total


def _chunks(grads: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the elements in float64, copied, a limited number at a time."""
    pending: list[Tensor] = []
    size = 0
    for grad in grads:
        for piece in grad.reshape(-1).split(_CHUNK):
            if size + piece.numel() > _CHUNK:
                yield torch.cat(pending)
                pending, size = [], 0
            pending.append(piece.to(device, torch.float64))
            size += piece.numel()
    if pending:
        yield torch.cat(pending)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to the power of an integer, exactly, as a float64 tensor."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _as_float(words: Tensor) -> Tensor:
    """Return the number that the four integer sums represent; equal numbers give equal bits."""
    whole, first, second, third = words.unbind()
    middle = first + second + (third >> _BITS)
    whole = whole + (middle >> _BITS)
    mask = 2**_BITS - 1
    return whole.double() + ((middle & mask).double() * 2.0**-_BITS + (third & mask).double() * 2.0 ** (-2 * _BITS))
