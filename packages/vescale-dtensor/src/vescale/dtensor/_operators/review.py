"""Review each decision of stock sharding propagation, before the operator runs.

The table lists the wrong decisions. Each can be detected from shapes, placements and meshes, so all ranks detect it
alike:

===========================  =========================================================  ==============================
stock decision               consequence                                                replacement
===========================  =========================================================  ==============================
redistributes an operand     the operator writes to the copy, not to the tensor         full operands, written back
that it writes to
adds a number to partial     the cached decision of a 0-dim tensor applies:             the sums are reduced first
sums                         every rank adds the full number
returns a view of a          writes to the view are lost                                see ``copies``
redistributed operand
makes a shard partial        fails after other operands were gathered                   full operands
does not redistribute        the operator uses their local parts in the wrong           full operands
keyword operands             placements
treats an empty list of      the result is marked as sharded over a reduced dim         all dims
dims as no dims to reduce
converts a partial tensor    the partial values are rounded, not their sum; complex     the tensor is reduced first
to a coarser dtype, partial  numbers have no maximum
maxima to complex numbers
gives partial truths (any)   several ranks with True count as several: any(0).sum()     the result is reduced at once
asks parts of sums for       any() of parts that add up to zero is True                 the sums are reduced first
truths
scatters sums that it        the same sums have other bits in another operator          the sums are reduced first
compares
runs on partial maxima or    the maximum of the results is not the result of the        the extremes are taken first
minima                       maximum, except of :data:`MONOTONE` operators
gives norms of parts, which  norm(dim=0).sum() has another value, norm.neg_() no sign   the result is reduced at once
count as partial sums
fills a partial tensor, or   every rank's part is the value, so the sum is n times it   the first rank holds the value;
makes one like it                                                                       the new tensor is replicated
merges or splits dims in     a rank's part of the view is no view of its part           those axes are gathered first
shards of several axes, or
in interleaved ones
views uneven shards, or      bytes of an element lie on two ranks; the bits are those   those axes are gathered first
sums, in another dtype       of parts of a sum
adds a dim to interleaved   the shards are taken for those of the new dim              the same placements
shards (view_as_real)
takes the real parts of    they are no factors of that of the product               the product is taken first
complex factors
indexes with an index of     index and source are sharded at different positions        full operands
another shape
shards stacks of matrices    matrices of other positions meet, or shards of other sizes  see ``solvers``
on dims of one number
writes at a mask             the mask is not cut as the tensor is                       ``masked_fill`` or full
                                                                                        operands
gives the result a placement a second use fails, on some ranks only                     see ``lookup``
with a mask
computes a local shape       the shards are treated as if they were even                see ``gradients``
runs on an empty shard       the operator fails on that rank and the others hang, or    the axis is gathered first
                             its result for no elements (``nan``) is reduced
===========================  =========================================================  ==============================

The last row applies to operators outside of :data:`EMPTY_IS_FINE`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .._containers import leaves, map_leaves
from .._layout.shards import local_shape
from .._placements.rules import refuse_ragged
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .copies import remember_copy
from .exact import compares_scattered_sums
from .gather import gather, gather_axes, whole_placements
from .gradients import zeros_around
from .lookup import look_up
from .operands import are_norms, block_axes, dtensors, empty_axes, is_sharded, uneven_axes, written_arguments
from .solvers import SOLVERS, align_batches

__all__ = [
    "EMPTY_IS_FINE",
    "is_fine_where_empty",
    "review",
    "view_of_copy",
    "whole_where_empty",
    "without_elements",
]

Instead = Callable[[], object]

EMPTY_IS_FINE = frozenset(
    {
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "_to_copy",
        "_unsafe_view",
        "addmm",
        "alias",
        "baddbmm",
        "bmm",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy_",
        "detach",
        "embedding",
        "embedding_dense_backward",
        "empty_like",
        "expand",
        "fill_",
        "full_like",
        "lift_fresh",
        "masked_fill",
        "mm",
        "narrow",
        "native_layer_norm",
        "native_layer_norm_backward",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "permute",
        "select",
        "slice",
        "slice_backward",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "sum",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "zero_",
        "zeros_like",
    }
)
"""Operators that stock DTensor runs correctly on empty shards, in addition to all pointwise operators."""

INDEXING = frozenset(
    {"gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
)
"""Operators with the arguments ``self, dim, index`` and optionally a source."""


INDEX_PUT = frozenset({"index_put", "index_put_", "_index_put_impl_"})


REDUCTIONS = frozenset({"amax", "amin", "mean", "nansum", "std", "sum", "var", "var_mean"})
"""Reductions for which an empty list of dims means all of them."""


OF_NORMS = frozenset({"_to_copy", "cat", "clone", "linalg_vector_norm", "stack"})
"""Operators that leave norms of parts, which only lists of norms have, as they are, or take their norm."""

OF_NEW_VALUES = ("empty_like", "full_like", "new_full", "new_ones", "ones_like")
"""Operators that make a tensor like another one; torch's gradients keep their parts in `new_empty_strided`."""

EXTREMES = ("max", "min")

MONOTONE = frozenset(
    {"_to_copy", "_unsafe_view", "alias", "cat", "clone", "copy_", "detach", "expand", "index_select", "permute"}
    | {"reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind"}
    | {"unsqueeze", "view", "view_as_real", "diagonal", "unfold", "zeros_like", "new_zeros", "select_backward"}
    | {"slice_backward", "amax", "amin", "max", "min", "embedding"}
)
"""Operators after which the maximum of partial results is the result of the maximum."""

SHAPED = frozenset({"_reshape_alias", "_unsafe_view", "reshape", "view", "view_copy"})
"""Operators that give a tensor another shape."""


def without_elements(op: dispatch.Op, args: tuple, kwargs: dict, _schema: object) -> object:
    """Give another shape to a tensor without elements, or join it to others; else return NotImplemented.

    Stock's rule for that would never end, and that of ``squeeze`` takes a dim of size 0 for one of size 1. ``cat``
    leaves out vectors without elements, whatever the others are; stock's rule looks for their other dims.
    """
    name = op.overloadpacket.__name__
    if name == "cat" and op._overloadname == "default":
        return _joined(op, args, kwargs)
    if (name not in SHAPED and name != "squeeze") or op._overloadname == "dtype":
        return NotImplemented
    if not isinstance(args[0], DTensor) or args[0].numel():
        return NotImplemented
    keeps_shape = name in SHAPED and tuple(args[1]) == tuple(args[0].shape)  # so that the placements stay
    return NotImplemented if keeps_shape else gather(op, args, kwargs)


def _joined(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    tensors, *dim = args
    rest = [tensor for tensor in tensors if tensor.shape != (0,)]
    if len(rest) in (0, len(tensors)) or all(tensor.ndim == 1 for tensor in rest):
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return op([tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in rest], *dim, **kwargs)


def review(op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision) -> Instead | None:
    """Return None to accept the stock decision, or a function that computes the result in another way."""
    name = op.overloadpacket.__name__
    whole = functools.partial(gather, op, args, kwargs)
    _check_out(op, args, kwargs, decision)
    if not (dispatch.is_view(op) or name in OF_NORMS) and any(map(are_norms, dtensors(args, kwargs))):
        return whole if dispatch.written_arguments(op) else functools.partial(_of_whole, op, args, kwargs)
    if _changes_wrongly(op, args, kwargs, decision) or any(map(_is_cut, kwargs.values())):
        return whole
    if torch.Tag.pointwise in op.tags and _adds_a_number(args, decision):
        return whole if dispatch.written_arguments(op) else functools.partial(_of_whole, op, args, kwargs)
    if name == "view_as_real" and (axes := _product_axes(args[0])):
        return functools.partial(view_of_copy, op, args, kwargs, whole_placements(args[0], axes))
    if name == "view_as_real" and any(map(dispatch.is_strided_shard, dispatch.placements_of(args[0]))):
        return functools.partial(_in_same_placements, op, args[0], decision)
    if dispatch.is_view(op) and _is_moved(args[0], decision):
        return functools.partial(view_of_copy, op, args, kwargs, decision.needed[0].placements)
    if name in ("view", "_unsafe_view") and (axes := _misfitting_axes(args[0], decision.output)):
        return functools.partial(view_of_copy, op, args, kwargs, whole_placements(args[0], axes))
    if name in SOLVERS and (instead := align_batches(op, args, kwargs, decision)):
        return instead
    if name in INDEXING and _has_other_shape(args):
        return whole
    if name in INDEX_PUT and any(isinstance(index, DTensor) and index.dtype == torch.bool for index in args[1]):
        return _masked_write(op, args) or whole
    if decision.output is not None and any(map(dispatch.is_masked, decision.output.placements)):
        runs_on_shards = name == "gather" and args[0].dtype != torch.bool  # there is no sum of booleans
        return functools.partial(look_up, op, args, kwargs) if runs_on_shards else whole
    if (name in ("all", "any") and _is_partial(args[0])) or (name not in MONOTONE and _keeps_extremes(args, decision)):
        return whole if dispatch.written_arguments(op) else functools.partial(_of_whole, op, args, kwargs)
    if name in ("all", "any") and decision.output is not None and _has_partial(decision.output.placements):
        extreme = Partial("max" if name == "any" else "min")
        if dispatch.written_arguments(op):
            return whole
        return functools.partial(_reduced, op, args, kwargs, decision, extreme)
    if compares_scattered_sums(name, args, decision):
        return whole if dispatch.written_arguments(op) else functools.partial(_of_whole, op, args, kwargs)
    if name in REDUCTIONS and args[0].ndim and len(args) > 1 and args[1] == []:
        return functools.partial(op, args[0], list(range(args[0].ndim)), *args[2:], **kwargs)
    if name == "_to_copy" and _is_partial(args[0]) and _changes_parts(args[0], kwargs.get("dtype")):
        return functools.partial(_of_whole, op, args, kwargs)
    if name in ("fill_", *OF_NEW_VALUES) and _is_partial(args[0]):
        return whole if name == "fill_" else functools.partial(_like_whole, op, args, kwargs)
    if name == "select_backward" or (name == "slice_backward" and uneven_axes(args[0])):
        return functools.partial(zeros_around, op, args, kwargs)
    if not is_fine_where_empty(op, name):
        if any(map(empty_axes, dtensors(args, kwargs))):
            return functools.partial(whole_where_empty, op, args, kwargs)
        if any(spec is not None and empty_axes(spec) for spec in map(_spec, leaves(decision.needed or ()))):
            return whole
    if name == "linalg_vector_norm" and any(map(dispatch.is_norm, decision.output.placements)):
        return functools.partial(_reduced, op, args, kwargs, decision, None)
    return None


def _check_out(op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision) -> None:
    """Refuse an ``out`` of another shape, which torch would resize, with all memory that its views share.

    Raises:
        UnsupportedOperator: an ``out`` has not the shape of the result.
    """
    if "out" not in op._overloadname:
        return
    results = decision.output if isinstance(decision.output, list | tuple) else (decision.output,)
    for tensor, result in zip(written_arguments(op, args, kwargs), results, strict=False):
        if isinstance(tensor, DTensor) and result is not None and result.tensor_meta.shape != tensor.shape:
            shape = tuple(result.tensor_meta.shape)
            way_out = f"expected `out` of the result's shape {shape}, got {tuple(tensor.shape)}: give it that shape"
            raise UnsupportedOperator.for_operands(op, (tensor,), way_out)


def _is_moved(tensor: object, decision: dispatch.Decision) -> bool:
    """Return whether stock would redistribute the operator's first operand."""
    if decision.needed is None or not isinstance(tensor, DTensor):
        return False
    return dispatch.placements_of(tensor) != decision.needed[0].placements


def _misfitting_axes(tensor: DTensor, output: dispatch.Spec | None) -> tuple[int, ...]:
    """Return the axes along which some rank's part of a view is not a view of its part of the tensor.

    Those are axes with interleaved shards, axes that shard one dim together, and for a view in another dtype the axes
    that shard the last dim, if a rank holds another number of bytes of the view than of the tensor; and partial sums
    seen in another dtype.

    Example: over 3 ranks, shape (4, 8) in two parts gives the ranks 1 + 1 + 0 rows of each part. Merged to (32,), a
    part has 16 elements. The ranks should hold 6 + 6 + 4 of them, but have 8 + 8 + 0.
    """
    if output is None:
        return ()
    given, new_dtype = dispatch.placements_of(tensor), output.tensor_meta.dtype
    is_cast = new_dtype != tensor.dtype
    partial = tuple(axis for axis, p in enumerate(given) if is_cast and p.is_partial())
    last = tensor.ndim - 1
    dims = [p.dim if is_sharded(p) else None for p in given]
    asked = [
        dim is not None and (dispatch.is_strided_shard(p) or dims.count(dim) > 1 or (is_cast and dim == last))
        for p, dim in zip(given, dims, strict=True)
    ]
    if not any(asked):
        return partial
    mesh = tuple(tensor.device_mesh.shape)

    def num_bytes(shape: torch.Size, placements: tuple[Placement, ...], dtype: torch.dtype) -> list[int]:
        kept = tuple(Replicate() if p.is_partial() else p for p in placements)
        shapes = (local_shape(tuple(shape), mesh, coord, kept) for coord in itertools.product(*map(range, mesh)))
        # another dtype changes the last dim only, which has to fit where there are no elements, too
        return [math.prod(sizes[-1:] if is_cast else sizes) * dtype.itemsize for sizes in shapes]

    fits = num_bytes(tensor.shape, given, tensor.dtype) == num_bytes(output.shape, output.placements, new_dtype)
    return partial if fits else (*partial, *(axis for axis, is_asked in enumerate(asked) if is_asked))


def _product_axes(tensor: DTensor) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(dispatch.placements_of(tensor)) if p.is_partial("product"))


def view_of_copy(op: dispatch.Op, args: tuple, kwargs: dict, placements: tuple[Placement, ...]) -> object:
    """Return a view of the redistributed operand, and record that its memory is a copy."""
    local = dispatch.redistributed(args[0], placements, for_op=op)
    remember_copy(args[0], placements, local)
    return op(dispatch.wrap(local, args[0].device_mesh, placements, args[0]), *args[1:], **kwargs)


def _in_same_placements(op: dispatch.Op, tensor: DTensor, decision: dispatch.Decision) -> DTensor:
    """Return a view with one dim more, at the end. Stock takes interleaved shards of the last dim for those of that."""
    meta = decision.output.tensor_meta
    like = torch.empty_strided(meta.shape, meta.stride, device="meta")
    return dispatch.wrap(op(dispatch.local_tensor(tensor)), tensor.device_mesh, tensor.placements, like)


def is_fine_where_empty(op: dispatch.Op, name: str) -> bool:
    """Return whether an operator is right where a rank has no elements."""
    return torch.Tag.pointwise in op.tags or name in EMPTY_IS_FINE or name.startswith("_foreach")


def _changes_wrongly(op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision) -> bool:
    """Return whether stock would redistribute an operand that the operator writes to, or make a shard partial."""
    if decision.needed is None:
        return False
    written = {id(tensor) for tensor in written_arguments(op, args, kwargs)}
    for given, needed in zip(leaves(args), leaves(decision.needed), strict=False):
        if not isinstance(given, DTensor) or not hasattr(needed, "placements"):
            continue
        pairs = [(p, q) for p, q in zip(dispatch.placements_of(given), needed.placements, strict=True) if p != q]
        if pairs and id(given) in written:
            return True
        if any(q.is_partial() and not (p.is_replicate() and q.is_partial("sum")) for p, q in pairs):
            return True
    return False


def _adds_a_number(args: tuple, decision: dispatch.Decision) -> bool:
    """Return whether stock would redistribute because the operands are partial and a number or a 0-dim tensor.

    Its cache does not distinguish the two, but a number cannot be made partial: every rank would add the full number.
    """
    if decision.needed is None or not any(map(_is_partial, args)):
        return False
    whole = [arg for arg in args if not _is_partial(arg)]
    return any(isinstance(arg, int | float | complex) or (isinstance(arg, Tensor) and arg.ndim == 0) for arg in whole)


def _is_cut(value: object) -> bool:
    return isinstance(value, DTensor) and not all(p.is_replicate() for p in dispatch.placements_of(value))


def _is_partial(value: object) -> bool:
    return isinstance(value, DTensor) and _has_partial(dispatch.placements_of(value))


def _has_partial(placements: Iterable[Placement]) -> bool:
    return any(p.is_partial() for p in placements)


def _has_other_shape(args: tuple) -> bool:
    """Return whether index or source is shorter than the tensor in a dim other than the indexed one."""
    tensor, dim = args[0], args[1]
    others = [other for other in args[2:] if isinstance(other, Tensor) and other.ndim == tensor.ndim]
    kept = [d for d in range(tensor.ndim) if d != dim]
    return any(other.shape[d] != tensor.shape[d] for other in others for d in kept)


def _masked_write(op: dispatch.Op, args: tuple) -> Instead | None:
    """Return ``masked_fill`` for ``x[mask] = number``, which keeps the shards; None for other writes at a mask."""
    tensor, indices, value, *accumulate = args
    fills = len(indices) == 1 and indices[0].shape == tensor.shape and value.ndim == 0 and not any(accumulate)
    if not fills or value.dtype != tensor.dtype:
        return None
    fill = torch.ops.aten.masked_fill_.Tensor if dispatch.written_arguments(op) else torch.ops.aten.masked_fill.Tensor
    return functools.partial(fill, tensor, indices[0], value)


def _changes_parts(tensor: DTensor, target: torch.dtype | None) -> bool:
    """Return whether a conversion loses digits or the order, so that partial values must not be converted alone."""
    source = tensor.dtype
    if target is None or target == source:
        return False
    if not (target.is_floating_point or target.is_complex):
        return True
    if target.is_complex and _has_extremes(tensor):
        return True
    is_float = source.is_floating_point or source.is_complex
    return is_float and torch.finfo(target).eps > torch.finfo(source).eps


def _has_extremes(value: object) -> bool:
    """Return whether a tensor has partial maxima or minima."""
    return isinstance(value, DTensor) and any(p.is_partial(o) for p in dispatch.placements_of(value) for o in EXTREMES)


def _keeps_extremes(args: tuple, decision: dispatch.Decision) -> bool:
    """Return whether stock would run the operator on partial maxima or minima."""
    needed = args if decision.needed is None else decision.needed
    pairs = zip(leaves(args), leaves(needed), strict=False)
    return any(_has_extremes(given) and any(map(_is_extreme, _placements(spec))) for given, spec in pairs)


def _is_extreme(placement: Placement) -> bool:
    return any(placement.is_partial(op) for op in EXTREMES)


def _placements(value: object) -> tuple[Placement, ...]:
    return tuple(getattr(value, "placements", ()))


def _spec(value: object) -> dispatch.Spec | None:
    return value if isinstance(value, dispatch.Spec) else None


def _of_whole(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run ``op`` on its operands reduced over the axes where they are partial."""

    def bring(tensor: Tensor) -> Tensor:
        if not _is_partial(tensor):
            return tensor
        return gather_axes(op, tensor, tuple(i for i, p in enumerate(dispatch.placements_of(tensor)) if p.is_partial()))

    return op(*map_leaves(bring, args, Tensor), **kwargs)


def _reduced(op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision, way: Partial | None) -> DTensor:
    """Run a reduction on the shards and reduce the results of the ranks at once.

    Args:
        op: the reduction of ``args`` and ``kwargs``.
        args: its operand and dims.
        kwargs: the other arguments.
        decision: stock's decision.
        way: how to reduce truth values, of which there are no sums; None: as stock does when the result is used.
    """
    tensor, output = args[0], decision.output
    needed = tensor.placements if decision.needed is None else decision.needed[0].placements
    local = op(dispatch.redistributed(tensor, needed, for_op=op), *args[1:], **kwargs)
    parts = [way if way is not None and p.is_partial() else p for p in output.placements]
    whole = [Replicate() if p.is_partial() else p for p in output.placements]
    like = torch.empty_strided(output.tensor_meta.shape, output.tensor_meta.stride, device="meta")
    values = local if way is None else local.to(torch.uint8)
    moved = dispatch.redistributed(dispatch.wrap(values, tensor.device_mesh, parts, like), whole, for_op=None)
    return dispatch.wrap(moved.to(local.dtype), tensor.device_mesh, whole, like)


def _like_whole(op: dispatch.Op, args: tuple, kwargs: dict) -> DTensor:
    """Return a new tensor like a partial one, with Replicate in place of Partial, so that its values count once."""
    tensor = args[0]
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return op(dispatch.wrap(dispatch.local_tensor(tensor), tensor.device_mesh, placements, tensor), *args[1:], **kwargs)


def whole_where_empty(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule after gathering operands along the axes on which a shard is empty; others stay sharded."""
    refuse_ragged(op, args, kwargs)
    strided = any(map(dispatch.is_strided_shard, itertools.chain(*map(dispatch.placements_of, dtensors(args, kwargs)))))
    written = written_arguments(op, args, kwargs)
    if strided or any(isinstance(tensor, DTensor) and empty_axes(tensor) for tensor in written):
        return gather(op, args, kwargs)

    if dispatch.is_view(op):
        return view_of_copy(op, args, kwargs, whole_placements(args[0], empty_axes(args[0])))

    def bring(tensor: Tensor) -> Tensor:
        axes = (*empty_axes(tensor), *block_axes(tensor)) if isinstance(tensor, DTensor) else ()
        return gather_axes(op, tensor, axes) if axes else tensor

    return dispatch.stock_dispatch(op, map_leaves(bring, args, Tensor), map_leaves(bring, kwargs, Tensor))
