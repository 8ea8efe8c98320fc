"""Views that merge or split a dim with uneven shards, and operators on their results.

Five rows over three ranks are 2 + 2 + 1. A linear layer merges rows and tokens, (5, 12, h) to (60, h), and the ranks
hold 24 + 24 + 12 rows of the result. No placement of torch says that, so stock DTensor gathers, and all that follows is
whole on every rank. `BlockShard` says it::

    (5, 12, h) Shard(0)  ->  (60, h) BlockShard(0, 12)  @ w  ->  (60, k) BlockShard(0, 12)  ->  (5, 12, k) Shard(0)

**Views** follow from the sizes alone, see :func:`view_of_blocks`.

**All other operators** treat ``BlockShard(d, block)`` as ``Shard(d)``: stock's decision is asked for with `Shard` in
its place, and taken with the blocks put back. That holds as long as the operator keeps blocks together, which it does
if every sharded dim on that axis has the size of the dim in blocks. Another decision, or one that `review` does not
accept, is not taken: then the operands are gathered over those axes, as stock would have done before.

The decision is cached, so from the second call on nothing of this runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._containers import leaves, map_leaves
from .._layout.boxes import chunk
from .._layout.shards import local_shape
from .._placements.ragged import is_ragged
from .._placements.types import BlockShard
from .._torch import dispatch
from .._torch.decisions import Sharding, decide, resharding, shape_argument, view_sharding
from .gather import gather, gather_axes, whole_placements
from .operands import block_axes, dtensors, written_arguments
from .review import is_fine_where_empty, review, view_of_copy

__all__ = ["on_blocks", "view_of_blocks", "whole_blocks"]

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
EXACT = ("sum", "max", "min", "product")
"""Kinds of partial values whose reduction does not depend on how many elements each rank has, as a mean does."""


def on_blocks(op: dispatch.Op, args: tuple, kwargs: dict, schema: object) -> object:
    """Return a sharding for a view of uneven shards, or for an operator on blocks; or its result; or NotImplemented."""
    if op in VIEWS and isinstance(args[0], DTensor):
        return _view(op, args, kwargs, schema)
    if not any(map(block_axes, dtensors(args, kwargs))):
        return NotImplemented
    if dispatch.is_composite(op):  # dispatched in inference mode only
        return op.decompose(*args, **kwargs)
    decision = _decision(op, args, kwargs, schema)
    return whole_blocks(op, args, kwargs) if decision is None else decision


def whole_blocks(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator after gathering operands along the axes with blocks; others stay as they are."""
    if any(isinstance(tensor, DTensor) and block_axes(tensor) for tensor in written_arguments(op, args, kwargs)):
        return gather(op, args, kwargs)
    if dispatch.is_view(op):
        return view_of_copy(op, args, kwargs, whole_placements(args[0], block_axes(args[0])))

    def bring(tensor: Tensor) -> Tensor:
        axes = block_axes(tensor) if isinstance(tensor, DTensor) else ()
        return gather_axes(op, tensor, axes) if axes else tensor

    return op(*map_leaves(bring, args, Tensor), **map_leaves(bring, kwargs, Tensor))


# ------------------------------------------------------------------------------------------------- views


def view_of_blocks(old: Sequence[int], new: Sequence[int], placement: Placement, num_ranks: int) -> Placement | None:
    """Return the placement of a view on one mesh axis; None if a rank's part of the tensor is no shard of the view.

    Args:
        old: shape of the tensor.
        new: shape of the view, with the same number of elements, which is not zero.
        placement: `Shard` or `BlockShard`, of a dim that no other axis shards.
        num_ranks: size of the axis.

    Example:
        >>> view_of_blocks((5, 12, 8), (60, 8), Shard(0), 3)
        BlockShard(dim=0, block=12)
        >>> view_of_blocks((60, 8), (5, 4, 3, 8), BlockShard(0, 12), 3)
        Shard(dim=0)
        >>> view_of_blocks((6, 4), (24,), Shard(0), 3)                      # even shards stay what they are
        Shard(dim=0)
        >>> view_of_blocks((4, 5), (20,), Shard(1), 2) is None
        True
    """
    size = old[placement.dim]
    before, inner = math.prod(old[: placement.dim]), math.prod(old[placement.dim + 1 :])
    parts = _parts(size, placement.block if isinstance(placement, BlockShard) else 1, num_ranks)
    block = math.gcd(*(length for _, length in parts))
    starts = [dim for dim in range(len(new)) if math.prod(new[:dim]) == before]
    dims = [dim for dim in starts if new[dim] == size // block] or starts[-1:]  # starts has dims of size 1, too
    if not dims or block * inner % math.prod(new[dims[0] + 1 :]):
        return None
    return _normal(dims[0], block * inner // math.prod(new[dims[0] + 1 :]), new[dims[0]], num_ranks)


def _parts(size: int, block: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return what each rank holds of a dim, as start and length."""
    return [tuple(block * number for number in chunk(size // block, num_ranks, rank)) for rank in range(num_ranks)]


def _normal(dim: int, block: int, size: int, num_ranks: int) -> Placement:
    """Return the one placement that describes the same parts: `Shard`, or blocks as large as possible."""
    parts = _parts(size, block, num_ranks)
    if parts == _parts(size, 1, num_ranks):
        return Shard(dim)
    return BlockShard(dim, math.gcd(*(length for _, length in parts)))


def _view(op: dispatch.Op, args: tuple, kwargs: dict, schema: object) -> object:
    """Return the sharding of a view; NotImplemented where it has no blocks, nor its tensor."""
    tensor = args[0]
    found, shape = _moved(tensor, args[1]), _whole_shape(tensor, args[1])
    if found is None:
        return whole_blocks(op, args, kwargs) if block_axes(tensor) else NotImplemented
    if not block_axes(tensor) and not any(isinstance(p, BlockShard) for p in found):
        return NotImplemented
    mesh = tensor.device_mesh
    kept = tuple(Replicate() if p.is_partial() else p for p in found)
    local = local_shape(shape, tuple(mesh.shape), tuple(mesh.get_coordinate() or (0,) * mesh.ndim), kept)
    return view_sharding(schema, found, shape, local)


def _moved(tensor: DTensor, new: Sequence[int]) -> list[Placement] | None:
    """Return the placements of a view; None if they are not known here."""
    given, shape = dispatch.placements_of(tensor), _whole_shape(tensor, new)
    sharded = {axis: p for axis, p in enumerate(given) if isinstance(p, BlockShard) or type(p) is Shard}
    others = [p for axis, p in enumerate(given) if axis not in sharded and not (p.is_replicate() or p.is_partial())]
    if others or shape is None or len({p.dim for p in sharded.values()}) < len(sharded):
        return None
    old, mesh = tuple(tensor.shape), tensor.device_mesh
    found = [view_of_blocks(old, shape, p, mesh.size(a)) if a in sharded else p for a, p in enumerate(given)]
    if None in found or len({found[axis].dim for axis in sharded}) < len(sharded):
        return None
    return found


def _whole_shape(tensor: DTensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return a shape with its size of -1 computed; None if it has no elements or another number of them."""
    known = math.prod(size for size in shape if size != -1)
    full = tuple(tensor.numel() // max(1, known) if size == -1 else size for size in shape)
    return full if tensor.numel() and math.prod(full) == tensor.numel() else None


# ------------------------------------------------------------------------------------------------- other operators


def _decision(op: dispatch.Op, args: tuple, kwargs: dict, schema: object) -> Sharding | None:
    """Return stock's decision with blocks in place of the shards that stand for them; None if it is not to be taken."""
    tensors = list(dtensors(args, kwargs))
    blocks = _blocks_by_axis(tensors)
    if blocks is None or any(map(is_ragged, tensors)):
        return None
    if not is_fine_where_empty(op, op.overloadpacket.__name__) and _leaves_a_rank_empty(tensors[0], blocks):
        return None
    try:
        decision = decide(schema, _with_shards)
    except (NotImplementedError, RuntimeError):
        return None
    if decision is None or not _is_accepted(op, args, kwargs, decision):
        return None
    return _with_blocks(op, schema, decision, blocks)


def _blocks_by_axis(tensors: Sequence[DTensor]) -> dict[int, tuple[int, int]] | None:
    """Return, by axis, the size of the dim in blocks and of a block; None if operands differ or dims are shared."""
    found: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        placements = dispatch.placements_of(tensor)
        for axis in block_axes(tensor):
            dim = placements[axis].dim
            size = tensor.shape[dim], placements[axis].block
            if found.setdefault(axis, size) != size or sum(getattr(p, "dim", None) == dim for p in placements) > 1:
                return None
    return found


def _leaves_a_rank_empty(tensor: DTensor, blocks: dict[int, tuple[int, int]]) -> bool:
    sizes = ((size // block, tensor.device_mesh.size(axis)) for axis, (size, block) in blocks.items())
    return any(chunk(number, num_ranks, num_ranks - 1)[1] == 0 for number, num_ranks in sizes)


def _with_shards(spec: dispatch.Spec) -> dispatch.Spec:
    """Return a spec with shards in place of blocks."""
    placements = tuple(Shard(p.dim) if isinstance(p, BlockShard) else p for p in spec.placements)
    return spec if placements == spec.placements else dispatch.with_layout(spec, placements)


def _is_accepted(op: dispatch.Op, args: tuple, kwargs: dict, decision: Sharding) -> bool:
    """Return whether `review` accepts a decision on operands with shards in place of blocks."""

    def bring(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or not block_axes(tensor):
            return tensor
        return dispatch.from_spec(dispatch.local_tensor(tensor), _with_shards(dispatch.spec(tensor)))

    seen = map_leaves(bring, args, Tensor), map_leaves(bring, kwargs, Tensor)
    return review(op, *seen, dispatch.decision_of(decision)) is None


def _with_blocks(
    op: dispatch.Op, schema: object, decision: Sharding, blocks: dict[int, tuple[int, int]]
) -> Sharding | None:
    misfits = []

    def bring(spec: dispatch.Spec) -> dispatch.Spec:
        placements = list(spec.placements)
        for axis, (size, block) in blocks.items():
            placement = placements[axis]
            if type(placement) is Shard:
                others = [p for a, p in enumerate(placements) if a != axis and getattr(p, "dim", None) == placement.dim]
                misfits.extend([placement] if others or spec.tensor_meta.shape[placement.dim] != size else [])
                placements[axis] = BlockShard(placement.dim, block)
            elif dispatch.is_strided_shard(placement) or (placement.is_partial() and placement.reduce_op not in EXACT):
                misfits.append(placement)
        return dispatch.with_layout(spec, tuple(placements))

    if decision.needs_redistribute:
        needed = decision.redistribute_schema.args_schema
    else:
        needed = map_leaves(_with_shards, schema.args_schema, dispatch.Spec)
    needed = map_leaves(bring, needed, dispatch.Spec)
    output = map_leaves(bring, decision.output_spec, dispatch.Spec)
    pairs = zip(leaves(schema.args_schema), leaves(needed), strict=False)
    moved = [old for old, new in pairs if isinstance(old, dispatch.Spec) and old.placements != new.placements]
    if misfits or (moved and (dispatch.written_arguments(op) or dispatch.is_view(op))):
        return None
    if decision.use_val_from_redistribute_schema and (needed := _with_local_sizes(op, needed, output)) is None:
        return None
    return resharding(decision, schema, needed, output, is_moved=bool(moved))


def _with_local_sizes(op: dispatch.Op, args: tuple, output: object) -> tuple | None:
    """Return arguments with this rank's shape of the result in place of the whole one; None if more differs."""
    position = shape_argument(op)
    if position is None or not isinstance(output, dispatch.Spec):
        return None
    mesh = output.mesh
    kept = tuple(Replicate() if p.is_partial() else p for p in output.placements)
    coord = tuple(mesh.get_coordinate() or (0,) * mesh.ndim)
    local = local_shape(tuple(output.tensor_meta.shape), tuple(mesh.shape), coord, kept)
    return (*args[:position], local, *args[position + 1 :])
