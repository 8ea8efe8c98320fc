"""Fused attention on sharded operands.

Every attention kernel treats each (batch, head) pair on its own, so operands sharded alike over the batch or over the
heads need no communication. Stock DTensor has such rules for CUDA kernels, but none for the flash kernel that
``scaled_dot_product_attention`` chooses on CPU; this file adds it, forward and backward, with any mask it broadcasts::

    query            (B, H,    L, E)        Shard(0) or Shard(1)
    key, value       (B, H_kv, S, E)        the same
    attn_mask        (B or 1, H or 1, L, S) the same where the dim is larger than 1, else Replicate
    log-sum-exp      (B, H,    L)           the same

Other placements (sharded over the sequence, uneven, H_kv that does not divide) are gathered first: an implicit
redistribution, refused where those are refused.

A fused kernel draws its dropout mask in a kernel-specific order, so dropout inside a fused kernel is refused. The
unfused path of ``scaled_dot_product_attention`` (``SDPBackend.MATH``, which CPU always uses with dropout) draws the
mask of one device.

The rule is a handler instead of a ``register_sharding`` rule, because stock propagation neither redistributes keyword
operands (the mask) nor includes their placements in its cache key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch import dispatch
from ..errors import UnsupportedRandomOperator
from .vocabulary import operand

__all__ = ["attention_handlers", "is_fused_without_dropout", "refuse_dropout", "run_fused"]

aten = torch.ops.aten

BATCH, HEAD = 0, 1
NUM_DIMS = 4


def attention_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of the CPU flash kernel."""
    return {
        aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_cpu_backward,
    }


# ------------------------------------------------------------------------------------------------- dropout


def is_fused_without_dropout(op: dispatch.Op, args: tuple, kwargs: dict) -> bool:
    """Return whether the call is a fused attention operator without dropout."""
    names = dispatch.argument_names(op)
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    return (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)) == 0


def refuse_dropout(op: dispatch.Op, args: tuple, kwargs: dict) -> None:
    """Raise UnsupportedRandomOperator if a fused attention operator would draw a dropout mask."""
    if not is_fused_without_dropout(op, args, kwargs):
        raise UnsupportedRandomOperator.for_tensor(
            op, args[0], "use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) or eager attention for attention dropout"
        )


# ------------------------------------------------------------------------------------------------- other kernels


def run_fused(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run a fused kernel by the stock rule, on operands whose batch and head counts divide evenly over the mesh axes.

    Stock DTensor shards 3 key heads as 2 + 1 and 12 query heads as 6 + 6 over 2 ranks, and silently pairs them wrongly.
    """
    refuse_dropout(op, args, kwargs)
    operands = args[:3]
    if not all(isinstance(x, DTensor) for x in operands):
        return dispatch.stock_dispatch(op, args, kwargs)
    chosen = _placements(*operands)
    return dispatch.stock_dispatch(op, (*(_fitted(op, x, chosen) for x in operands), *args[3:]), kwargs)


def _fitted(op: dispatch.Op, tensor: DTensor, chosen: tuple[Placement, ...]) -> DTensor:
    placements = tuple(
        Replicate() if isinstance(p, Shard) and p.dim in (BATCH, HEAD) and new.is_replicate() else p
        for p, new in zip(tensor.placements, chosen, strict=True)
    )
    if placements == tensor.placements:
        return tensor
    return dispatch.wrap(dispatch.redistributed(tensor, placements, for_op=op), tensor.device_mesh, placements, tensor)


# ------------------------------------------------------------------------------------------------- the CPU kernel


def _flash_cpu(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    refuse_dropout(op, args, kwargs)
    query, key, value, *rest = args
    placements = _placements(query, key, value)
    return _run(op, (query, key, value), rest, kwargs, query.device_mesh, placements)


def _flash_cpu_backward(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[DTensor, ...]:
    grad_out, query, key, value, out, logsumexp, *rest = args
    operands = (grad_out, query, key, value, out, logsumexp)
    return _run(op, operands, rest, kwargs, out.device_mesh, out.placements)


def _placements(query: Tensor, key: Tensor, value: Tensor) -> tuple[Placement, ...]:
    """Choose one placement per mesh axis for all operands: that of the first sharded operand, if it fits."""
    operands = (query, key, value)
    mesh = next(operand.device_mesh for operand in operands if isinstance(operand, DTensor))
    sharded = [operand.placements for operand in operands if isinstance(operand, DTensor)]
    left = [[operand.shape[dim] for operand in operands] for dim in (BATCH, HEAD)]
    chosen: list[Placement] = []
    for axis in range(mesh.ndim):
        dims = [p[axis].dim for p in sharded if type(p[axis]) is Shard and p[axis].dim in (BATCH, HEAD)]
        num_ranks = mesh.size(axis)
        if dims and all(size % num_ranks == 0 for size in left[dims[0]]):
            left[dims[0]] = [size // num_ranks for size in left[dims[0]]]
            chosen.append(Shard(dims[0]))
        else:
            chosen.append(Replicate())
    return tuple(chosen)


def _run(
    op: dispatch.Op,
    operands: tuple[Tensor, ...],
    rest: Sequence[object],
    kwargs: dict,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> tuple[DTensor, ...]:
    """Run ``op`` on the local parts of ``operands`` in ``placements``; all results have the same placements."""
    local = [_in_memory_order_of(x, operand(op, x, mesh, placements)) for x in operands]
    local_kwargs, meta_kwargs = dict(kwargs), dict(kwargs)
    mask = kwargs.get("attn_mask")
    if mask is not None:
        local_kwargs["attn_mask"] = operand(op, mask, mesh, _mask_placements(mask, placements))
        meta_kwargs["attn_mask"] = _meta(mask)
    results = op(*local, *rest, **local_kwargs)
    likes = op(*map(_meta, operands), *rest, **meta_kwargs)
    return tuple(dispatch.wrap(result, mesh, placements, like) for result, like in zip(results, likes, strict=True))


def _mask_placements(mask: Tensor, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    missing = NUM_DIMS - mask.ndim  # a mask of fewer dims broadcasts over the leading ones

    def shares(placement: Placement) -> bool:
        return isinstance(placement, Shard) and placement.dim >= missing and mask.shape[placement.dim - missing] > 1

    return tuple(Shard(p.dim - missing) if shares(p) else Replicate() for p in placements)


def _in_memory_order_of(tensor: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` with the memory order of the dims of ``tensor``.

    The result takes the memory order of the operands, and views of the result depend on it. A redistribution does not
    preserve the order. An expanded dim comes first: the kernel needs the last dim innermost.
    """

    def outer_to_inner(dim: int) -> tuple[float, int]:
        return -(tensor.stride(dim) or math.inf), -tensor.shape[dim]

    order = sorted(range(tensor.ndim), key=outer_to_inner)
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
