"""The only file of ``vescale.optim`` with private names of torch, and the only one that depends on torch versions.

Everything here exists in torch 2.11 to 2.14 with the same meaning. Differences between versions are handled only here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BOOKKEEPING",
    "GeneratorListener",
    "IncompatibleKeys",
    "UnmovableModule",
    "all_gather",
    "backward_is_nested",
    "backward_number",
    "base_of",
    "count_change",
    "default_store",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norms",
    "grad_dtype",
    "has_compiled_calls",
    "has_strided_shard",
    "in_transform",
    "is_compiled",
    "is_compiler_wrapper",
    "is_deferred_storage",
    "joined_mesh",
    "local_tensor",
    "make_placeholder",
    "no_function_modes",
    "num_holders",
    "on_backward_end",
    "on_compilation",
    "optimizer_hooks",
    "own_parameters",
    "plain_functions",
    "reduce_scatter",
    "root_mesh",
    "shard_offsets",
    "step_without_hooks",
    "unscale_",
    "unscale_operator",
    "version",
    "with_metadata",
    "without_dims",
    "wrap_like",
    "zero_operators",
]

# torch 2.13 renames both collectives; the old names warn there and will go.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


#: Attributes of a tensor in which torch keeps its number of changes and its hooks.
BOOKKEEPING = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard itself, or a plain tensor as it is; outside autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """Wrap ``local``, of any dtype, with mesh, placements, global shape and strides of ``like`` if it is a DTensor."""
    if not isinstance(like, DTensor):
        return local
    # from_local would make a new view of `local`; except for the dtype, the spec of `like` is the correct one.
    spec = like._spec
    if local.dtype != like.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def shard_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Return the index, in the global tensor, of the first element of this rank's shard."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def has_strided_shard(tensor: DTensor) -> bool:
    """Return whether a placement interleaves shards, so that a rank's part is not one rectangle."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of which ``mesh`` is a slice or an axis of which it unites, or the mesh itself."""
    return mesh._get_root_mesh()


def joined_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh of the axes of both, in the order of the mesh of which both are slices; None without one."""
    root = first._get_root_mesh()
    names = [*(first.mesh_dim_names or ()), *(second.mesh_dim_names or ())]
    if root != second._get_root_mesh() or len(names) != first.ndim + second.ndim or len(set(names)) < len(names):
        return None
    order = {name: position for position, name in enumerate(root.mesh_dim_names or ())}
    try:
        return root[tuple(sorted(names, key=lambda name: order.get(name, -1)))]
    except (KeyError, RuntimeError, ValueError):  # torch cannot slice so
        return None


def grad_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype in which autograd delivers a parameter's gradient."""
    return getattr(param, "grad_dtype", None) or param.dtype


def is_deferred_storage(tensor: Tensor) -> bool:
    """Return whether a parameter has a shape but no values yet."""
    return tensor.device.type == "meta" or local_tensor(tensor).device.type == "meta"


def backward_number() -> int:
    """Return the number of the backward pass that is running in this thread, -1 outside."""
    return torch._C._current_graph_task_id()


def backward_is_nested() -> bool:
    """Return, at the end of a backward pass, whether it ran inside a node of another one (reentrant checkpointing)."""
    return torch._C._current_autograd_node() is not None


class GeneratorListener(TorchDispatchMode):
    """Call a function whenever an operator is given a generator.

    Args:
        on_generator: The function.
    """

    def __init__(self, on_generator: Callable[[], None]):
        super().__init__()
        self._on_generator = on_generator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self._on_generator()
        return func(*args, **kwargs)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has computed everything, before it returns to the user."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor whose memory a view shares for autograd; None for a tensor that is not a view."""
    return view._base


def version(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor's memory that torch has counted."""
    return tensor._version


def count_change(tensors: Sequence[Tensor]) -> None:
    """Count an in-place change of each tensor made outside of torch: autograd then rejects values saved before."""
    if tensors:
        torch.autograd.graph.increment_version(list(tensors))


def num_holders(tensor: Tensor) -> int:
    """Return how many tensors, views of each other or not, hold the memory of this one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without the storage object of this function


def in_transform() -> bool:
    """Return whether a transform of ``torch.func``, such as ``grad`` or ``vmap``, is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module or a part of it has been given to ``torch.compile``."""
    return has_compiled_calls(module) or any(map(is_compiler_wrapper, module.modules()))


def is_compiler_wrapper(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile`` for another."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def has_compiled_calls(module: nn.Module) -> bool:
    """Return whether ``compile()`` of a module or of a part of it has been called."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def on_compilation(callback: Callable[[], None]) -> None:
    """Call ``callback`` once before each compilation of ``torch.compile``, even if it is registered several times."""
    known = torch._dynamo.callback.callback_handler.start_callbacks
    if not any(getattr(each, "callback", None) is callback for each in known):

        def call(*_args: object) -> None:
            callback()

        call.callback = callback
        known.append(call)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's table of the parameters that it holds itself."""
    return module._parameters


def plain_functions() -> contextlib.AbstractContextManager[None]:
    """Treat tensors of subclasses as plain ones in functions of torch: ``__torch_function__`` is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def no_function_modes() -> contextlib.AbstractContextManager[None]:
    """Hide functions of torch from every ``TorchFunctionMode``, too, such as the one that traces a pipeline."""
    return torch._C.DisableTorchFunction()


def default_store() -> dist.Store:
    """Return the store by which the processes of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


def without_dims(placement: Placement, num_dims: int) -> Placement:
    """Return the placement that remains without the first ``num_dims`` dims: ``Replicate`` if it cuts one of them."""
    if num_dims == 0 or not (placement.is_shard() or isinstance(placement, _StridedShard)):
        return placement
    if placement.dim < num_dims:
        return Replicate()
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim - num_dims, split_factor=placement.split_factor)
    return Shard(placement.dim - num_dims)


def with_metadata(values: dict[str, object], like: dict[str, object]) -> dict[str, object]:
    """Return ``values`` with the versions of modules that the state dict ``like`` has, if it has any."""
    if not hasattr(like, "_metadata"):
        return values

    class _State(dict):
        _metadata = like._metadata

    return _State(values)


def foreach_norms(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Return each tensor's p-norm as a 0-dim tensor, computed in ``dtype``; all tensors on one device."""
    # The infinity norm of an empty tensor is undefined in torch; here it is 0, as for every other norm.
    filled = [tensor for tensor in tensors if tensor.numel()]
    return list(torch._foreach_norm(filled, norm_type, dtype=dtype)) if filled else []


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target, in place, between any dtypes."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by the 0-dim tensor ``factor``, in place; all of one dtype and device."""
    torch._foreach_mul_(list(tensors), factor)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the kinds of hooks that are registered with an optimizer."""
    calls, times = ("step", "state_dict", "load_state_dict"), ("pre", "post")
    tables = {f"{call} {time}-hooks": f"_optimizer_{call}_{time}_hooks" for call in calls for time in times}
    return [kind for kind, table in tables.items() if getattr(optimizer, table, None)]


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """Return the function, of the optimizer first, that ``optimizer.step()`` runs between its hooks."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def unscale_operator() -> torch._ops.OpOverload:
    """Return the operator by which ``torch.amp.GradScaler`` unscales a list of gradients."""
    return torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale_(tensors: Sequence[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """Multiply tensors by a 0-dim tensor, in place; set ``found`` to 1 if a value is not finite."""
    unscale_operator()(list(tensors), found, inverse_scale)


class UnmovableModule(nn.Module):
    """A module whose parameters must not move: ``to``, ``cuda``, ``half`` and so on raise RuntimeError."""

    def _apply(self, fn: Callable, recurse: bool = True) -> UnmovableModule:  # noqa: ARG002 - torch's signature
        raise RuntimeError(
            f"{type(self).__name__} holds parameters in flat buffers: move or cast the module before wrapping"
        )


def make_placeholder(cls: type, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an instance of the tensor subclass ``cls`` with the metadata of ``like``, or ``dtype``, and no storage."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=like.device, requires_grad=False
    )


def zero_operators() -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Return the operators by which ``zero_grad(set_to_none=False)`` clears one gradient and a list of them."""
    return torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default
