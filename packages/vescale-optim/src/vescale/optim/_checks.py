"""What DDP asks of a module, checked before the first collective: every refusal names the parameter and the way out."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from . import _torch
from ._axis import Axis

__all__ = ["check_module", "check_zero", "mark_wrapped", "refuse_local_statistics"]

#: Attribute of parameters that have a DDP: a second one would reduce their gradients twice.
_WRAPPED = "_vescale_ddp"

_LOCAL_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_zero(zero: int) -> None:
    if zero == 3:
        raise NotImplementedError(
            "zero=3 (sharded parameters) is not available; use zero=2, which shards gradients and optimizer state, "
            "or torch.distributed.fsdp.fully_shard"
        )
    if zero not in (0, 1, 2):
        raise ValueError(f"zero must be 0, 1 or 2, got {zero!r}")


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
        _check_memory(module, trainable)


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


def _check_memory(module: nn.Module, trainable: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if moving a parameter into a flat buffer would part it from a tensor in the same memory."""
    moved = {_torch.local_tensor(p).data_ptr(): fqn for fqn, p in trainable.items() if _torch.local_tensor(p).numel()}
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
