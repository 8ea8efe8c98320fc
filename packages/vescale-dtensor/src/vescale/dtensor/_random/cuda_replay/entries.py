"""Entry points of the replay: check that a draw can be replayed, and replay it.

A rule of a random operator passes the boxes that a rank holds, the memory of each, and the shape and memory order of
the global tensor. All dims are first permuted to memory order, in which a draw is a flat range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._layout.boxes import Box
from ..._torch.dispatch import Op
from .backend import CUDA, Backend
from .geometry import values_per_block
from .replay import Fill, UnexpectedAdvance, bernoulli_part, dropout_part, fill_part
from .selftest import bernoulli_is_exact, distrust, dropout_is_logical, dropout_vector, fill_is_exact

__all__ = ["Views", "replay_bernoulli", "replay_fill", "replay_native_dropout"]

Views = Sequence[tuple[Box, Tensor]]

LEAST_BERNOULLI = 2**24
"""Below, drawing everything is faster than computing words, and takes at most 128 MiB."""

MOST_BERNOULLI = 2**31 - 1
"""Beyond, the native kernel's thread numbers leave 32 bits."""


def replay_fill(
    op: Op,
    views: Views,
    *,
    shape: Sequence[int],
    layout: Sequence[int] | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
    backend: Backend = CUDA,
) -> bool:
    """Fill a rank's part of a tensor with what the in-place operator ``op`` draws on one device.

    Args:
        op: one of ``stock.draw.PIECEWISE_OPS``.
        views: global boxes that this rank holds, each with its memory; none if it only moves the generator.
        shape: shape of the global tensor, which must be dense if it has 2^31 bytes or more.
        layout: its dims from the slowest to the fastest in memory; None means row-major.
        dtype: its element type.
        device: where it is.
        args: positional arguments of ``op`` after the tensor.
        kwargs: keyword arguments but ``generator``.
        generator: the generator to advance; None means the device's default one.
        backend: the device's operators.

    Returns:
        Whether it is done. If not, the generator is as before: draw the full tensor and overwrite the views.

    Example:
        >>> box = ((0, 0), (2, 4))
        >>> view = torch.empty(2, 4)
        >>> options = {"shape": (4, 4), "dtype": view.dtype, "device": view.device}
        >>> replay_fill(torch.ops.aten.normal_.default, [(box, view)], **options)       # not a CUDA device
        False
    """
    device, (shape, views) = torch.device(device), _in_memory_order(shape, layout, views)
    numel = math.prod(shape)
    values = values_per_block(op, dtype, args)
    if values is None or not _can_replay(backend, device, numel, [view for _, view in views]):
        return False
    source = backend.generator(device, generator)
    fill = Fill(op, values, dtype, tuple(args), dict(kwargs or {}))
    if source is None or not fill_is_exact(backend, fill, numel, device, source):
        return False
    try:
        fill_part(backend, fill, views, shape=shape, device=device, generator=source)
    except UnexpectedAdvance as error:
        distrust(backend, device, op, (dtype, values), str(error))
        return False
    return True


def replay_native_dropout(
    local: Tensor,
    out: Tensor,
    mask: Tensor,
    views_of: Callable[[Tensor], Views],
    *,
    shape: Sequence[int],
    layout: Sequence[int] | None = None,
    is_dense: bool = True,
    p: float,
    train: bool | None = True,
    backend: Backend = CUDA,
) -> bool:
    """Fill ``out`` and ``mask`` with a rank's part of ``native_dropout``; False: draw the full tensor.

    Args:
        local: this rank's part of the input.
        out: memory for its part of the output, of the same shape and dtype.
        mask: memory for its part of the mask, bool.
        views_of: gives the global boxes of a tensor like ``local``, with the view of it that holds each.
        shape: shape of the global input.
        layout: its dims from the slowest to the fastest in memory; None means row-major.
        is_dense: whether the global input fills a block of memory, so that the kernel may read it in vectors.
        p: probability of a zero.
        train: False draws nothing, and is left to the caller, as ``p`` of 1 is.
        backend: the device's operators.

    Example:
        >>> x = torch.ones(2, 4)
        >>> out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
        >>> replay_native_dropout(x, out, mask, lambda t: [(((0, 0), (2, 4)), t)], shape=(4, 4), p=0.5)  # not on CUDA
        False
    """
    numel, device, dtype = math.prod(shape), local.device, local.dtype
    if train is False or not 0 <= p < 1 or not dtype.is_floating_point or dtype.itemsize == 1:
        return False
    if not _can_replay(backend, device, numel, [local, out, mask]) or numel > backend.grid(device).index_limit:
        return False
    op, divisor = torch.ops.aten.native_dropout.default, min(numel & -numel, 16) if is_dense else 1
    found = dropout_vector(backend, op, divisor, dtype, device)
    if found is None:
        return False
    vector, widest = found
    if vector == 1:  # elements read one by one are numbered in logical order
        if not (is_dense and _is_row_major(layout)) and not dropout_is_logical(backend, op, dtype, device, widest):
            return False
        layout = None
    ordered, (xs, ys, masks) = _all_in_memory_order(shape, layout, views_of, (local, out, mask))
    views = [(box, x, y, kept) for (box, x), (_, y), (_, kept) in zip(xs, ys, masks, strict=True)]
    try:
        dropout_part(backend, views, shape=ordered, device=device, p=p, vector=vector, widest=widest)
    except UnexpectedAdvance as error:
        distrust(backend, device, op, (dtype, divisor), str(error))
        return False
    return True


def replay_bernoulli(
    probabilities: Tensor,
    out: Tensor,
    views_of: Callable[[Tensor], Views],
    *,
    shape: Sequence[int],
    layout: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    backend: Backend = CUDA,
    least: int = LEAST_BERNOULLI,
) -> bool:
    """Fill ``out`` with a rank's part of ``bernoulli_(probabilities)``; False: draw the full tensor.

    Args:
        probabilities: this rank's part of the probabilities, floats in [0, 1].
        out: memory for the result, of the same shape.
        views_of: gives the global boxes of a tensor like ``out``, with the view of it that holds each.
        shape: shape of the global tensor.
        layout: its dims from the slowest to the fastest in memory; only row-major tensors are computed.
        generator: the generator to advance; None means the device's default one.
        backend: the device's operators.
        least: smallest number of elements of the global tensor for which words are computed.

    Example:
        >>> p = torch.full((2, 4), 0.5)
        >>> replay_bernoulli(p, torch.empty_like(p), lambda t: [(((0, 0), (2, 4)), t)], shape=(4, 4))  # not on CUDA
        False
    """
    numel, device = math.prod(shape), out.device
    if not least <= numel <= MOST_BERNOULLI or not _is_row_major(layout) or not probabilities.is_floating_point():
        return False
    if not _can_replay(backend, device, numel, [probabilities, out]):
        return False
    source = backend.generator(device, generator)
    if source is None or not bernoulli_is_exact(backend, torch.ops.aten.bernoulli_.Tensor, out.dtype, device, source):
        return False
    _, (ps, outs) = _all_in_memory_order(shape, layout, views_of, (probabilities, out))
    views = [(box, p, target) for (box, p), (_, target) in zip(ps, outs, strict=True)]
    bernoulli_part(views, shape=shape, generator=source)
    return True


def _can_replay(backend: Backend, device: torch.device, numel: int, tensors: Sequence[Tensor]) -> bool:
    if not backend.serves(device) or any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    return numel > backend.grid(device).most_threads and not backend.is_capturing()


def _is_row_major(layout: Sequence[int] | None) -> bool:
    return layout is None or tuple(layout) == tuple(range(len(layout)))


def _in_memory_order(
    shape: Sequence[int], layout: Sequence[int] | None, views: Views
) -> tuple[tuple[int, ...], list[tuple[Box, Tensor]]]:
    """Permute the dims of shape, boxes and views so that the last one is the fastest in memory."""
    views = [(box, tensor) for box, tensor in views if tensor.numel()]
    if _is_row_major(layout):
        return tuple(shape), views

    def permuted(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in layout)

    ordered = [((permuted(offsets), permuted(sizes)), tensor.permute(*layout)) for (offsets, sizes), tensor in views]
    return permuted(shape), ordered


def _all_in_memory_order(
    shape: Sequence[int],
    layout: Sequence[int] | None,
    views_of: Callable[[Tensor], Views],
    tensors: Sequence[Tensor],
) -> tuple[tuple[int, ...], list[list[tuple[Box, Tensor]]]]:
    """Permute the dims of the shape and of all views of tensors that are sharded alike."""
    ordered = [_in_memory_order(shape, layout, views_of(tensor)) for tensor in tensors]
    return ordered[0][0], [views for _, views in ordered]
