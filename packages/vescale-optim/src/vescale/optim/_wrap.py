"""From a module to buckets: how ``DDP`` prepares a module before its first forward.

materialize     a deferred module gets its values; with ZeRO 3 each rank computes its part only
check           reject parameters that cannot be reduced or moved, before the first collective
cast            with ``param_dtype``: cast parameters, and keep their values from before
plan            a slot for each parameter: names and integers, the same on all ranks
agree           compare settings, shapes and the plan over all ranks
broadcast       coord 0 overwrites the parameters and buffers of the others
move            parameters become views of flat buffers (ZeRO 1 to 3), and their shards are kept
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import is_deferred, materialize

from . import _torch
from ._buckets.granularity import param_info, resolve_blocks, warn_of_padding
from ._buckets.plan import BucketPlan, plan_buckets
from ._checks import check_grad_dtype, check_module, mark_wrapped, set_grad_dtype
from ._gradients.bucket import FlatBucket
from ._options import Options
from ._parameters.offload import check_offload
from ._parameters.precast import Originals, check_param_dtype
from ._parameters.zero3 import ShardedModule, materialize_in_shards
from ._ranks.data_axes import DataAxes
from ._state.spread import Spread, spreads_of

__all__ = ["WrappedModule"]

logger = logging.getLogger("vescale.optim")


@dataclass(frozen=True)
class WrappedModule:
    """A module whose parameters are in buckets.

    Attributes:
        data_axes: The axes of data parallelism.
        names: Names of trainable parameters in registration order.
        frozen: Parameters without gradients, by name.
        originals: Values from before parameters were cast.
        sharded: The sharded parameters (ZeRO 3).
        buckets: In the order of backward.
        spreads: How each parameter is spread over the ranks.
    """

    data_axes: DataAxes
    names: tuple[str, ...]
    frozen: dict[str, nn.Parameter]
    originals: Originals
    sharded: ShardedModule | None
    buckets: list[FlatBucket]
    spreads: dict[nn.Parameter, Spread]

    @classmethod
    def of(cls, module: nn.Module, mesh: DeviceMesh, options: Options) -> WrappedModule:
        """Put the parameters of a module into buckets. All ranks call it alike.

        Raises:
            ValueError: See ``DDP``.
        """
        check_offload(options.offload, options.zero, module, mesh)
        blocks, rules = resolve_blocks(module, options.granularity), options.rules
        axes = DataAxes.of(mesh, sharded=options.zero > 0, ordered=rules.ordered)
        shards = _materialize(module, axes, options)
        trainable = {fqn: p for fqn, p in module.named_parameters() if p.requires_grad}
        frozen = {fqn: p for fqn, p in module.named_parameters() if not p.requires_grad}
        moves = options.zero > 0 or options.param_dtype is not None
        check_module(module, trainable, axes, moves_parameters=moves)
        check_param_dtype(options.param_dtype, trainable)
        originals = Originals(dict(module.named_parameters()), options.param_dtype, shards)
        check_grad_dtype(trainable, rules)
        sharded = None
        if options.zero == 3:
            layout = {"units": options.units, "bucket_bytes": options.bucket_bytes, "blocks": blocks}
            sharded = ShardedModule(module, axes, shards=shards, offload=options.offload, **layout)
        plan = _plan(trainable, axes, options, blocks) if sharded is None else sharded.plan
        axes.all.check_same(
            _describe(module, options, originals, sharded, plan), what="the module given to DDP, or a setting,"
        )
        logger.debug("zero=%d over %r\n%s", options.zero, axes, plan)
        placed = [*plan.buckets, *(sharded.frozen_buckets if sharded is not None else ())]
        warn_of_padding(placed, blocks)
        tensors = [*(p for fqn, p in module.named_parameters() if fqn not in shards), *module.buffers()]
        axes.all.broadcast_([originals.local(t) for t in tensors], chunk_bytes=options.bucket_bytes)
        originals.round()
        set_grad_dtype(trainable, rules)
        mark_wrapped(trainable.values())
        spreads = spreads_of(mesh, dict(module.named_parameters()), placed)
        parts = [part for bucket in plan.buckets for part in bucket.parts(axes.shard.coord)]
        originals.cut((part.fqn, trainable[part.fqn], (part.start, part.stop)) for part in parts)
        if sharded is not None:
            buckets = sharded.make(rules)
        else:
            buckets = [
                FlatBucket(b, [trainable[s.fqn] for s in b.slots], axes, zero=options.zero, rules=rules)
                for b in plan.buckets
            ]
        return cls(axes, tuple(trainable), frozen, originals, sharded, buckets, spreads)


def _materialize(module: nn.Module, axes: DataAxes, options: Options) -> dict[str, DTensor]:
    """Materialize a deferred module; if each rank holds a part, return the parts by name instead."""
    if not is_deferred(module):
        return {}
    if options.zero == 3 and axes.shard.size > 1:
        return materialize_in_shards(module, axes)
    materialize(module)
    return {}


def _plan(
    trainable: Mapping[str, nn.Parameter], axes: DataAxes, options: Options, blocks: Mapping[str, int]
) -> BucketPlan:
    infos = [param_info(fqn, param, blocks) for fqn, param in trainable.items()]
    parts = {"num_shards": axes.shard.size, "num_pieces": axes.replicate.size}
    return plan_buckets(infos, bucket_bytes=options.bucket_bytes, **parts)


def _describe(
    module: nn.Module, options: Options, originals: Originals, sharded: ShardedModule | None, plan: BucketPlan
) -> str:
    """Return everything that must be the same on all ranks, as lines."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [
        f"{fqn}: {tuple(_torch.local_tensor(t).shape)} {t.dtype} trainable={t.requires_grad}" for fqn, t in tensors
    ]
    units = [str(sharded)] if sharded is not None else []
    return "\n".join([str(options), str(originals), *units, *shapes, str(plan)])
