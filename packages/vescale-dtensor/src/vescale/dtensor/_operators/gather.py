"""Run an operator on full operands, on every rank.

This is right for every deterministic operator and its gradient. All ranks run the program of one device on equal data,
so they also fail alike. The price is the communication and the memory of full operands. Gathering is an implicit
redistribution: :func:`vescale.dtensor.strict` refuses it and :func:`vescale.dtensor.debug.comm_log` shows it.

    operands   any placement -> Replicate
    results    Replicate
    written    the operator writes to a full copy; then every rank keeps its part, in the tensor's own placements

A view of a gathered tensor is a copy; ``copies`` handles writes to it. A rank outside the mesh computes only the shapes
of the results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .._containers import leaves, map_leaves
from .._placements.rules import refuse_ragged
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .copies import remember_copy
from .given_results import check_written
from .operands import are_norms, check_operands, dtensors, mesh_of, written_arguments

__all__ = ["gather", "gather_axes", "gather_in_layout", "whole_placements"]


def gather(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run ``op`` on full operands; results are replicated, and operands it writes to keep their placements.

    Raises:
        UnsupportedOperator: operands on several meshes, an operator that changes a tensor's shape in place or writes to
            norms of parts, a result that is not a dense tensor.
    """
    refuse_ragged(op, args, kwargs)
    mesh = mesh_of(op, args, kwargs)
    check_operands(op, args, kwargs)
    if mesh.get_coordinate() is None:
        return _outside(op, mesh, args, kwargs)
    written = {id(tensor) for tensor in _writable_arguments(op, args, kwargs)}
    whole: dict[int, Tensor] = {}

    def bring(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in whole:
            gathered = dispatch.redistributed(tensor, [Replicate()] * mesh.ndim, for_op=op)
            is_own = gathered is dispatch.local_tensor(tensor)
            whole[id(tensor)] = gathered.clone() if is_own and id(tensor) in written else gathered
        return whole[id(tensor)]

    read = map_leaves(bring, args, Tensor)
    if torch.Tag.pointwise not in op.tags:  # torch would change the shape of an `out` before it reads it
        names = {name for _, name in dispatch.written_arguments(op)}
        outs = leaves([value for name, value in kwargs.items() if name in names])
        both = {id(whole[id(tensor)]) for tensor in outs if id(tensor) in whole}
        read = map_leaves(lambda tensor: tensor.clone() if id(tensor) in both else tensor, read, Tensor)
    results = op(*read, **map_leaves(bring, kwargs, Tensor))
    returned: dict[int, DTensor] = {}
    for tensor in written_arguments(op, args, kwargs):
        if isinstance(tensor, DTensor):
            _write_back(op, tensor, whole[id(tensor)])
            returned[id(whole[id(tensor)])] = tensor

    def give(result: Tensor) -> DTensor:
        same = returned.get(id(result))
        return _wrap(op, result, mesh, args, kwargs) if same is None else same

    if dispatch.is_view(op) and _was_cut(args[0]):
        remember_copy(args[0], [Replicate()] * mesh.ndim, whole[id(args[0])])
    return map_leaves(give, results, Tensor)


def _outside(op: dispatch.Op, mesh: DeviceMesh, args: tuple, kwargs: dict) -> object:
    """Return results of the global shapes with empty local tensors, for a rank outside the mesh.

    Raises:
        UnsupportedOperator: the shapes depend on values.
    """

    def shape_of(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    try:
        results = op(*map_leaves(shape_of, args, Tensor), **map_leaves(shape_of, kwargs, Tensor))
    except NotImplementedError as error:
        reason = "this rank is not in its mesh, and the result's shape depends on the values: call it inside only"
        raise UnsupportedOperator.for_operands(op, tuple(dtensors(args, kwargs)), reason) from error
    given = list(written_arguments(op, args, kwargs))
    if given:
        return given[0] if isinstance(results, Tensor) else tuple(given)
    nothing = functools.partial(torch.empty, 0, device=mesh.device_type)

    def empty_like(meta: Tensor) -> DTensor:
        return _wrap(op, nothing(dtype=meta.dtype), mesh, args, kwargs, like=meta)

    return map_leaves(empty_like, results, Tensor)


def gather_in_layout(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run ``op``, which depends on strides, on full operands with the strides of one device.

    Raises:
        UnsupportedOperator: it reads memory beyond the elements of its operand, those of a tensor that this one is a
            view of; or from an offset in the memory of that tensor.
    """
    given = args[2 if op.overloadpacket is _SCATTER else 1 :]
    if args[0]._is_view() and given[2:] not in ((), (None,)):
        way_out = "an offset counts from the begin of the memory that this view is a part of: call it on that tensor"
        raise UnsupportedOperator.for_operands(op, (args[0],), way_out)
    sizes, strides, *offset = (each or 0 for each in given)
    extents = (_extent(sizes or (), strides or ()) + sum(offset), _extent(args[0].shape, args[0].stride()))
    if 0 not in tuple(sizes or ()) and extents[0] > extents[1]:
        way_out = (
            f"it reads {extents[0]} elements of memory, of which the tensor has {extents[1]}: call it on that tensor"
        )
        raise UnsupportedOperator.for_operands(op, (args[0],), way_out)

    def lay_out(tensor: DTensor) -> DTensor:
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        whole = dispatch.redistributed(tensor, everywhere, for_op=op)
        if not _same_layout(whole, tensor):
            memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=whole.dtype, device=whole.device)
            whole = memory.copy_(whole)
        return dispatch.wrap(whole, tensor.device_mesh, everywhere, tensor)

    laid_out = map_leaves(lay_out, (args, kwargs), DTensor)
    result = gather(op, *laid_out)
    if dispatch.is_view(op):
        remember_copy(args[0], laid_out[0][0].placements, dispatch.local_tensor(laid_out[0][0]))
    return result


def _same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Return whether the elements lie alike in memory; the stride of a dim with one element does not matter."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size == 1 or one == another for size, one, another in strides)


_SCATTER = torch.ops.aten.as_strided_scatter


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory lie between the first and the last element, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def gather_axes(op: dispatch.Op, tensor: DTensor, axes: tuple[int, ...]) -> DTensor:
    """Return ``tensor`` replicated along ``axes``, as an operand of ``op``; outside autograd."""
    placements = whole_placements(tensor, axes)
    return dispatch.wrap(dispatch.redistributed(tensor, placements, for_op=op), tensor.device_mesh, placements, tensor)


def whole_placements(tensor: DTensor, axes: tuple[int, ...]) -> tuple[Placement, ...]:
    """Return the placements of ``tensor`` with Replicate along ``axes``."""
    return tuple(Replicate() if axis in axes else p for axis, p in enumerate(dispatch.placements_of(tensor)))


def _writable_arguments(op: dispatch.Op, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that ``op`` writes to.

    Raises:
        UnsupportedOperator: one has norms of parts, which no rank can hold a written value in; or elements that share
            memory.
    """
    written = list(written_arguments(op, args, kwargs))
    if any(isinstance(tensor, DTensor) and are_norms(tensor) for tensor in written):
        way_out = "it writes to norms of parts, which have no sign: use the form that returns a result"
        raise UnsupportedOperator.for_operands(op, written, way_out)
    check_written(op, args, kwargs)
    return written


def _write_back(op: dispatch.Op, tensor: DTensor, whole: Tensor) -> None:
    if whole.shape != tensor.shape:
        raise UnsupportedOperator.for_operands(
            op, (tensor,), f"it changes the shape to {tuple(whole.shape)} in place: use the form that returns a result"
        )
    dispatch.local_tensor(tensor).copy_(dispatch.part_of(whole, tensor))


def _wrap(
    op: dispatch.Op, result: Tensor, mesh: DeviceMesh, args: tuple, kwargs: dict, *, like: Tensor | None = None
) -> DTensor:
    if result.layout is not torch.strided:
        raise UnsupportedOperator.for_operands(
            op, tuple(dtensors(args, kwargs)), f"its result is {result.layout}: call it on full_tensor()"
        )
    return dispatch.wrap(result, mesh, [Replicate()] * mesh.ndim, result if like is None else like)


def _was_cut(operand: object) -> bool:
    return isinstance(operand, DTensor) and not all(p.is_replicate() for p in dispatch.placements_of(operand))
