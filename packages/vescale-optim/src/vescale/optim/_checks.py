"""What DDP asks of a module, checked before the first collective: every refusal names the parameter and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch
from ._axis import Axis
from ._rules import ReduceRules

__all__ = [
    "check_grad_dtype",
    "check_module",
    "check_shared_memory",
    "check_units",
    "check_zero",
    "is_parallelized",
    "mark_wrapped",
    "refuse_hybrid",
    "refuse_local_modes",
    "refuse_local_statistics",
    "set_grad_dtype",
]

#: Attribute of parameters that have a DDP: a second one would reduce their gradients twice.
_WRAPPED = "_vescale_ddp"

#: Where `vescale.dmodule` notes how a module runs.
_EXECUTION = "_vescale_execution"

_LOCAL_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_zero(zero: int) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero!r}")


def check_units(zero: int, units: object) -> None:
    if units is None:
        return
    if zero != 3:
        raise ValueError(f"units= says which parameters are gathered together, which needs zero=3, got zero={zero}")
    if isinstance(units, str) or not all(isinstance(unit, (str, re.Pattern)) for unit in units):
        raise ValueError(f"units must be a list of module names or regular expressions, got {units!r}")


def check_module(module: nn.Module, trainable: dict[str, nn.Parameter], axis: Axis, *, moves_parameters: bool) -> None:
    """Refuse a module whose parameters cannot be reduced over the axis, or cannot be moved into flat buffers.

    Raises:
        ValueError: Naming the parameter.
    """
    if not trainable:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter, so DDP has nothing to reduce; use it without DDP"
        )
    for fqn, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if _torch.is_deferred_storage(tensor):
            raise ValueError(f"{fqn!r} has no storage (device meta); materialize the module before wrapping it")
        if isinstance(tensor, DTensor):
            _check_placements(fqn, tensor, axis)
    _check_trainable(trainable)
    if moves_parameters:
        check_shared_memory(module, trainable)


def _check_trainable(trainable: dict[str, nn.Parameter]) -> None:
    devices = {}
    for fqn, param in trainable.items():
        devices.setdefault(_torch.local_tensor(param).device, fqn)
        if hasattr(param, _WRAPPED):
            raise ValueError(f"{fqn!r} belongs to another DDP already; wrap a module once, after all other changes")
        if not param.is_floating_point():
            raise ValueError(f"{fqn!r} has dtype {param.dtype}; DDP reduces floating-point gradients: freeze it")
    if len(devices) > 1:
        raise ValueError(f"trainable parameters are on several devices: {devices}; move them to one")


def _check_placements(fqn: str, tensor: DTensor, axis: Axis) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{fqn!r} has placements {tensor.placements}; redistribute it to Shard or Replicate")
    mesh = tensor.device_mesh
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1 and Axis.of_dim(mesh, dim).ranks == axis.ranks:
            raise ValueError(
                f"{fqn!r} is a DTensor over the axis {axis.name!r} itself (mesh {mesh.mesh_dim_names}, placements "
                f"{tensor.placements}); distribute parameters over the other axes only, and leave this one to DDP"
            )


def check_shared_memory(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if moving a parameter into a flat buffer would part it from a tensor in the same memory."""
    moved = {_torch.local_tensor(p).data_ptr(): fqn for fqn, p in parameters.items() if _torch.local_tensor(p).numel()}
    moved.pop(0, None)  # no memory yet
    for fqn, tensor in [*module.named_parameters(), *module.named_buffers()]:
        other = moved.get(_torch.local_tensor(tensor).data_ptr(), fqn)
        if other != fqn:
            raise ValueError(
                f"{other!r} and {fqn!r} are different tensors in the same memory; tie them by assigning the same "
                "Parameter to both"
            )


def mark_wrapped(parameters: Iterable[nn.Parameter]) -> None:
    """Note that the parameters have a DDP, for `check_module`."""
    for param in parameters:
        setattr(param, _WRAPPED, True)


def refuse_hybrid(zero: int, mesh: object) -> None:
    """Refuse to shard over one axis and to replicate over another.

    Raises:
        NotImplementedError: For a mesh of several axes.
    """
    if zero == 3 and isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        raise NotImplementedError(
            f"zero=3 shards over one axis, and the mesh has {mesh.mesh_dim_names}: hybrid sharding (shards over one, "
            'replicas over another) is not available; pass one axis, such as mesh["dp"], of all data-parallel ranks'
        )


def is_parallelized(module: nn.Module) -> bool:
    """Tell whether the module, or a part of it, was made by `vescale.dmodule`."""
    return any(_EXECUTION in vars(part) for part in module.modules())


def refuse_local_modes(module: nn.Module) -> None:
    """Refuse a module that `vescale.dmodule` runs on local tensors: it keeps them, and ZeRO 3 frees their memory.

    Raises:
        NotImplementedError: Naming the mode.
    """
    for fqn, part in module.named_modules():
        modes = getattr(vars(part).get(_EXECUTION), "modes", {})
        local = {mode for mode in modes.values() if mode != "eager"}
        if local:
            raise NotImplementedError(
                f"zero=3 is not available for modules in mode {sorted(local)}, and {fqn or type(module).__name__!r} is "
                'in it: it keeps local tensors of parameters, whose memory zero=3 frees. Call set_mode(module, "eager")'
                ", or use zero=2"
            )


def refuse_local_statistics(module: nn.Module, axis: Axis) -> None:
    """Make BatchNorm raise in training: its statistics would be those of the local batch."""
    if axis.size == 1:
        return
    for fqn, part in module.named_modules():
        if isinstance(part, _LOCAL_STATISTICS):

            def refuse(part: nn.Module, _args: tuple, fqn: str = fqn) -> None:
                if part.training:
                    raise RuntimeError(
                        f"{fqn!r} ({type(part).__name__}) normalises by statistics of the local batch, which is not "
                        "what one device computes; use torch.nn.SyncBatchNorm.convert_sync_batchnorm before DDP, or "
                        ".eval() it"
                    )

            part.register_forward_pre_hook(refuse)


def check_grad_dtype(trainable: dict[str, nn.Parameter], rules: ReduceRules) -> None:
    """Refuse gradients of another dtype than that in which gradients are to be kept.

    Raises:
        ValueError: Naming the parameter.
    """
    for fqn, param in trainable.items():
        dtype = rules.kept(param.dtype)
        if param.grad is not None and param.grad.dtype != dtype:
            raise ValueError(
                f"{fqn!r} has a gradient of dtype {param.grad.dtype} already, and DDP is to keep gradients in {dtype}; "
                "call zero_grad() before wrapping the module"
            )


def set_grad_dtype(trainable: dict[str, nn.Parameter], rules: ReduceRules) -> None:
    """Make autograd deliver each gradient in the dtype in which it is kept."""
    for param in trainable.values():
        dtype = rules.kept(param.dtype)
        if param.grad_dtype != dtype:
            param.grad_dtype = dtype
