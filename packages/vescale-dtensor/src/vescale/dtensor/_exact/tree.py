"""Sums in an order that no layout changes.

A dim is summed in two steps, and every addition adds two tensors element by element. Such an addition is one IEEE
operation per element, which no kernel, vector width, number of threads or device computes otherwise::

    inside of a block     [0 1 2 3 4]  ->  [0+2, 1+3+4]  ->  one value        by halves, the odd one to the last
    between the blocks    b0 b1 b2 b3 b4  ->  b0+b1, b2+b3, b4  ->  ...       by neighbors, the odd one is carried

The first step needs no communication where ranks hold whole blocks (`blocks.py`). The second stays local as long as
neighbors lie on one rank. Then the partial sums, at most one per block, are gathered, and every rank adds the rest.

Sums of several dims take the first step for all of them, from the last dim to the first, then the second in the same
order, so that as little as possible is gathered. The error of such a sum grows with the logarithm of its length.

float16 and bfloat16 are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import block_size, num_blocks_of
from .laid import Laid

__all__ = ["add_blocks", "sum_dims", "sum_in_blocks", "widened"]


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype in which it is added up."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def sum_dims(operand: Laid, dims: Sequence[int], num_blocks: int) -> Laid:
    """Return the sums over some dims, which keep size 1.

    Args:
        operand: of a floating-point or complex dtype; the sums have the dtype of `widened`.
        dims: non-negative.
        num_blocks: of each dim. Shards that cut blocks are gathered first.
    """
    dims = sorted(dims, reverse=True)
    for dim in dims:
        operand = operand.in_blocks(dim, num_blocks)
    operand = operand.map(widened)
    for dim in dims:
        operand = sum_in_blocks(operand, dim, num_blocks)
    for dim in dims:
        operand = add_blocks(operand, dim)
    return operand


def sum_in_blocks(operand: Laid, dim: int, num_blocks: int) -> Laid:
    """Return the sums of the blocks of one dim; ranks hold whole blocks."""
    size = operand.shape[dim]
    shape = _with_size(operand.shape, dim, num_blocks_of(size, num_blocks) if size else 0)
    return operand.replaced(_block_sums(operand.local, dim, block_size(size, num_blocks)), shape)


def _block_sums(local: Tensor, dim: int, size: int) -> Tensor:
    if size == 1:
        return local
    missing = -local.shape[dim] % size
    if missing:  # zeros, added to the last block alone
        local = F.pad(local, [0, 0] * (local.ndim - 1 - dim) + [0, missing])
    local = local.unflatten(dim, (local.shape[dim] // size, size))
    while (length := local.shape[dim + 1]) > 1:
        half = length // 2
        sums = local.narrow(dim + 1, 0, half) + local.narrow(dim + 1, half, half)
        if length % 2:
            sums.narrow(dim + 1, half - 1, 1).add_(local.narrow(dim + 1, 2 * half, 1))
        local = sums
    return local.squeeze(dim + 1)


def add_blocks(operand: Laid, dim: int) -> Laid:
    """Return the sum over one dim by neighbors; it keeps size 1 and is the same on all ranks that held a part."""
    if operand.shape[dim] == 0:
        operand = operand.gathered([dim])
        nothing = operand.local.new_zeros(_with_size(operand.local.shape, dim, 1))
        return operand.replaced(nothing, _with_size(operand.shape, dim, 1))
    while (size := operand.shape[dim]) > 1:
        if operand.axes(dim) and not operand.has_pairs(dim):
            operand = operand.gathered([dim])
        operand = operand.replaced(_pair_sums(operand.local, dim), _with_size(operand.shape, dim, -(-size // 2)))
    return operand.gathered([dim])


def _pair_sums(local: Tensor, dim: int) -> Tensor:
    length = local.shape[dim]
    pairs = local.narrow(dim, 0, length // 2 * 2).unflatten(dim, (length // 2, 2))
    evens, odds = pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)
    if length % 2 == 0:
        return evens + odds
    return torch.cat([evens + odds, local.narrow(dim, length - 1, 1)], dim)


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
