"""Tensors without storage, slots of modules and effects of operators, for deferred initialization."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Op",
    "TorchDispatchMode",
    "dispatch_without_torch_function",
    "foreign_memory",
    "has_hooks",
    "is_random",
    "make_wrapper",
    "operators",
    "plain_attributes",
    "set_buffer",
    "set_parameter",
    "storage_key",
    "takes_device",
    "tensor_slots",
    "written_arguments",
]

Op = torch._ops.OpOverload

dispatch_without_torch_function = torch._C._disabled_torch_function_impl

# torch does not tag these, but they consume a generator
UNTAGGED_RANDOM = (
    "multinomial",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "rrelu_with_noise",
    "normal",
)

# operands that operators write to without declaring it in their schema
UNDECLARED_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)


def make_wrapper(cls: type, meta: Tensor, device: torch.device) -> Tensor:
    """Create a tensor of `cls` without storage that reports the geometry of `meta` and the given device."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        meta.size(),
        strides=meta.stride(),
        storage_offset=meta.storage_offset(),
        dtype=meta.dtype,
        layout=meta.layout,
        device=device,
        requires_grad=False,
    )


def storage_key(tensor: Tensor) -> int:
    """Return a number that two tensors share exactly if they share their storage (while both are alive)."""
    return tensor.untyped_storage()._cdata


def foreign_memory(tensor: Tensor) -> bool:
    """Return whether another library (numpy, a buffer) owns the memory and may change it without torch."""
    return not tensor.untyped_storage().resizable()


def operators(names: dict[str, tuple[str, ...]]) -> frozenset[Op]:
    """Return the ATen overloads `{"fill_": ("Scalar", "Tensor"), …}`; those that this torch lacks are left out."""
    packets = {name: getattr(torch.ops.aten, name, None) for name in names}
    return frozenset(
        getattr(packet, overload)
        for name, packet in packets.items()
        for overload in names[name]
        if packet is not None and overload in packet.overloads()
    )


@functools.cache
def written_arguments(op: Op) -> tuple[tuple[int, str], ...]:
    """Return `(position, name)` of the arguments that an operator changes in place, also undeclared, and of `out=`."""
    undeclared = UNDECLARED_WRITES.get(op.overloadpacket.__name__, ())
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
    )


@functools.cache
def is_random(op: Op) -> bool:
    """Return whether an operator consumes a generator."""
    name = op._schema.name.removeprefix("aten::").removesuffix("_")
    return torch.Tag.nondeterministic_seeded in op.tags or name in UNTAGGED_RANDOM


@functools.cache
def takes_device(op: Op) -> bool:
    """Return whether an operator has a `device` argument."""
    return any(argument.name == "device" for argument in op._schema.arguments)


def tensor_slots(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield `(kind, name, tensor)` for the parameters and buffers that belong to `module` itself."""
    for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in table.items():
            if tensor is not None:
                yield kind, name, tensor


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return the instance attributes of `module` that are neither registered tensors and modules nor hooks."""
    own = nn.Module().__dict__
    return {name: value for name, value in module.__dict__.items() if name not in own}


def set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a registered parameter, keeping its place in the order of parameters."""
    module._parameters[name] = tensor


def set_buffer(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a registered buffer, keeping its place and whether it is persistent."""
    module._buffers[name] = tensor


def has_hooks(tensor: Tensor) -> bool:
    """Return whether gradient hooks are registered on a tensor."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
