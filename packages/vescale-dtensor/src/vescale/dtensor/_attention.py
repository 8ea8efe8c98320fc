"""Sharding rules for attention kernels that stock DTensor does not know.

On CPU ``scaled_dot_product_attention`` without dropout runs a flash kernel for which stock DTensor has no rule. The kernel
treats every (batch, head) pair on its own, so sharding the batch dim or the head dim of all operands alike is exact.

Shapes: query ``(B, H, L, E)``, key and value ``(B, H_kv, S, E)``, log-sum-exp ``(B, H, L)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register_attention_rules"]

aten = torch.ops.aten
BATCH, HEAD = 0, 1

Rule = tuple[list, list]


def register_attention_rules() -> None:
    """Teach DTensor the CPU flash attention kernel, forward and backward. Safe to call more than once."""
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_backward)


def _layouts(attn_mask: object) -> list[tuple[object, object]]:
    """Return the acceptable ``(placement of operands, placement of the mask)`` pairs on one mesh axis."""
    layouts: list[tuple[object, object]] = [(Replicate(), None if attn_mask is None else Replicate())]
    for dim in (BATCH, HEAD):
        mask = None
        if attn_mask is not None:  # a mask dim of size 1 is shared by all rows or heads
            shape = attn_mask.shape
            mask = Shard(dim) if len(shape) == 4 and shape[dim] > 1 else Replicate()
        layouts.append((Shard(dim), mask))
    return layouts


def _forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None) -> Sequence[Rule]:  # noqa: ARG001
    return [([p, p], [p, p, p, None, None, mask, None]) for p, mask in _layouts(attn_mask)]


def _backward(  # noqa: PLR0913
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None  # noqa: ARG001
) -> Sequence[Rule]:
    return [([p, p, p], [p] * 6 + [None, None, mask, None]) for p, mask in _layouts(attn_mask)]
