"""What importing the package changes in torch for the sake of placements that torch lacks, and for nothing else.

    DTensor.redistribute           ours where a placement is ragged or strided (interleaved), else torch's
    redistribute_local_tensor      the same, where torch redistributes by itself (gradients, operands); several Partial
                                   axes that become Replicate are reduced in one collective; meshes whose ranks do not
                                   ascend are ours, too, as torch confuses the order of their shards
    shapes that from_local guesses refused for ragged tensors, with the way out
    backward of DTensor.to_local   ours for ragged tensors: torch refuses to compute their global strides
    sharding of operators          our rules where an operand is ragged or interleaved and torch has no cached decision
    DTensor.__boxes__ and others   which boxes a shard holds, for checkpoints

Tensors in torch's own placements pass one check of types per redistribution and nothing per operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.distributed.tensor import DTensor, Partial

from .._torch import placements as _torch
from . import redistribute as _redistribute
from . import rules as _rules
from .checkpoint import PROTOCOL, boxes, global_shape
from .collectives import in_group_order
from .move import redistribute_shard, reduce_axes, reducible_together
from .plan import Placements
from .types import RaggedShard

__all__ = ["install"]


def install() -> None:
    """Teach torch's DTensor the placements of this package. Called once, on import; again, it changes nothing."""
    if getattr(DTensor.redistribute, "knows_all_placements", False):
        return
    DTensor.redistribute = _method(DTensor.redistribute)
    _torch.hook_redistribution(_shards)
    _torch.hook_global_shape(_refuse_to_guess)
    _torch.hook_to_local_backward(_is_ragged, _redistribute.shard_gradient)
    _torch.hook_propagation(_rules.decide)
    DTensor.__boxes__, DTensor.__global_shape__ = boxes, global_shape
    for name, function in PROTOCOL.items():
        setattr(DTensor, name, _for_own(getattr(DTensor, name), function))


def _for_own(stock: Callable, function: Callable) -> Callable:
    @functools.wraps(stock)
    def chosen(self, *args):
        return (function if _redistribute.is_own(self.placements, self.device_mesh) else stock)(self, *args)

    return chosen


def _refuse_to_guess(placements: Placements) -> None:
    if _is_ragged(placements):
        raise ValueError(
            f"DTensor.from_local cannot tell the global shape from a shard placed {tuple(placements)}; pass shape= and "
            "stride= of the global tensor"
        )


def _is_ragged(placements: Placements) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in placements)


def _method(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def redistribute(self, device_mesh=None, placements=None, **options):
        mesh = self.device_mesh
        own = _redistribute.is_own(self.placements, mesh) or _redistribute.is_own(placements or (), mesh)
        if own and not _torch.is_tracing():
            return _redistribute.redistribute(self, device_mesh, placements, **options)
        return stock(self, device_mesh, placements, **options)

    redistribute.knows_all_placements = True
    return redistribute


def _shards(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def redistribute_local_tensor(local, current, target, **options):
        if local.is_conj() or local.is_neg():  # lazily, and on some ranks only where others hold nothing
            local = local.resolve_conj().resolve_neg()
        source, new = current.placements, target.placements
        mesh = current.mesh
        own = _redistribute.is_own(source, mesh) or _redistribute.is_own(new, mesh) or not in_group_order(mesh)
        if own and mesh == target.mesh and not _torch.is_tracing():
            return redistribute_shard(local, current.shape, mesh, source, new)
        if len(source) > 1 and sum(type(placement) is Partial for placement in source) > 1:
            local, current = _reduced_together(local, current, target)
        return stock(local, current, target, **options)

    return redistribute_local_tensor


def _reduced_together(local, current, target):
    """Do first what torch would do in as many collectives as there are axes."""
    axes = [a for a in reducible_together(current.placements, target.placements) if current.mesh.size(a) > 1]
    mesh = current.mesh
    if len(axes) < 2 or mesh != target.mesh or _torch.is_tracing() or mesh.get_coordinate() is None:
        return local, current
    local = reduce_axes(local, mesh, current.placements, axes)
    placements = [target.placements[a] if a in axes else old for a, old in enumerate(current.placements)]
    return local, _torch.with_placements(current, placements)
