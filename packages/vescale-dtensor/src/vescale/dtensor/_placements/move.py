"""Redistribute a shard from any placements to any others: reduce, move, split, in this order.

1. Axes that stop being Partial are reduced, all of them in one collective: reduce-scatter if only one rank of the group
   then needs each element, else all-reduce.
2. The rest is a move between two layouts (see ``plan``): no communication, a gather, or an exchange of the overlaps.
3. An axis that becomes Partial (only operators request that) keeps a share of its copy.

Guarantee: without a reduction, results are bit for bit the shards of the full tensor. After a reduction, all copies of
an element are equal bit for bit. Errors are raised on all ranks, before any communication.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from .._layout.boxes import index_from
from .._layout.shards import check, local_shape, pieces
from .._torch.placements import partition, reduced
from ..errors import UnsupportedPlacement
from .collectives import Group, all_reduce, exchange, gather, group_of, reduce_scatter
from .plan import Movement, Part, Placements, crossed_axes, movement, peers, without_partials

__all__ = ["move", "redistribute_shard", "reduce_axes", "reducible_together"]


@torch.no_grad()
def redistribute_shard(
    local: Tensor, shape: Sequence[int], mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement]
) -> Tensor:
    """Return this rank's shard of a tensor of global ``shape`` after redistribution.

    Args:
        local: the present shard, in the placements ``source``.
        shape: of the global tensor.
        mesh: the mesh of both placements.
        source: present placements.
        target: new placements.

    Raises:
        ValueError: the placements do not fit the shape or the mesh.
        UnsupportedPlacement: an axis would change from one kind of Partial to another.
    """
    shape, source, target = tuple(shape), tuple(source), tuple(target)
    _check(shape, tuple(mesh.shape), source, target)
    if mesh.get_coordinate() is None or source == target:
        return local
    _check_shard(local, shape, mesh, source)
    local = local.resolve_conj().resolve_neg()  # collectives send raw memory, without the lazy bits
    mixed = [axis for axis in _leaving(source, target) if type(source[axis]) is not Partial]
    for axis in mixed:  # such a placement reduces itself
        local = reduced(local, source[axis], mesh, axis)
        source = _replaced(source, [axis], Replicate())
    axes = _leaving(source, target)
    if axes and _scatters(shape, tuple(mesh.shape), source, target, axes):
        local = _reduce_scatter(local, shape, mesh, source, target, axes)
    else:
        if axes:
            local = reduce_axes(local, mesh, source, axes)
        local = move(local, shape, mesh, without_partials(source), without_partials(target))
    for axis, (old, new) in enumerate(zip(source, target, strict=True)):
        if new.is_partial() and not old.is_partial():
            local = partition(local, new, mesh, axis)
    return local


@functools.lru_cache(maxsize=1024)
def _check(shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements) -> None:
    check(shape, mesh_shape, without_partials(source))
    check(shape, mesh_shape, without_partials(target))
    for old, new in zip(source, target, strict=True):
        if old.is_partial() and new.is_partial() and old != new:
            raise UnsupportedPlacement(
                f"redistribute a tensor of shape {shape} on a mesh of shape {mesh_shape} from {source} to {target}: "
                f"{old!r} cannot become {new!r}; redistribute to Replicate or Shard first"
            )
    kinds = {placement.reduce_op for placement in source if placement.is_partial()} - {"sum", "avg"}
    if len(kinds) > 1 or (kinds and any(p.is_partial() and p.reduce_op in ("sum", "avg") for p in source)):
        raise UnsupportedPlacement(
            f"redistribute a tensor of shape {shape} on a mesh of shape {mesh_shape} from {source}: its unreduced "
            "values are of different kinds; redistribute one axis at a time"
        )


def _check_shard(local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, source: Placements) -> None:
    expected = local_shape(shape, tuple(mesh.shape), tuple(mesh.get_coordinate()), without_partials(source))
    if tuple(local.shape) != expected:
        raise ValueError(
            f"expected a shard of shape {expected}, as placements {source} give for global shape {shape} at coordinate "
            f"{tuple(mesh.get_coordinate())} of mesh {mesh}, but got {tuple(local.shape)}; for uneven shards, pass "
            "shape and stride of the global tensor to DTensor.from_local"
        )


def _leaving(source: Placements, target: Placements) -> list[int]:
    return [axis for axis, old in enumerate(source) if old.is_partial() and target[axis] != old]


def _replaced(placements: Placements, axes: Sequence[int], new: Placement) -> Placements:
    return tuple(new if axis in axes else placement for axis, placement in enumerate(placements))


# ------------------------------------------------------------------------------------------------- reductions


def reducible_together(source: Sequence[Placement], target: Sequence[Placement]) -> list[int]:
    """Return the axes that go from Partial to Replicate, if they can be reduced in one collective; else none.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> reducible_together([Partial(), Partial("avg"), Shard(0)], [Replicate(), Replicate(), Shard(0)])
        [0, 1]
        >>> reducible_together([Partial("sum"), Partial("max")], [Replicate(), Replicate()])
        []
    """
    axes = [axis for axis, old in enumerate(source) if type(old) is Partial and target[axis].is_replicate()]
    kinds = {source[axis].reduce_op for axis in axes}
    return axes if len(kinds) == 1 or kinds == {"sum", "avg"} else []


def reduce_axes(local: Tensor, mesh: DeviceMesh, source: Sequence[Placement], axes: Sequence[int]) -> Tensor:
    """Reduce this rank's unreduced value over ``axes``, in one collective."""
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not axes:
        return local
    ops = [source[axis].reduce_op for axis in axes]
    return all_reduce(group_of(mesh, axes), local, ops, divisor=_divisor(mesh, source, axes))


def _divisor(mesh: DeviceMesh, source: Sequence[Placement], axes: Sequence[int]) -> int:
    return math.prod(mesh.size(axis) for axis in axes if source[axis].reduce_op == "avg")


@functools.lru_cache(maxsize=1024)
def _scatters_cached(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements, axes: tuple[int, ...]
) -> bool:
    old, new = without_partials(source), without_partials(target)
    if crossed_axes(mesh_shape, old, new) or math.prod(mesh_shape[axis] for axis in axes) == 1:
        return False
    return all(not new[axis].is_replicate() for axis in axes if mesh_shape[axis] > 1) and 0 not in shape


def _scatters(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements, axes: list[int]
) -> bool:
    """Return whether only one rank of the group needs each element, and already holds a partial value of it."""
    return _scatters_cached(shape, mesh_shape, source, target, tuple(axes))


def _reduce_scatter(
    local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, source: Placements, target: Placements, axes: list[int]
) -> Tensor:
    mesh_shape, coord = tuple(mesh.shape), tuple(mesh.get_coordinate())
    axes = [axis for axis in axes if mesh_shape[axis] > 1]
    group = peers(mesh_shape, coord, axes)
    old, new = without_partials(source), without_partials(target)
    sends = [_cut_out(local, shape, mesh_shape, coord, peer, old, new) for peer in group]
    ops = [source[axis].reduce_op for axis in axes]
    me = group.index(coord)
    flat = reduce_scatter(group_of(mesh, axes), sends, ops, divisor=_divisor(mesh, source, axes), place=me)
    return flat.view(local_shape(shape, mesh_shape, coord, new))


def _cut_out(
    local: Tensor,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coord: tuple[int, ...],
    peer: tuple[int, ...],
    old: Placements,
    new: Placements,
) -> Tensor:
    """Return, flat, the new shard of ``peer``, with the values that the rank at ``coord`` has for it."""
    shard = local.new_empty(local_shape(shape, mesh_shape, peer, new))
    held, wanted = pieces(shape, mesh_shape, coord, old), pieces(shape, mesh_shape, peer, new)
    sources, targets = [piece.view(local) for piece in held], [piece.view(shard) for piece in wanted]
    # no axis is crossed, so the plan at the peer's coordinate is a local move, which gives the peer's part
    for part in movement(shape, mesh_shape, peer, old, new).receives[0]:
        origin = held[part.source].box[0]
        taken = sources[part.source][index_from(origin, part.box)]
        targets[part.target][index_from(wanted[part.target].box[0], part.box)].copy_(taken)
    return shard.view(-1)


# ------------------------------------------------------------------------------------------------- moves


def move(local: Tensor, shape: Sequence[int], mesh: DeviceMesh, source: Placements, target: Placements) -> Tensor:
    """Return the new shard in a layout without Partial, from the shard in another."""
    if source == target:
        return local
    shape, mesh_shape, coord = tuple(shape), tuple(mesh.shape), tuple(mesh.get_coordinate())
    plan = movement(shape, mesh_shape, coord, source, target)
    held = [(piece.box[0], piece.view(local)) for piece in pieces(shape, mesh_shape, coord, source)]
    shard = local.new_empty(local_shape(shape, mesh_shape, coord, target))
    if 0 in shape:
        return shard
    wanted = [(piece.box[0], piece.view(shard)) for piece in pieces(shape, mesh_shape, coord, target)]
    if not plan.axes:
        for part in plan.receives[0]:
            _inside(wanted[part.target], part).copy_(_inside(held[part.source], part))
        return shard
    group = group_of(mesh, plan.axes)
    is_in_place = _lands_in_place(plan, group, wanted)
    out = shard.view(-1) if is_in_place else shard.new_empty(shard.numel())
    for part, values in _communicate(plan, group, held, local, out):
        if not is_in_place:
            _inside(wanted[part.target], part).copy_(values)
    return shard


def _inside(piece: tuple[tuple[int, ...], Tensor], part: Part) -> Tensor:
    origin, view = piece
    return view[index_from(origin, part.box)]


def _lands_in_place(plan: Movement, group: Group, wanted: list) -> bool:
    """Return whether the received parts, in the order of arrival, are the new shard in memory order."""
    position = 0
    for part in itertools.chain.from_iterable(group.arranged(plan.receives)):
        view = _inside(wanted[part.target], part)
        if view.storage_offset() != position or not view.is_contiguous():
            return False
        position += part.numel
    return True


def _communicate(plan: Movement, group: Group, held: list, local: Tensor, out: Tensor) -> list[tuple[Part, Tensor]]:
    """Run the one collective of a plan into ``out``; return every received part with its values."""
    sizes = [sum(part.numel for part in parts) for parts in plan.receives]
    if plan.is_gather:
        came = gather(group, _flat(plan.sends[0], held, local), sizes, out)
    else:
        came = exchange(group, [_flat(parts, held, local) for parts in plan.sends], sizes, out)
    values = []
    for parts, flat in zip(plan.receives, came, strict=True):
        cut = flat.split([part.numel for part in parts]) if parts else ()
        values += [(part, piece.view(part.box[1])) for part, piece in zip(parts, cut, strict=True)]
    return values


def _flat(parts: Sequence[Part], held: list, local: Tensor) -> Tensor:
    """Return the flat send buffer for one rank; a view of the shard's memory if that is one contiguous part."""
    flats = [_inside(held[part.source], part).reshape(-1) for part in parts]
    if len(flats) == 1 and flats[0].stride() == (1,):  # one element may have another stride
        return flats[0]
    return torch.cat(flats) if flats else local.new_empty(0)
