"""Operators that no layout changes: they copy, compare, select or make elements, and add nothing.

Pointwise operators, views and random operators are known by their tags, and operators without floating-point operands
by their dtypes: integers have no rounding. This is the rest, by name.
"""

from __future__ import annotations

import functools

from torch import Tensor

from .._torch import dispatch

__all__ = ["adds_nothing", "is_index_put_that_adds"]

MAKES = frozenset(
    {"arange", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full", "full_like", "linspace"}
    | {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor"}
    | {"zero", "zero_", "zeros", "zeros_like", "fill", "fill_"}
)

COPIES = frozenset(
    {"_reshape_copy", "_to_copy", "_unsafe_view", "alias_copy", "as_strided_scatter", "block_diag", "cat", "clone"}
    | {"complex", "constant_pad_nd", "copy", "copy_", "detach_", "diag_embed", "diagonal_backward", "diagonal_scatter"}
    | {"expand_copy", "fill_diagonal_", "flip", "gather", "index", "index_copy", "index_copy_"}
    | {"index_fill", "index_fill_", "index_select", "lift", "lift_fresh", "lift_fresh_copy", "masked_scatter"}
    | {"masked_scatter_", "masked_select", "nonzero", "permute_copy", "repeat", "repeat_interleave", "resize_", "roll"}
    | {"rot90", "select_backward", "select_scatter", "set_", "slice_backward", "slice_scatter", "split_with_sizes_copy"}
    | {"squeeze_", "stack", "t_", "take", "transpose_", "tril", "tril_", "triu", "triu_", "unbind_copy", "unsafe_split"}
    | {"unsqueeze_", "view_copy"}
)

SELECTS = frozenset(
    {"_local_scalar_dense", "_unique2", "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "argsort"}
    | {"bucketize", "cummax", "cummin", "equal", "isin", "item", "kthvalue", "max", "median", "min", "mode"}
    | {"nanmedian", "searchsorted", "sort", "topk", "unique_consecutive", "unique_dim"}
)

ASKS = frozenset(
    {"_assert_async", "_assert_scalar", "_fused_sdp_choice", "_has_compatible_shallow_copy_type", "is_nonzero"}
    | {"is_pinned", "is_same_size", "is_set_to", "_pin_memory", "_version", "record_stream", "sym_size", "sym_stride"}
)

SETS = frozenset({"scatter", "scatter_"})  # without `reduce`
PUTS = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "put", "put_"})
ACCUMULATE = 3  # position


def adds_nothing(op: dispatch.Op, args: tuple, kwargs: dict) -> bool:
    """Return whether an operator only copies, compares, selects or makes elements."""
    if _is_known(op):
        return True
    name = op.overloadpacket.__name__
    if name in SETS:
        return "reduce" not in dispatch.argument_names(op)
    return name in PUTS and not is_index_put_that_adds(args, kwargs)


def is_index_put_that_adds(args: tuple, kwargs: dict) -> bool:
    """Return whether an ``index_put`` adds to what is there."""
    return bool(args[ACCUMULATE] if len(args) > ACCUMULATE else kwargs.get("accumulate", False))


@functools.cache
def _is_known(op: dispatch.Op) -> bool:
    name = op.overloadpacket.__name__
    return dispatch.is_view(op) or dispatch.is_random(op) or name in MAKES | COPIES | SELECTS | ASKS


def is_exact_dtype(tensor: Tensor) -> bool:
    """Return whether additions of a tensor's elements never round."""
    return not (tensor.is_floating_point() or tensor.is_complex())
