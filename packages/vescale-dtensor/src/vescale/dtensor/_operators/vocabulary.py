"""Operators on a sharded vocabulary: the embedding, and ``log_softmax`` over the logits.

**Embedding** with weight ``Shard(0)`` on some mesh axes, uneven and empty shards included. Every rank looks up the
tokens of its own rows and has zeros for the others, so the sum over ranks is the lookup of one device, bit for bit::

    weight axis   Shard(0)     Shard(1)      Replicate
    indices       Replicate    Replicate     as they are
    output        Partial(sum) Shard(last)   as the indices

Stock DTensor returns a placement whose mask is dropped at the first use, so a second use of the output fails, and every
RMS norm uses its input twice. If weight and indices are sharded over the same axis, the weight is gathered, as in fully
sharded data parallelism; the output then stays sharded over the batch.

**log_softmax** over a sharded dim (``softmax`` keeps the stock rule, which gathers)::

    m = max over ranks of local max,   s = sum over ranks of sum exp(x - m),   result = x - m - log s

Its two reductions move one number per row, those of the gradient one. They are a part of the operator, not a
redistribution of operands. Source: the usual stable formula; ``cross_entropy`` continues in ``loss``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._placements.types import BlockShard
from .._torch import dispatch
from .._torch.plain import counts_as_replicated
from ..errors import UnsupportedOperator

__all__ = ["axes_sharded_on", "local_index", "operand", "reduced", "shards_or_whole", "vocab_handlers"]

aten = torch.ops.aten

ROWS, COLUMNS = 0, 1  # dims of an embedding's weight


def vocab_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of the embedding and of ``log_softmax``, forward and backward."""
    return {
        aten.embedding.default: _embedding,
        aten.embedding_dense_backward.default: _embedding_backward,
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
    }


# ------------------------------------------------------------------------------------------------- placements


def axes_sharded_on(tensor: Tensor, dim: int) -> list[int]:
    """Return the mesh axes that shard ``dim`` of ``tensor`` in contiguous chunks; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    return [axis for axis, placement in enumerate(tensor.placements) if placement == Shard(dim)]


def shards_or_whole(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements with everything but contiguous shards (Partial, strided) replaced by Replicate."""
    return tuple(p if type(p) in (Shard, BlockShard) else Replicate() for p in placements)


def operand(op: dispatch.Op, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return the shard of an operand; a plain tensor counts as replicated where that is allowed.

    Raises:
        UnsupportedOperator: the tensor is plain and ``implicit_replication`` is not active.
        RuntimeError: a redistribution is needed where those must be explicit.
    """
    if not isinstance(tensor, DTensor):
        if not counts_as_replicated(tensor):
            raise UnsupportedOperator.for_mixed(op, tensor)
        tensor = dispatch.wrap(tensor, mesh, [Replicate()] * mesh.ndim, tensor)
    return dispatch.redistributed(tensor, placements, for_op=op)


def reduced(
    kind: str,
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    axes: Sequence[int],
    shape: Sequence[int],
) -> Tensor:
    """Reduce ``local``, of global ``shape``, over ``axes``; ``placements`` apply to the other axes."""
    partial = [Partial(kind) if axis in axes else p for axis, p in enumerate(placements)]
    whole = [Replicate() if axis in axes else p for axis, p in enumerate(placements)]
    like = torch.empty(tuple(shape), dtype=local.dtype, device="meta")
    return dispatch.redistributed(dispatch.wrap(local, mesh, partial, like), whole, for_op=None)


def local_index(indices: Tensor, offset: int, size: int, total: int) -> tuple[Tensor, Tensor]:
    """Return the positions of global ``indices`` in a shard of ``[offset, offset + size)``, and a mask of held ones.

    The position is 0 for indices of another shard, and -1, which every kernel refuses, outside ``[0, total)``.
    """
    here = indices - offset
    held = here.ge(0) & here.lt(size)
    valid = indices.ge(0) & indices.lt(total)
    return torch.where(held, here, valid.to(here.dtype) - 1), held


# ------------------------------------------------------------------------------------------------- embedding


def _embedding(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    weight, indices = args[:2]
    if not axes_sharded_on(weight, ROWS):
        return dispatch.stock_dispatch(op, args, kwargs)
    mesh = weight.device_mesh
    index_placements = indices.placements if isinstance(indices, DTensor) else (Replicate(),) * mesh.ndim
    rules = [_embedding_axis(w, i, indices.ndim) for w, i in zip(weight.placements, index_placements, strict=True)]
    of_weight, of_indices, of_output = zip(*rules, strict=True)
    ids = operand(op, indices, mesh, of_indices)
    rows = dispatch.redistributed(weight, of_weight, for_op=op)
    (offset, _), (size, _) = dispatch.local_box(weight.shape, mesh, _without_partial(of_weight))
    output = _rows(op, rows, *local_index(ids, offset, size, weight.shape[ROWS]))
    like = torch.empty((*indices.shape, weight.shape[COLUMNS]), dtype=output.dtype, device="meta")
    return dispatch.wrap(output, mesh, of_output, like)


def _embedding_axis(weight: Placement, indices: Placement, ndim: int) -> tuple[Placement, Placement, Placement]:
    """Return the placements of weight, indices and output on one mesh axis."""
    if type(indices) in (Shard, BlockShard):
        return Replicate(), indices, indices
    if weight == Shard(ROWS):
        return weight, Replicate(), Partial()
    if weight == Shard(COLUMNS):
        return weight, Replicate(), Shard(ndim)
    if weight == Partial():
        return weight, Replicate(), Partial()
    return Replicate(), Replicate(), Replicate()


def _without_partial(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def _rows(op: dispatch.Op, rows: Tensor, index: Tensor, held: Tensor) -> Tensor:
    """Look up ``index`` in the local rows; return zeros where an index is not ``held``."""
    if rows.shape[ROWS] == 0:
        rows = rows.new_zeros(1, rows.shape[COLUMNS])
    return op(rows, index).masked_fill_(held.logical_not().unsqueeze(-1), 0)


def _embedding_backward(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Count tokens over the global batch if the gradient is divided by the counts; otherwise run the stock rule."""
    grad, indices, num_weights, padding_idx, scale_grad_by_freq = args
    if scale_grad_by_freq and isinstance(indices, DTensor):
        mesh, whole = indices.device_mesh, [Replicate()] * indices.device_mesh.ndim
        local = [operand(op, tensor, mesh, whole) for tensor in (grad, indices)]
        result = op(*local, num_weights, padding_idx, scale_grad_by_freq)
        return dispatch.wrap(result, mesh, whole, result)
    return dispatch.stock_dispatch(op, args, kwargs)


# ------------------------------------------------------------------------------------------------- log_softmax


def _log_softmax(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    x, dim, half_to_float = args
    axes = axes_sharded_on(x, dim)
    if not axes:
        return dispatch.stock_dispatch(op, args, kwargs)
    mesh, placements = x.device_mesh, shards_or_whole(x.placements)
    local = _widened(dispatch.redistributed(x, placements, for_op=op))
    row = [1 if d == dim else size for d, size in enumerate(x.shape)]
    shifted = local - reduced("max", _max(local, dim), mesh, placements, axes, row)
    total = reduced("sum", shifted.exp().sum(dim, keepdim=True), mesh, placements, axes, row)
    dtype = torch.float32 if half_to_float else x.dtype
    result = (shifted - total.log()).to(dtype)
    return dispatch.wrap(result, mesh, placements, torch.empty(x.shape, device="meta"))


def _log_softmax_backward(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    grad, output, dim, input_dtype = args
    axes = axes_sharded_on(output, dim)
    if not axes:
        return dispatch.stock_dispatch(op, args, kwargs)
    mesh, placements = output.device_mesh, output.placements
    grad = _widened(operand(op, grad, mesh, placements))
    row = [1 if d == dim else size for d, size in enumerate(output.shape)]
    total = reduced("sum", grad.sum(dim, keepdim=True), mesh, placements, axes, row)
    result = (grad - _widened(dispatch.local_tensor(output)).exp() * total).to(input_dtype)
    return dispatch.wrap(result, mesh, placements, torch.empty(output.shape, device="meta"))


def _max(local: Tensor, dim: int) -> Tensor:
    if local.shape[dim]:
        return local.amax(dim, keepdim=True)
    return local.new_full([1 if d == dim else size for d, size in enumerate(local.shape)], -torch.inf)


def _widened(local: Tensor) -> Tensor:
    """Return ``local`` in the dtype in which torch's kernels accumulate, so that only the result is rounded."""
    return local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
