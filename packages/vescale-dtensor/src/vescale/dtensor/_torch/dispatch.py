"""Operators, their dispatch, and the local parts of DTensors.

Everything here exists in torch 2.11 to 2.14 with the same meaning; differences between versions are bridged here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._logging import LazyString
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    return_and_correct_aliasing,
)

from .patches import Handler, Op, handler_table, stock_handlers
from .propagation import Decision, decision_of
from .recording import storage_key, written_arguments

__all__ = [
    "Decision",
    "Handler",
    "Op",
    "Spec",
    "StorageWeakRef",
    "TorchDispatchMode",
    "argument_names",
    "as_stored",
    "become",
    "decision_of",
    "decomposition",
    "dispatch_modes",
    "form_with_tensors",
    "from_spec",
    "handler_of",
    "handler_table",
    "has_default_order",
    "in_backward",
    "is_composite",
    "is_delayed",
    "is_guessed",
    "is_masked",
    "is_norm",
    "is_random",
    "is_strided_shard",
    "is_view",
    "keep_alive",
    "local_box",
    "local_tensor",
    "operators",
    "overload",
    "part_of",
    "placements_of",
    "plain_operands_allowed",
    "redistributed",
    "same_place",
    "schema",
    "set_handler",
    "shifted",
    "spec",
    "spec_like",
    "stock_dispatch",
    "stock_handlers",
    "storage_key",
    "storage_of",
    "take_memory",
    "with_layout",
    "wrap",
    "written_arguments",
]

Spec = DTensorSpec


# ------------------------------------------------------------------------------------------------- operators


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the active dispatch modes of this thread, the innermost last."""
    return _get_current_dispatch_mode_stack()


def overload(name: str) -> Op | None:
    """Return the ATen overload of a name such as ``"rand_like.generator"``, or None where this torch lacks it."""
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload_name or "default", None)


def schema(op: Op) -> torch.FunctionSchema:
    """Return the names, types and aliases of an operator's arguments and results."""
    return op._schema


@functools.cache
def argument_names(op: Op) -> tuple[str, ...]:
    """Return the names of an operator's arguments in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@functools.cache
def form_with_tensors(op: Op) -> Op | None:
    """Return the overload that takes tensors in place of numbers: ``lerp.Tensor`` for ``lerp.Scalar``; None without."""

    def types(form: Op) -> list[tuple[str, str]]:
        return [(a.name, str(a.type).replace("number", "Tensor")) for a in form._schema.arguments]

    def takes_numbers(form: Op) -> bool:
        return any(str(a.type) == "number" for a in form._schema.arguments)

    forms = (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())
    return next((form for form in forms if types(form) == types(op) and not takes_numbers(form)), None)


@functools.cache
def is_composite(op: Op) -> bool:
    """Return whether ``op`` consists of other operators only; such operators are dispatched in inference mode only."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    keys = torch._C.DispatchKey
    return has_kernel(keys.CompositeImplicitAutograd) and not any(map(has_kernel, (keys.CPU, keys.CUDA)))


@functools.cache
def is_view(op: Op) -> bool:
    """Return whether the result of ``op`` shares the memory of its operand and nothing is written."""
    return op._schema._is_view_op()


@functools.cache
def is_random(op: Op) -> bool:
    """Return whether ``op`` consumes a generator, by itself or in the operators that define it."""
    if op is torch.ops.aten._fused_sdp_choice.default:  # tagged, but it only says which attention kernel fits
        return False
    return torch.Tag.nondeterministic_seeded in op.tags


@functools.cache
def operators() -> tuple[Op, ...]:
    """Return every ATen overload."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return tuple(op for name in sorted(names) if (op := overload(name)) is not None)


# ------------------------------------------------------------------------------------------------- dispatch


def decomposition(op: Op) -> Callable | None:
    """Return torch's definition of ``op`` by simpler operators, or None where it has none."""
    return decomposition_table.get(op)


def is_delayed(kind: type) -> bool:
    """Return whether tensors of a class stand for the result of a collective, for which their operators wait."""
    return issubclass(kind, AsyncCollectiveTensor)


def is_guessed(op: Op) -> bool:
    """Return whether stock DTensor has no rule for ``op`` and guesses its placements from its definition.

    It then runs the operator itself on the shards. That gives right values only for some operators.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    # the last table is not in every version
    tables = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    if op in handler_table() or any(op in getattr(propagator, name, ()) for name in tables):
        return False
    return op in decomposition_table or op._can_decompose()


_SUSPENDED: dict[Op, Handler | None] = {}  # handlers of operators that are running without them


def stock_dispatch(op: Op, args: tuple, kwargs: dict) -> object:
    """Run ``op`` as if this package had no handler for it."""
    if (stock := stock_handlers().get(op)) is not None:
        return stock(op, args, kwargs)
    if op not in handler_table():
        return op(*args, **kwargs)
    _SUSPENDED[op] = handler_table().pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        set_handler(op, _SUSPENDED.pop(op))


def handler_of(op: Op) -> Handler | None:
    """Return the handler of ``op``, also while it runs without."""
    return _SUSPENDED[op] if op in _SUSPENDED else handler_table().get(op)


def set_handler(op: Op, handler: Handler | None) -> None:
    """Give ``op`` a handler, or none; if it is running without, from its end on."""
    if op in _SUSPENDED:
        _SUSPENDED[op] = handler
    elif handler is None:
        handler_table().pop(op, None)
    else:
        handler_table()[op] = handler


def plain_operands_allowed() -> bool:
    """Return whether ``torch.distributed.tensor.experimental.implicit_replication`` is active."""
    return DTensor._op_dispatcher._allow_implicit_replication


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
    """Return whether mesh axes that shard one dim are applied from left to right, the default order."""
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
    """Return whether a placement has interleaved shards, so that a rank's part is not one rectangle."""
    return isinstance(placement, _StridedShard)


def is_masked(placement: Placement) -> bool:
    """Return whether values in a placement can be reduced only with the mask of the call that made them, and once."""
    return isinstance(placement, _MaskPartial)


def is_norm(placement: Placement) -> bool:
    """Return whether the values of the ranks are norms of parts, whose sum is not the norm of the whole."""
    return isinstance(placement, _NormPartial)


def spec_like(spec: Spec, placements: Sequence[Placement], meta: Tensor) -> Spec:
    """Return the spec of a tensor on the same mesh, with shape, strides and dtype of ``meta``."""
    tensor_meta = TensorMeta(torch.Size(meta.shape), tuple(meta.stride()), meta.dtype)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=tensor_meta)


def with_layout(spec: Spec, placements: Sequence[Placement]) -> Spec:
    """Return the spec of the same tensor in other placements."""
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def from_spec(local: Tensor, spec: Spec) -> DTensor:
    """Wrap ``local`` as the DTensor that a spec describes, outside autograd."""
    return DTensor(local, spec, requires_grad=False)


def become(op: Op, args: tuple, kwargs: dict, result: DTensor) -> DTensor:
    """Give the first operand of the in-place metadata operator ``op`` the shard and placements of ``result``."""
    tensor = args[0]
    return_and_correct_aliasing(op, args, kwargs, tensor)  # changes the shape and strides that the DTensor shows
    tensor._local_tensor, tensor._spec = result._local_tensor, result._spec
    return tensor


def take_memory(tensor: DTensor, local: Tensor, spec: Spec) -> None:
    """Give ``tensor`` the memory of ``local``, which a spec describes."""
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    if isinstance(tensor._local_tensor, AsyncCollectiveTensor):
        tensor._local_tensor = local
    else:
        tensor._local_tensor.data = local  # the same object: others may refer to it
    tensor._spec = spec


def wrap(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor, *, requires_grad: bool = False
) -> DTensor:
    """Wrap ``local`` as a DTensor with the global shape and strides of ``like``, outside autograd."""
    local = local.detach() if local.requires_grad else local  # a plain parameter beside DTensors
    meta = TensorMeta(torch.Size(like.shape), tuple(like.stride()), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=requires_grad)


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference refers to, or None if it is free."""
    return None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def keep_alive(holder: Tensor, kept: Tensor) -> None:
    """Let the memory of one tensor hold that of another, as long as anything refers to the first.

    A storage has one Python object as long as it lives, and with it that object's attributes.
    """
    holder.untyped_storage().kept_alive = kept.untyped_storage()


def same_place(memory: Tensor, view: Tensor) -> Tensor:
    """Return the elements of ``memory`` at the place, and of the dtype, that ``view`` has in its own storage."""
    place = torch.empty(0, dtype=view.dtype, device=view.device)
    return place.set_(memory.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def as_stored(view: Tensor) -> Tensor:
    """Return the values that the memory of a view holds: not conjugated, not negated."""
    view = torch._neg_view(view) if view.is_neg() else view
    return view.conj() if view.is_conj() else view


def with_lazy_bits(stored: Tensor, is_conj: bool, is_neg: bool) -> Tensor:
    """Return a view of what memory holds that is conjugated, or negated, when it is read."""
    stored = stored.conj() if is_conj else stored
    return torch._neg_view(stored) if is_neg else stored


def redistributed(tensor: DTensor, placements: Sequence[Placement], *, for_op: Op | str | None) -> Tensor:
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


def part_of(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part, in the placements of ``like``, of a full tensor that every rank has.

    On an axis of partial sums or products the first rank gets the full values and the others zeros or ones.
    """
    target = like._spec
    meta = TensorMeta(whole.shape, tuple(whole.stride()), whole.dtype)
    source = DTensorSpec(target.mesh, (Replicate(),) * target.mesh.ndim, tensor_meta=meta)
    cut = tuple(Replicate() if p.is_partial() else p for p in target.placements)
    part = _redistribute.redistribute_local_tensor(whole, source, DTensorSpec(target.mesh, cut, tensor_meta=meta))
    coord = target.mesh.get_coordinate() or (0,) * target.mesh.ndim
    later = [p for at, p in zip(coord, target.placements, strict=True) if at]  # of axes along which this rank is later
    if any(p.is_partial("sum") for p in later):
        return torch.zeros_like(part)
    return torch.ones_like(part) if any(p.is_partial("product") for p in later) else part


def in_backward() -> bool:
    """Return whether autograd is running the backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
