"""Which operator gets which rule, and why.

An operator runs on full operands (:func:`fallback`) if stock DTensor has no rule for it, only guesses one, or has a
rule that does not support these placements. The tables list the exceptions, and the operators whose stock rule is
wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from .._placements.hooks import WIDER
from .._torch import dispatch
from .convolution import convolution, convolution_backward
from .decompose import compose
from .gather import gather, gather_axes, gather_in_layout
from .memory_order import in_orders_of_kernels
from .metadata import change_metadata
from .operands import is_sharded
from .review import whole_where_empty
from .versions import count_writes, writes_lists

__all__ = ["fallback", "operator_handlers", "pointwise_operators"]

# Stock normalizes over the local batch only, updates running statistics from it, and aborts if those are sharded.
GATHER: tuple[str, ...] = (
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional",
    "batch_norm_backward",
)

# Operators without a rule, for which stock DTensor guesses placements from their definition. They are pointwise, so the
# guess is right.
GUESSED_RIGHT = frozenset(
    {
        "complex",
        "elu_backward",
        "fill.Scalar",
        "floor_divide",
        "floor_divide.Scalar",
        "floor_divide_.Scalar",
        "hardswish",
        "hardswish_",
        "leaky_relu_backward",
        "lift",
        "lift_fresh",
        "log_sigmoid_forward",
        "masked_fill.Tensor",
        "masked_fill_.Tensor",
        "mish_backward",
        "polar",
        "rsub.Tensor",
        "softplus_backward",
        "zero",
    }
)

# Pointwise operators without a rule, for which stock guesses that they need full operands.
POINTWISE: tuple[str, ...] = (
    "fill.Tensor",
    "fill_.Tensor",
    "floor_divide_.Tensor",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "log_sigmoid_backward",
)

# Operators whose definition consists of operators that keep the shards. Stock runs the operator itself on a shard: a
# loss is then divided by the number of local elements.
COMPOSE: tuple[str, ...] = (
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "addr",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "count_nonzero",
    "count_nonzero.dim_IntList",
    "dist",
    "glu",
    "glu_backward",
    "huber_loss",
    "huber_loss_backward",
    "logsumexp",  # stock forgets keepdim in its placements
    "mse_loss",
    "mse_loss_backward",
    "mv",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    "soft_margin_loss",
    "soft_margin_loss_backward",
    "std_mean.correction",
    "trace",
    "vdot",
)

AS_STRIDED: tuple[str, ...] = ("as_strided", "as_strided_copy", "as_strided_scatter")

# Operators with a handler of torch's own, which gathers values; `review` does not see them.
EXTREME_POSITION: tuple[str, ...] = ("argmax", "argmin")


@functools.cache
def operator_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return a handler for every operator that stock DTensor guesses or has a wrong rule for."""
    whole = ((GATHER, gather), (AS_STRIDED, gather_in_layout), (EXTREME_POSITION, extreme_position))
    computed = (
        (COMPOSE, compose),
        (("convolution",), convolution),
        (("convolution_backward",), convolution_backward),
    )
    table = {op: change_metadata for op in dispatch.operators() if _changes_metadata(op)}
    table |= {op: gather for op in dispatch.operators() if _is_guess(op)}
    table |= {op: fallback for op in dispatch.operators() if _is_misnamed(op)}
    table |= {op: count_writes for op in dispatch.operators() if writes_lists(op)}
    return table | _by_operator(whole) | in_orders_of_kernels(_by_operator(computed))


@functools.cache
def pointwise_operators() -> frozenset[dispatch.Op]:
    """Return the operators that get stock's rule for pointwise ones."""
    return frozenset(op for name in POINTWISE if (op := dispatch.overload(name)) is not None)


def _by_operator(rules: Iterable[tuple[Iterable[str], dispatch.Handler]]) -> dict[dispatch.Op, dispatch.Handler]:
    return {op: rule for names, rule in rules for name in names if (op := dispatch.overload(name)) is not None}


def _changes_metadata(op: dispatch.Op) -> bool:
    return torch.Tag.inplace_view in op.tags and not (dispatch.is_random(op) or dispatch.is_composite(op))


def _is_guess(op: dispatch.Op) -> bool:
    if dispatch.is_random(op) or dispatch.is_composite(op) or not dispatch.is_guessed(op):
        return False
    return op.name().removeprefix("aten::") not in GUESSED_RIGHT and op not in pointwise_operators()


def _is_misnamed(op: dispatch.Op) -> bool:
    """Return whether stock, which goes by names, errs about what ``op`` writes.

    To stock an operator whose name ends in ``_`` writes to its first operand and returns it, ``x << 1``
    (``__lshift__``) as well; ``torch.sort(x, out=...)``, an overload without "out" in its name, returns new tensors.
    """
    if dispatch.is_random(op) or dispatch.is_composite(op):
        return False
    packet, _, overload = op.name().removeprefix("aten::").partition(".")
    return dispatch.schema(op).is_mutable != (packet.endswith("_") or "out" in overload)


def fallback(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator for which stock DTensor finds no placements, or raises an error looking for them."""
    if op.overloadpacket in _OF_STORAGE:
        return change_metadata(op, args, kwargs)
    return gather(op, args, kwargs)


def extreme_position(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run ``argmax`` or ``argmin`` by stock's handler, on integers that collectives take.

    Of equal values the first counts. The handler takes that of the first rank, which is another one if the position is
    that in all of a tensor whose shards are not in the order of its elements. It calls ``to_local``, for which autograd
    would make the history of a view anew, and cannot inside an operator.
    """
    tensor, *rest = args
    placements = dispatch.placements_of(tensor)
    tensor = dispatch.wrap(dispatch.local_tensor(tensor), tensor.device_mesh, placements, tensor)
    if not rest or rest[0] is None:
        shards = [(axis, p) for axis, p in enumerate(placements) if is_sharded(p)]
        in_order = len(shards) == 1 and shards[0][1].dim == 0
        tensor = tensor if in_order else gather_axes(op, tensor, tuple(axis for axis, _ in shards))
    return whole_where_empty(op, (tensor.to(WIDER.get(tensor.dtype, tensor.dtype)), *rest), kwargs)


_OF_STORAGE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("resize_", "resize_as_", "resize", "set_", "set_data", "record_stream", "_resize_output_")
    if hasattr(torch.ops.aten, name)
)
