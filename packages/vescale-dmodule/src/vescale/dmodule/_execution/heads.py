"""Multi-head attention of torch over a part of its heads.

Torch's function merges batch and heads into one dim, and takes the size of a head from the query. Neither fits the part
of a rank. This one keeps heads in a dim of their own, as many as the weights have, so it runs on DTensors, whose heads
are sharded, and on the local tensors of a rank::

    in_proj_weight   q q | k k | v v     InterleavedShard(0, 3)   -->  (batch, heads, sequence, head) of each
    out_proj.weight  columns             Shard(1)                 -->  a summand of the output on each rank

Values and the numbers that dropout draws are those of torch's function.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .._boundary.edges import unwrapped, wrapped

__all__ = ["WholeHeads", "attention_of_heads", "forward_of_heads", "has_part_of_heads", "install_heads"]

ORIGINAL = functional.multi_head_attention_forward
SIGNATURE = inspect.signature(ORIGINAL)


def has_part_of_heads(operands: Iterable[object]) -> bool:
    """Return whether some parameters among the operands are sharded."""
    parameters = (t for t in operands if isinstance(t, DTensor) and isinstance(t, nn.Parameter))
    return any(placement.is_shard() for parameter in parameters for placement in parameter.placements)


def install_heads(module: nn.Module) -> None:
    """Give each multi-head attention of torch in a module that forward."""
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            vars(part)["forward"] = forward_of_heads(part)


def forward_of_heads(module: nn.MultiheadAttention) -> Callable[..., object]:
    """Return the forward of a module that calls :func:`attention_of_heads` in place of torch's function."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: object, **kwargs: object) -> object:
        with WholeHeads():
            return own(*args, **kwargs)

    return forward


class WholeHeads(TorchFunctionMode):
    """Call :func:`attention_of_heads` in place of torch's function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (attention_of_heads if func is ORIGINAL else func)(*args, **(kwargs or {}))


def attention_of_heads(*args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """Return what ``torch.nn.functional.multi_head_attention_forward`` returns, from the heads that the weights have.

    Args:
        args: as of that function. Weights, biases and outputs may be DTensors, or hold a part of the heads; the query,
            key and value are whole, of shape (sequence, batch, features) or (sequence, features).
        kwargs: the same.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    if given.static_k is not None or given.static_v is not None or given.embed_dim_to_check % given.num_heads:
        return ORIGINAL(*args, **kwargs)
    is_batched = given.query.dim() == 3
    if not is_batched:
        given.query, given.key, given.value = (t.unsqueeze(1) for t in (given.query, given.key, given.value))
        if given.key_padding_mask is not None:
            given.key_padding_mask = given.key_padding_mask.unsqueeze(0)
    query, key, value = _heads(given)
    output, weights = _attend(given, query, key, value)
    output = output.transpose(1, 2).flatten(2)
    output = functional.linear(output, given.out_proj_weight, given.out_proj_bias)
    output = _in_order(output.transpose(0, 1))
    if weights is not None and given.average_attn_weights:
        weights = weights.mean(1)
    if is_batched:
        return output, weights
    return output.squeeze(1), None if weights is None else weights.squeeze(0)


def _in_order(tensor: Tensor) -> Tensor:
    """Return a tensor with its dims in order in memory, as that of torch, along which dropout draws.

    Summands stay summands, which DTensor would add first.
    """
    if not isinstance(tensor, DTensor):
        return tensor.contiguous()
    placements = tensor.placements
    gradient = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    local = unwrapped(tensor, gradient).contiguous()
    return wrapped(local, tensor.device_mesh, placements, shape=tensor.shape, gradient=gradient)


def _heads(given: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of shape (batch, heads, sequence, head)."""
    query, key, value = _projected(given)
    if given.bias_k is not None:
        rows = len(query)
        key = torch.cat([key, given.bias_k.expand(rows, -1, -1)], 1)
        value = torch.cat([value, given.bias_v.expand(rows, -1, -1)], 1)
    size = given.embed_dim_to_check // given.num_heads
    query, key, value = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (query, key, value))
    if given.add_zero_attn:
        key, value = (torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in (key, value))
    return query, key, value


def _projected(given: SimpleNamespace) -> tuple[Tensor, ...]:
    """Return queries, keys and values of shape (batch, sequence, features): a sharded batch stays in the first dim."""
    if not given.use_separate_proj_weight and given.query is given.key and given.key is given.value:
        return functional.linear(given.query.transpose(0, 1), given.in_proj_weight, given.in_proj_bias).chunk(3, -1)
    if given.use_separate_proj_weight:
        weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    else:
        weights = given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    operands = (t.transpose(0, 1) for t in (given.query, given.key, given.value))
    return tuple(map(functional.linear, operands, weights, biases))


def _attend(given: SimpleNamespace, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output of each head, and the weights if they are wanted."""
    is_causal = given.is_causal and given.key_padding_mask is None and not given.need_weights
    mask = None if is_causal else _mask(given, query)
    probability = given.dropout_p if given.training else 0.0
    if not given.need_weights:
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, mask, probability, is_causal), None
    scores = query * math.sqrt(1.0 / query.shape[-1]) @ key.transpose(-2, -1)
    weights = functional.softmax(scores if mask is None else scores + mask, -1)
    if probability > 0:
        weights = functional.dropout(weights, probability)
    return weights @ value, weights


def _mask(given: SimpleNamespace, query: Tensor) -> Tensor | None:
    """Return what is added to scores of shape (batch, heads, queries, keys)."""
    mask, padding = given.attn_mask, given.key_padding_mask
    if mask is not None:
        mask = _added(mask, query)
        mask = mask.unflatten(0, (query.shape[0], -1)) if mask.dim() == 3 and len(mask) > 1 else mask
        mask = mask[None] if mask.dim() == 3 else mask
    if padding is not None:
        padding = _added(padding, query)[:, None, None]
        mask = padding if mask is None else mask + padding
    extra = (given.bias_k is not None) + bool(given.add_zero_attn)  # keys that all queries see
    return functional.pad(mask, (0, extra)) if mask is not None and extra else mask


def _added(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -math.inf)
