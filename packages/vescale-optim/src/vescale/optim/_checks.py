"""What DDP requires of a module, checked before the first collective: every error names the parameter and the fix."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.dmodule.rows import JointCalls, PlannedRows, RowsProgram
from vescale.dtensor import UnsupportedOperator
from vescale.dtensor.extension import exact_num_blocks

from . import _torch
from ._gradients.rules import ReduceRules
from ._ranks.axis import Axis
from ._ranks.data_axes import DataAxes

__all__ = [
    "blocks_of",
    "check_grad_dtype",
    "check_module",
    "check_shared_memory",
    "executions_of",
    "mark_wrapped",
    "refuse_local_statistics",
    "rows_program",
    "set_grad_dtype",
]


#: Attribute of parameters that have a DDP: a second DDP would reduce their gradients twice. Its value is the id of
#: the parameter, because a copy through pickle has the same attributes.
_WRAPPED = "_vescale_ddp"

#: Attribute in which `vescale.dmodule` records how a module runs.
_EXECUTION = "_vescale_execution"

_LOCAL_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_module(
    module: nn.Module, trainable: dict[str, nn.Parameter], axes: DataAxes, *, moves_parameters: bool
) -> None:
    """Reject a module whose parameters cannot be reduced over the axes, or cannot be moved into flat buffers.

    Raises:
        ValueError: With the name of the parameter.
    """
    if not trainable:
        raise ValueError(
            f"expected a module with trainable parameters, got one without: {type(module).__name__} has no trainable "
            "parameter, so DDP has nothing to reduce; use it without DDP"
        )
    for fqn, tensor in _named_tensors(module):
        if _torch.is_deferred_storage(tensor):
            raise ValueError(f"{fqn!r} has no storage (device meta); materialize the module before wrapping it")
        if isinstance(tensor, DTensor):
            _check_placements(fqn, tensor, axes)
    _check_trainable(trainable)
    if moves_parameters:
        check_shared_memory(module, trainable)


def _check_trainable(trainable: dict[str, nn.Parameter]) -> None:
    devices = {}
    for fqn, param in trainable.items():
        devices.setdefault(_torch.local_tensor(param).device, fqn)
        if getattr(param, _WRAPPED, None) == id(param):
            raise ValueError(f"{fqn!r} belongs to another DDP already; wrap a module once, after all other changes")
        if not param.is_floating_point():
            raise ValueError(f"{fqn!r} has dtype {param.dtype}; DDP reduces floating-point gradients: freeze it")
    if len(devices) > 1:
        raise ValueError(f"trainable parameters are on several devices: {devices}; move them to one")


def _check_placements(fqn: str, tensor: DTensor, axes: DataAxes) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{fqn!r} has placements {tensor.placements}; redistribute it to Shard or Replicate")
    mesh = tensor.device_mesh
    ours = {axis.ranks: axis.name for axis in (axes.all, axes.shard, axes.replicate)}
    for dim in range(mesh.ndim):
        ranks = Axis.of_dim(mesh, dim).ranks
        if len(set(ranks) & set(axes.all.ranks)) > 1:
            raise ValueError(
                f"{fqn!r} is a DTensor over the axis {ours.get(ranks, axes.all.name)!r} itself (mesh "
                f"{mesh.mesh_dim_names}, placements {tensor.placements}); distribute parameters over the other axes "
                "only, and leave this one to DDP"
            )


def check_shared_memory(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Raise ValueError if moving a parameter into a flat buffer would separate it from a tensor in the same memory."""
    moved = {_torch.local_tensor(p).data_ptr(): fqn for fqn, p in parameters.items() if _torch.local_tensor(p).numel()}
    moved.pop(0, None)  # no memory yet
    for fqn, tensor in _named_tensors(module):
        other = moved.get(_torch.local_tensor(tensor).data_ptr(), fqn)
        if other != fqn:
            raise ValueError(
                f"{other!r} and {fqn!r} are different tensors in the same memory; tie them by assigning the same "
                "Parameter to both"
            )


def mark_wrapped(parameters: Iterable[nn.Parameter]) -> None:
    """Record that the parameters have a DDP, for `check_module`."""
    for param in parameters:
        setattr(param, _WRAPPED, id(param))


def executions_of(module: nn.Module) -> list[Any]:
    """Return the records of `vescale.dmodule` on how a module, or parts of it, run.

    The attribute ``any_rank`` of a record is a function that returns whether a flag is set on any of the ranks that
    must make the same calls; None if there are no others.
    """
    found = (vars(part).get(_EXECUTION) for part in module.modules())
    return [execution for execution in found if execution is not None]


def rows_program(module: nn.Module) -> type[RowsProgram] | type[PlannedRows] | None:
    """Return what runs a module as one device does on the rows of all ranks; None, and calls raise, if nothing can."""
    executions = executions_of(module)
    if not executions:
        unplanned = [fqn for fqn, t in _named_tensors(module) if isinstance(t, DTensor)]
        if not unplanned:
            return RowsProgram
        why = f"it has DTensors without a plan, such as {unplanned[0]!r}"
    elif executions != [vars(module).get(_EXECUTION)]:
        planned = next(fqn for fqn, part in module.named_modules() if _EXECUTION in vars(part))
        why = f"only a part of it has a plan, {planned!r}"
    elif _torch.is_compiled(module):
        why = "it has a plan, and it or a part of it is compiled by torch.compile"
    else:
        return PlannedRows

    def refuse(part: nn.Module, _args: tuple) -> None:
        raise RuntimeError(
            "expected a module that DDP can run on the rows of all ranks as one device does, got "
            f"{type(part).__name__}: {why}; what mixes rows (losses of routers, contrasts, sums over rows), and what "
            "random operators draw, would be that of each rank's rows: give the whole module to parallelize_module, "
            "whose plan may leave parts out, or pass per_rank=True to DDP if that is what you want"
        )

    module.register_forward_pre_hook(refuse)
    return None


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def blocks_of(kind: str, has_rows: bool, reducer: Any) -> int | None:
    """Return the number of blocks of the ``vescale.dtensor.exact`` around a forward, in which it can run; None outside.

    Args:
        kind: Name of the type of the module given to DDP.
        has_rows: Whether it runs on the rows of all ranks.
        reducer: That of its gradients.

    Raises:
        UnsupportedOperator: Its bits cannot be those of one device; with the setting and the way out.
    """
    if (num_blocks := exact_num_blocks()) is None or reducer.axis.size == 1:
        return num_blocks
    name = f"DDP of {kind} inside of vescale.dtensor.exact"
    if not has_rows:
        raise UnsupportedOperator(
            f"{name}: expected a module that runs on the rows of all ranks, got one whose ranks see their own rows "
            "alone (per_rank=True), with sums that are not those of one device; leave per_rank out"
        )
    for bucket in reducer.buckets:
        if bucket.wire_dtype != bucket.grads.dtype:
            raise UnsupportedOperator(
                f"{name}: expected gradients that travel in their own dtype {bucket.grads.dtype}, got reduce_dtype="
                f"{bucket.wire_dtype}, to which one rank alone would not round; leave reduce_dtype out"
            )
        if bucket.sharded and bucket.grad_shard is None:
            raise UnsupportedOperator(
                f"{name}: expected gradients on the device, got offload=True, which keeps them in host memory; leave "
                "offload out"
            )
    return num_blocks


def refuse_local_statistics(module: nn.Module, rows: JointCalls) -> None:
    """Make BatchNorm raise in training where its statistics would be those of the local batch."""
    for fqn, part in module.named_modules():
        if isinstance(part, _LOCAL_STATISTICS):

            def refuse(part: nn.Module, _args: tuple, fqn: str = fqn) -> None:
                if part.training and not rows.covers_rows:
                    raise RuntimeError(
                        f"{fqn!r} ({type(part).__name__}) normalizes by statistics of the local batch, which is not "
                        "what one device computes: the call is not recorded on the rows of all ranks, as in a "
                        "pipeline, or if it is compiled; .eval() it, or pass per_rank=True to DDP"
                    )

            part.register_forward_pre_hook(refuse)


def check_grad_dtype(trainable: dict[str, nn.Parameter], rules: ReduceRules) -> None:
    """Reject existing gradients whose dtype differs from the one in which gradients will be kept.

    Raises:
        ValueError: With the name of the parameter.
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
