"""Functions that keep other tensors on a device than a CPU would keep, or tensors without data.

``scaled_dot_product_attention`` keeps queries, keys, values, the output, and one float32 number per query and head,
as FlashAttention does (Dao et al., arXiv 2205.14135): scores are computed again in backward, which is not counted as
operations. ``dropout`` keeps a boolean mask. Calls are found by a function mode, and in torch's own functions by their
names in ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .recorder import Recorder

_ATTENTION, _DROPOUT = functional.scaled_dot_product_attention, functional.dropout


class DeviceFunctions(TorchFunctionMode):
    """Replaces these functions while it is open; in one thread at a time."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __enter__(self) -> DeviceFunctions:
        functional.scaled_dot_product_attention, functional.dropout = self._attend, self._drop
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        functional.scaled_dot_product_attention, functional.dropout = _ATTENTION, _DROPOUT
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one torch function."""
        replaced = {_ATTENTION: self._attend, _DROPOUT: self._drop}
        return replaced.get(func, func)(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        result: Tensor = _Attention.apply(self.recorder, query, key, value, attn_mask)
        return result

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:  # noqa: A002
        if not training or p == 0.0:
            return input
        result: Tensor = _Dropout.apply(self.recorder, input)
        return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
        shape = *batch, *query.shape[-3:-1], value.shape[-1]
        dim = recorder.split_dim(query)
        output = _output(recorder, shape, query, dim)
        per_query = recorder.create(shape[:-1], torch.float32, like=query, dim=None if dim in (None, -1) else dim + 1)
        scores = query.shape[:-1].numel() * key.shape[-2]
        recorder.count(2 * scores * (query.shape[-1] + value.shape[-1]), output)
        if query.dim() > 3:
            recorder.heads.append((query.shape[-3], key.shape[-3]))
        ctx.save_for_backward(query, key, value, output, per_query, *([] if mask is None else [mask]))
        ctx.recorder, ctx.flops = recorder, 2 * scores * (2 * query.shape[-1] + 2 * value.shape[-1])
        return output

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Any, ...]:
        query, key, value, _, _, *masks = ctx.saved_tensors
        recorder = ctx.recorder
        recorder.count(ctx.flops)
        given = [recorder.create(t.shape, t.dtype, like=t, dim=recorder.split_dim(t)) for t in (query, key, value)]
        of_mask = [recorder.create(mask.shape, mask.dtype, like=mask, dim=None) for mask in masks if mask.requires_grad]
        return None, *given, of_mask[0] if of_mask else None


def _output(recorder: Recorder, shape: tuple[int, ...], query: Tensor, dim: int | None) -> Tensor:
    """Return memory for the output: kernels put the heads of a token side by side, so that a view joins them."""
    if len(shape) < 4:
        return recorder.create(shape, query.dtype, like=query, dim=dim)
    *batch, heads, length, width = shape
    moved = {-3: -2, -2: -3}.get(dim, dim) if dim is not None else None
    return recorder.create((*batch, length, heads, width), query.dtype, like=query, dim=moved).transpose(-3, -2)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, value: Tensor) -> Tensor:
        dim = recorder.split_dim(value)
        mask = recorder.create(value.shape, torch.bool, like=value, dim=dim)
        ctx.recorder, ctx.dim = recorder, dim
        ctx.save_for_backward(mask)
        return recorder.create(value.shape, value.dtype, like=value, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        return None, ctx.recorder.create(grad.shape, grad.dtype, like=grad, dim=ctx.dim)
