"""The only file of ``vescale.dtensor`` that touches private torch names (the deferred-init sub-package has its own).

Everything here exists in torch 2.11 to 2.13 with the same meaning; what differs between versions is bridged here and
nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._logging import LazyString
from torch._decomp import decomposition_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "Handler",
    "Op",
    "TorchDispatchMode",
    "argument_names",
    "decomposition",
    "handler_table",
    "is_composite",
    "is_random",
    "is_strided_shard",
    "local_box",
    "local_tensor",
    "operators",
    "overload",
    "part_of",
    "plain_operands_allowed",
    "redistributed",
    "set_fallback",
    "set_first_cached_argument",
    "stock_dispatch",
    "tree_leaves",
    "tree_map_only",
    "wrap",
]

Op = torch._ops.OpOverload
Handler = Callable[[Op, tuple, dict], object]


# ------------------------------------------------------------------------------------------------- operators


def overload(name: str) -> Op | None:
    """Return the ATen overload of a name such as ``"rand_like.generator"``, or None where this torch lacks it."""
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload_name or "default", None)


@functools.cache
def argument_names(op: Op) -> tuple[str, ...]:
    """Return the names of an operator's arguments in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def is_composite(op: Op) -> bool:
    """Tell whether ``op`` is defined by other operators alone; only inference mode shows those to a dispatcher."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    keys = torch._C.DispatchKey
    return has_kernel(keys.CompositeImplicitAutograd) and not any(map(has_kernel, (keys.CPU, keys.CUDA)))


@functools.cache
def is_random(op: Op) -> bool:
    """Tell whether ``op`` consumes a generator, by itself or in the operators that define it."""
    if op is torch.ops.aten._fused_sdp_choice.default:  # tagged, but it only says which attention kernel fits
        return False
    return torch.Tag.nondeterministic_seeded in op.tags


@functools.cache
def operators() -> tuple[Op, ...]:
    """Return every ATen overload."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(op for name in sorted(names) if (op := overload(name)) is not None)


# ------------------------------------------------------------------------------------------------- dispatch


def handler_table() -> dict[Op, Handler]:
    """Return DTensor's table of operators that are handled before sharding propagation and its own RNG tracker."""
    return DTensor._op_dispatcher._custom_op_handlers


def set_fallback(fallback: Callable[[Op, tuple, dict, Exception], object] | None) -> None:
    """Have ``fallback(op, args, kwargs, error)`` give the result where stock propagation finds no placements.

    Sharding propagation looks at global shapes and placements only, before any communication, so it fails on all ranks
    or on none. DTensor's C++ dispatch calls it on a cache miss and returns what it gives, if that is not a sharding, as
    the operator's result. None restores stock behaviour.
    """
    dispatcher = type(DTensor._op_dispatcher)
    stock = getattr(dispatcher._propagate_op_sharding_dispatch_slow_path, "stock", None)
    stock = stock or dispatcher._propagate_op_sharding_dispatch_slow_path
    if fallback is None:
        dispatcher._propagate_op_sharding_dispatch_slow_path = stock
        return

    @functools.wraps(stock)
    def propagate(self, op: Op, args: tuple, kwargs: dict, *rest: object) -> object:
        try:
            return stock(self, op, args, kwargs, *rest)
        except (NotImplementedError, RuntimeError) as error:
            return fallback(op, args, kwargs, error)

    propagate.stock = stock
    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate


def decomposition(op: Op) -> Callable | None:
    """Return torch's definition of ``op`` by simpler operators, or None where it has none."""
    return decomposition_table.get(op)


def set_first_cached_argument(op: Op, position: int) -> None:
    """Make the cache of sharding decisions tell calls of ``op`` apart by its arguments from ``position`` on."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")  # the second is not in every version
    for table in (getattr(propagator, name, {}) for name in tables):
        if op in table:
            table[op] = dataclasses.replace(table[op], static_argnum=min(position, table[op].static_argnum))


def stock_dispatch(op: Op, args: tuple, kwargs: dict) -> object:
    """Run ``op`` as if this package had no handler for it."""
    table = handler_table()
    handler = table.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


def plain_operands_allowed() -> bool:
    """Tell whether ``torch.distributed.tensor.experimental.implicit_replication`` is active."""
    return DTensor._op_dispatcher._allow_implicit_replication


# ------------------------------------------------------------------------------------------------- shards


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's shard itself, outside autograd."""
    return tensor._local_tensor


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``(offsets, sizes)`` of this rank's rectangle in a tensor of global ``shape``; empty outside the mesh."""
    if mesh.get_coordinate() is None:
        return tuple(0 for _ in shape), tuple(0 for _ in shape)
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, tuple(placements))
    return tuple(offsets), tuple(sizes)


def is_strided_shard(placement: Placement) -> bool:
    """Tell whether a placement interleaves its shards, so that a rank's part is not one rectangle."""
    return isinstance(placement, _StridedShard)


def wrap(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    """Wrap ``local`` as a DTensor with the global shape and strides of ``like``, outside autograd."""
    meta = TensorMeta(torch.Size(like.shape), tuple(like.stride()), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def redistributed(tensor: DTensor, placements: Sequence[Placement], *, for_op: Op | None) -> Tensor:
    """Return the shard of ``tensor`` in the placements that ``for_op`` needs, outside autograd.

    Raises:
        RuntimeError: that needs communication, a context that forbids implicit redistribution is active, and ``for_op``
            is not None (which says that the communication is a part of the operator).
    """
    source = tensor._spec
    if source.placements == tuple(placements):
        return tensor._local_tensor
    target = DTensorSpec(source.mesh, tuple(placements), tensor_meta=source.tensor_meta)
    if for_op is not None:
        message = LazyString("Implicit redistribution occurred for {} of {} to {}".format, for_op, source, target)
        ExplicitRedistributionContext.observe_redistribution(source, target, message)
    return redistribute_local_tensor(tensor._local_tensor, source, target)


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part, in the placements of ``like`` (none of them partial), of a tensor that all ranks have."""
    target = like._spec
    meta = TensorMeta(whole.shape, tuple(whole.stride()), whole.dtype)
    source = DTensorSpec(target.mesh, (Replicate(),) * target.mesh.ndim, tensor_meta=meta)
    return redistribute_local_tensor(whole, source, DTensorSpec(target.mesh, target.placements, tensor_meta=meta))
