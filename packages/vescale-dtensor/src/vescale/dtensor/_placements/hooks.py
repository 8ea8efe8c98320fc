"""Replacements of torch's functions for placements that torch lacks. `vescale.dtensor._install` installs them.

Each takes the stock function and returns a function that calls it for all tensors in torch's own placements. Such
tensors pay one type check per redistribution and nothing per operator.

**From a replicated tensor to partial sums** (`add_whole_once`). It applies wherever an operator takes ``Replicate`` to
``Partial("sum")``: ``addmm``, ``addmv``, ``baddbmm``, ``add`` of a residual. A linear layer with its weight sharded
over the input dim gives partial sums. Stock DTensor adds ``bias / n`` to them on every rank. The division rounds unless
``n`` is a power of two, with a large error in low precision (three thirds of a bfloat16 differ from it by up to 2^-8).
Here the rank at coordinate 0 of the axis adds the full bias and the others add nothing::

    stock   (p0 + b/3) + (p1 + b/3) + (p2 + b/3)
    here    (p0 + b)   +  p1        +  p2            what one device adds, in another order

The sum stays partial, which costs no communication and can still be reduce-scattered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from .._torch.placements import is_tracing, with_placements
from .._torch.waits import name_axes
from .collectives import in_group_order
from .memory import as_strides_say
from .move import redistribute_shard, reduce_axes, reducible_together
from .plan import Placements
from .redistribute import is_own, redistribute
from .types import BlockShard, RaggedShard

__all__ = [
    "WIDER",
    "add_whole_once",
    "for_own_placements",
    "has_ragged",
    "redistribute_method",
    "redistribute_shards",
    "refuse_to_guess",
]


WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that collectives do not take, and those that hold their values."""


def for_own_placements(stock: Callable, function: Callable) -> Callable:
    """Return a method of DTensor that is ``function`` for our placements and ``stock`` for torch's."""

    @functools.wraps(stock)
    def chosen(self, *args):
        return (function if is_own(self.placements, self.device_mesh) else stock)(self, *args)

    return chosen


def refuse_to_guess(stock: Callable) -> Callable:
    """Return the function that guesses a global shape from a local one; it refuses ragged shards."""

    @functools.wraps(stock)
    def guess(local, mesh, placements):
        if has_ragged(placements):
            raise ValueError(
                f"DTensor.from_local cannot derive the global shape from a shard placed {tuple(placements)}; pass "
                "shape= and stride= of the global tensor"
            )
        return stock(local, mesh, placements)

    return guess


def has_ragged(placements: Placements) -> bool:
    """Return whether a ragged placement, or one of blocks, is among some placements: torch knows no shapes of both."""
    return any(isinstance(placement, (BlockShard, RaggedShard)) for placement in placements)


def redistribute_method(stock: Callable) -> Callable:
    """Return `DTensor.redistribute` for all placements: ours where one is ragged or interleaved."""

    @functools.wraps(stock)
    def chosen(self, device_mesh=None, placements=None, **options):
        mesh = self.device_mesh
        own = is_own(self.placements, mesh) or is_own(placements or (), mesh)
        if own and not is_tracing():
            return redistribute(self, device_mesh, placements, **options)
        return stock(self, device_mesh, placements, **options)

    return chosen


def redistribute_shards(stock: Callable) -> Callable:
    """Return the redistribution of local tensors for all placements, meshes and numbers of Partial axes.

    Torch calls it for gradients and operands, too. Ours differs from torch's in seven cases:

    * a placement is ragged or interleaved;
    * the ranks of the mesh do not ascend: torch gathers their shards in the wrong order;
    * an axis changes from one kind of Partial to another, as that of a gradient: torch cannot;
    * several Partial axes become Replicate: one collective here, one per axis in torch;
    * collectives do not take the dtype: integers of 16 bits are moved as wider ones;
    * collectives have no product of complex numbers;
    * the shard is not in memory as a dense tensor in the order of the global strides is: torch gives a row-major shard
      of ``x.t()``, and strides of a padded shape. A view that the tensor has by its strides would fail on the shard.
    """

    @functools.wraps(stock)
    def redistribute_local_tensor(local, current, target, **options):
        if local.is_conj() or local.is_neg():  # a lazy bit, perhaps not set on ranks with an empty shard
            local = local.resolve_conj().resolve_neg()
        source, new = current.placements, target.placements
        reduced = tuple(Replicate() if _changes_partial(*pair) else pair[0] for pair in zip(source, new, strict=True))
        if reduced != source:
            between = with_placements(current, reduced)
            local = redistribute_local_tensor(local, current, between, **options)
            return redistribute_local_tensor(local, between, target, **options)
        if local.dtype in WIDER and source != new:
            moved = redistribute_local_tensor(local.to(WIDER[local.dtype]), current, target, **options)
            return moved.to(local.dtype)  # sums in the wider dtype are those of the narrow one, modulo its range
        mesh = current.mesh
        name_axes(mesh)
        own = is_own(source, mesh) or is_own(new, mesh) or not in_group_order(mesh)
        own = own or (local.is_complex() and source != new and any(p.is_partial("product") for p in source))
        if own and mesh == target.mesh and not is_tracing():
            moved = redistribute_shard(local, current.shape, mesh, source, new)
            return _as_strides_say(moved, local, current)
        given = local
        if len(source) > 1 and sum(type(placement) is Partial for placement in source) > 1:
            local, current = _reduced_together(local, current, target)
        return _as_strides_say(stock(local, current, target, **options), given, current)

    return redistribute_local_tensor


def _as_strides_say(moved, given, spec):
    meta = spec.tensor_meta
    return moved if meta is None or is_tracing() else as_strides_say(moved, given, meta.shape, meta.stride)


def _changes_partial(old, new):
    return old != new and type(old) is Partial and type(new) is Partial


def _reduced_together(local, current, target):
    """Reduce several Partial axes in one collective, before torch would use one collective per axis."""
    axes = [a for a in reducible_together(current.placements, target.placements) if current.mesh.size(a) > 1]
    mesh = current.mesh
    if len(axes) < 2 or mesh != target.mesh or is_tracing() or mesh.get_coordinate() is None:
        return local, current
    local = reduce_axes(local, mesh, current.placements, axes)
    placements = [target.placements[a] if a in axes else old for a, old in enumerate(current.placements)]
    return local, with_placements(current, placements)


def add_whole_once(stock: Callable) -> Callable:
    """Return a conversion from replicated to partial in which one rank keeps the full tensor.

    The others hold what changes no sum, or no product. It does not apply to placements derived from ``Partial``.
    """

    @functools.wraps(stock)
    def partition(self: Partial, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if type(self) is Partial and self.reduce_op in ("sum", "product"):
            return _whole_on_first(tensor, mesh, mesh_dim, neutral=1 if self.reduce_op == "product" else 0)
        return stock(self, tensor, mesh, mesh_dim)

    return partition


def _whole_on_first(tensor: Tensor, mesh: DeviceMesh, axis: int, *, neutral: int) -> Tensor:
    if mesh.get_local_rank(axis) == 0:
        return tensor.clone()  # a partial tensor may be written to in place, its source must not change
    if neutral == 0 and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return torch.full_like(tensor, -0.0)  # x + (-0.0) is x for every x, -0.0 included
    return torch.full_like(tensor, neutral)
