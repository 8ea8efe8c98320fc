"""The only file of ``vescale.dtensor`` that touches private torch names (the deferred-init sub-package has its own).

Everything here exists in torch 2.11 to 2.13 with the same meaning; what differs between versions is bridged here and
nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._logging import LazyString
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor import _api as _tensor_api
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import loss as loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    return_and_correct_aliasing,
)

from ..errors import UnsupportedOperator

__all__ = [
    "Decision",
    "Handler",
    "Op",
    "Spec",
    "StorageWeakRef",
    "TorchDispatchMode",
    "argument_names",
    "become",
    "decomposition",
    "dispatch_modes",
    "from_spec",
    "handler_table",
    "has_default_order",
    "hook_random_factories",
    "in_backward",
    "is_composite",
    "is_guessed",
    "is_random",
    "is_strided_shard",
    "is_view",
    "keep_handlers_after_loss_parallel",
    "local_box",
    "local_tensor",
    "operators",
    "overload",
    "part_of",
    "placements_of",
    "plain_operands_allowed",
    "redistributed",
    "review_propagation",
    "set_division_into_partials",
    "set_first_cached_argument",
    "shifted",
    "spec",
    "spec_like",
    "stock_dispatch",
    "stock_handlers",
    "with_local",
    "wrap",
    "writes_first",
]

Op = torch._ops.OpOverload
Spec = DTensorSpec
Handler = Callable[[Op, tuple, dict], object]


# ------------------------------------------------------------------------------------------------- operators


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the modes that watch operators in this thread, the innermost last."""
    return _get_current_dispatch_mode_stack()


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
def is_view(op: Op) -> bool:
    """Tell whether the result of ``op`` shares the memory of its operand and nothing is written."""
    return op._schema._is_view_op()


@functools.cache
def writes_first(op: Op) -> bool:
    """Tell whether ``op`` writes to its first operand, and to no others."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    return bool(written) and written[0] and not any(written[1:]) and str(op._schema.arguments[0].type) == "Tensor"


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


@dataclasses.dataclass(frozen=True)
class Decision:
    """What stock sharding propagation says about one call of an operator.

    Attributes:
        needed: the specifications that positional DTensor operands must have, where they must be redistributed.
        output: the specification of the result, where there is just one.
    """

    needed: tuple[object, ...] | None
    output: Spec | None


def review_propagation(
    fallback: Callable[[Op, tuple, dict], object] | None,
    review: Callable[[Op, tuple, dict, Decision], Callable[[], object] | None] | None,
) -> None:
    """Put our own judgement behind stock sharding propagation; None and None restore stock behaviour.

    Propagation looks at global shapes, placements and meshes only, before any communication, so it decides alike on all
    ranks. DTensor's C++ dispatch calls it when its cache has no answer. A sharding that it gives is cached and used,
    anything else is taken for the operator's result. So what is accepted here costs nothing from the second call on.

    Args:
        fallback: ``fallback(op, args, kwargs)`` gives the result where propagation raises an error.
        review: ``review(op, args, kwargs, decision)`` gives None to accept the sharding, or a function that gives the
            result in another way.
    """
    dispatcher = type(DTensor._op_dispatcher)
    stock = getattr(dispatcher._propagate_op_sharding_dispatch_slow_path, "stock", None)
    stock = stock or dispatcher._propagate_op_sharding_dispatch_slow_path
    if fallback is None or review is None:
        dispatcher._propagate_op_sharding_dispatch_slow_path = stock
        return

    @functools.wraps(stock)
    def propagate(self, op: Op, args: tuple, kwargs: dict, *rest: object) -> object:
        try:
            sharding = stock(self, op, args, kwargs, *rest)
        except UnsupportedOperator:
            raise  # an operator inside of this one has been refused already
        except (NotImplementedError, RuntimeError):
            return fallback(op, args, kwargs)
        if not isinstance(sharding, OutputSharding):
            return sharding
        schema = sharding.redistribute_schema if sharding.needs_redistribute else None
        output = sharding.output_spec if isinstance(sharding.output_spec, Spec) else None
        instead = review(op, args, kwargs, Decision(None if schema is None else tuple(schema.args_schema), output))
        return sharding if instead is None else instead()

    propagate.stock = stock
    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate


def decomposition(op: Op) -> Callable | None:
    """Return torch's definition of ``op`` by simpler operators, or None where it has none."""
    return decomposition_table.get(op)


def is_guessed(op: Op) -> bool:
    """Tell whether stock DTensor takes the placements for ``op``, without a rule of its own, from its definition.

    It then runs the operator itself on the shards, as if whatever keeps the placements kept the values, too.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    # the last table is not in every version
    tables = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    if op in handler_table() or any(op in getattr(propagator, name, ()) for name in tables):
        return False
    return op in decomposition_table or op._can_decompose()


def set_first_cached_argument(op: Op, position: int) -> None:
    """Make the cache of sharding decisions tell calls of ``op`` apart by its arguments from ``position`` on."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")  # the second is not in every version
    for table in (getattr(propagator, name, {}) for name in tables):
        if op in table:
            table[op] = dataclasses.replace(table[op], static_argnum=min(position, table[op].static_argnum))


def stock_dispatch(op: Op, args: tuple, kwargs: dict) -> object:
    """Run ``op`` as if this package had no handler for it."""
    if op in _STOCK_HANDLERS:
        return _STOCK_HANDLERS[op](op, args, kwargs)
    table = handler_table()
    handler = table.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler


def stock_handlers() -> dict[Op, Handler]:
    """Return torch's own handlers."""
    return dict(_STOCK_HANDLERS)


def keep_handlers_after_loss_parallel() -> None:
    """Let torch's ``loss_parallel`` put back, when it ends, the handlers that it replaced, instead of removing them."""
    if hasattr(loss_parallel._disable_custom_loss_ops, "stock"):
        return
    replaced: list[dict[Op, Handler]] = []
    enable, disable = loss_parallel._enable_custom_loss_ops, loss_parallel._disable_custom_loss_ops

    @functools.wraps(enable)
    def enable_and_remember() -> None:
        table = handler_table()
        replaced.append({op: table[op] for op in loss_parallel.customized_loss_ops if op in table})
        enable()

    @functools.wraps(disable)
    def disable_and_restore() -> None:
        disable()
        handler_table().update(replaced.pop())

    disable_and_restore.stock = disable
    loss_parallel._enable_custom_loss_ops = enable_and_remember
    loss_parallel._disable_custom_loss_ops = disable_and_restore


def plain_operands_allowed() -> bool:
    """Tell whether ``torch.distributed.tensor.experimental.implicit_replication`` is active."""
    return DTensor._op_dispatcher._allow_implicit_replication


def hook_random_factories(fill: Callable[[Callable, DTensor], bool]) -> None:
    """Have ``fill(torch.rand or torch.randn, tensor)`` give the values of the factories of the same name for DTensors.

    Where it returns False, torch draws them. Called again, it replaces the hook.
    """
    stock = getattr(_tensor_api._dtensor_init_helper, "stock", _tensor_api._dtensor_init_helper)

    @functools.wraps(stock)
    def helper(init_op: Callable, *args: object, **kwargs: object) -> DTensor:
        if init_op in (torch.rand, torch.randn):
            tensor = stock(torch.empty, *args, **kwargs)
            if fill(init_op, tensor):
                return tensor
        return stock(init_op, *args, **kwargs)

    helper.stock = stock
    _tensor_api._dtensor_init_helper = helper


# ------------------------------------------------------------------------------------------------- shards


def shifted(placement: Placement, inserted: int) -> Placement:
    """Return a placement after a dim has been inserted at position ``inserted`` of the tensor."""
    if is_strided_shard(placement):
        return _StridedShard(placement.dim + (placement.dim >= inserted), split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) and placement.dim >= inserted else placement


def placements_of(tensor: DTensor) -> tuple[Placement, ...]:
    """Return the placements of a tensor, without the cost of its public property."""
    return tensor._spec.placements


local_tensor: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")
"""Return this rank's shard itself, outside autograd."""

spec: Callable[[DTensor], Spec] = operator.attrgetter("_spec")
"""Return mesh, placements, global shape and strides in one hashable object, whose hash is kept."""


def has_default_order(spec: Spec) -> bool:
    """Tell whether mesh axes that shard one dim cut it from left to right, as placements alone say."""
    order = getattr(spec, "shard_order", None)  # not in every version
    return order is None or tuple(order) == tuple(DTensorSpec.compute_default_shard_order(spec.placements))


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


def spec_like(spec: Spec, placements: Sequence[Placement], meta: Tensor) -> Spec:
    """Return the spec of a tensor on the same mesh, with shape, strides and dtype of ``meta``."""
    tensor_meta = TensorMeta(torch.Size(meta.shape), tuple(meta.stride()), meta.dtype)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=tensor_meta)


def from_spec(local: Tensor, spec: Spec) -> DTensor:
    """Wrap ``local`` as the DTensor that a spec describes, outside autograd."""
    return DTensor(local, spec, requires_grad=False)


def become(op: Op, args: tuple, kwargs: dict, result: DTensor) -> DTensor:
    """Give the first operand of ``op``, which changes metadata in place, shard and placements of ``result``."""
    tensor = args[0]
    return_and_correct_aliasing(op, args, kwargs, tensor)  # changes the shape and strides that the DTensor shows
    tensor._local_tensor, tensor._spec = result._local_tensor, result._spec
    return tensor


def wrap(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    """Wrap ``local`` as a DTensor with the global shape and strides of ``like``, outside autograd."""
    meta = TensorMeta(torch.Size(like.shape), tuple(like.stride()), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor that differs from ``tensor`` in its local part only, outside autograd."""
    return DTensor(local, tensor._spec, requires_grad=False)


def redistributed(tensor: DTensor, placements: Sequence[Placement], *, for_op: Op | None) -> Tensor:
    """Return the shard of ``tensor`` in the placements that ``for_op`` needs, complete, outside autograd.

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
    moved = _redistribute.redistribute_local_tensor(tensor._local_tensor, source, target)
    return moved.wait() if isinstance(moved, AsyncCollectiveTensor) else moved


def set_division_into_partials(divide: Callable[[Tensor, DeviceMesh, int], Tensor] | None) -> None:
    """Let ``divide(tensor, mesh, axis)`` turn a replicated tensor into a summand per rank; None is stock's ``x / n``.

    Concerns ``Partial("sum")`` alone, not placements derived from it.
    """
    stock = getattr(Partial._partition_value, "stock", Partial._partition_value)
    if divide is None:
        Partial._partition_value = stock
        return

    @functools.wraps(stock)
    def partition(self: Partial, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if type(self) is Partial and self.reduce_op == "sum":
            return divide(tensor, mesh, mesh_dim)
        return stock(self, tensor, mesh, mesh_dim)

    partition.stock = stock
    Partial._partition_value = partition


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part, in the placements of ``like``, of a tensor that every rank has.

    Of a sum, the first rank of the axis holds the whole and the others zeros.
    """
    target = like._spec
    meta = TensorMeta(whole.shape, tuple(whole.stride()), whole.dtype)
    source = DTensorSpec(target.mesh, (Replicate(),) * target.mesh.ndim, tensor_meta=meta)
    cut = tuple(Replicate() if p.is_partial() else p for p in target.placements)
    part = _redistribute.redistribute_local_tensor(whole, source, DTensorSpec(target.mesh, cut, tensor_meta=meta))
    coord = target.mesh.get_coordinate()
    summed = [axis for axis, p in enumerate(target.placements) if p.is_partial("sum")]
    is_first = coord is None or not any(coord[axis] for axis in summed)
    return part if is_first else torch.zeros_like(part)


def in_backward() -> bool:
    """Tell whether autograd is running the backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


# Torch's own handlers, before any of ours was installed.
_STOCK_HANDLERS = dict(handler_table())
