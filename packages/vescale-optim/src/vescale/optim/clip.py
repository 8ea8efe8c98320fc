"""Gradient clipping by the norm that one device would compute.

Over a mesh a gradient's elements are distributed in several ways at once: a tensor-parallel weight is sharded over tp,
a norm's gain is replicated over tp, ZeRO shards both over dp, and other pipeline stages hold other parameters. The
p-norm of all of them is the p-th root of a sum in which every element counts once:

    class of parameters, by the axes over which they are sharded    {}     {tp}    {dp}    {tp, dp}
    local sum of |g|^p                                              s0     s1      s2      s3
    all-reduce over tp                                                     +               +
    all-reduce over dp                                                             +       +
    all-reduce of the total over norm_axes, whose ranks hold different parameters

So there is one all-reduce of a few numbers per axis, whatever the number of parameters. For the infinity norm sum is
max. Nothing waits for the host, unless ``error_if_nonfinite``. Replicas (tp of a gain, those of hybrid sharding) count
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch
from ._axis import Axis
from ._exact_norm import EXACT_NORMS, exact_norm
from ._grads import ShardedGradient, align_gradients, local_gradient
from .ddp import DDP

__all__ = ["clip_grad_norm_", "distribution_axes"]

Ranks = tuple[int, ...]


def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    norm_axes: Iterable[DeviceMesh] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients, in place, so that their global norm is at most ``max_norm``.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)``, at most 1. Every rank of the
    axes involved must call it. Sums over ranks and the norm itself are taken in float64, sums of a tensor in float32
    or, for float64, in float64.

    Args:
        model_or_parameters: A ``DDP``, another module, or parameters. Parameters may be plain tensors or DTensors.
        max_norm: Largest norm.
        norm_type: The p of the p-norm; positive, may be ``math.inf``.
        norm_axes: 1-D meshes whose ranks hold different parameters, for example ``(mesh["pp"],)``.
        error_if_nonfinite: Raise if the norm is nan or infinite; the host waits for the result then.

    Returns:
        The norm before clipping, a 0-dim tensor, the same on every rank.

    Raises:
        ValueError: If ``norm_type`` is not positive, or a norm axis is not 1-D or is counted already.
        RuntimeError: For gradients accumulated under ``no_sync`` and not reduced; if ``error_if_nonfinite`` applies.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive (math.inf included), got {norm_type}")
    model = model_or_parameters if isinstance(model_or_parameters, DDP) else None
    parameters = _parameters(model_or_parameters)
    extra_axes = _extra_axes(norm_axes, parameters, model)
    if model is not None:
        model.check_reduced()
    align_gradients(parameters)
    norm = _global_norm(parameters, model, norm_type, extra_axes)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}; to go on nevertheless pass "
            "error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (device, dtype), group in _by_device_and_dtype(_gradients(parameters)).items():
        _torch.foreach_mul_(group, factor.to(device, dtype))
    wide = any(p.dtype == torch.float64 for p in parameters)
    return norm if wide else norm.float()


def _parameters(model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(model_or_parameters, nn.Module):
        return [p for p in model_or_parameters.parameters() if p.requires_grad]
    if isinstance(model_or_parameters, Tensor):
        return [model_or_parameters]
    return list(model_or_parameters)


def distribution_axes(
    parameters: Sequence[Tensor], model: DDP | None, norm_axes: Iterable[DeviceMesh] = ()
) -> list[Axis]:
    """Return the axes whose ranks hold other gradients: other parts of these parameters, or other parameters."""
    extra = _extra_axes(norm_axes, parameters, model)
    axes = {ranks: axis for each in _classes(parameters, model) for ranks, axis in each.axes.items()}
    return [*axes.values(), *extra]


@dataclass
class _Class:
    """Parameters whose gradients are sharded over the same axes, perhaps none."""

    parameters: list[Tensor] = field(default_factory=list)
    axes: dict[Ranks, Axis] = field(default_factory=dict)


def _classes(parameters: Sequence[Tensor], model: DDP | None) -> list[_Class]:
    """Sort parameters by layout, in order of first appearance: the same on all ranks that share the parameters."""
    classes: dict[object, _Class] = {}
    for param in parameters:
        zero_axis = _zero_axis(param, model)
        layout = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        key = (layout, zero_axis)
        if key not in classes:
            axes = [*_shard_axes(param), *([zero_axis] if zero_axis else [])]
            classes[key] = _Class(axes={axis.ranks: axis for axis in axes if axis.size > 1})
        classes[key].parameters.append(param)
    return list(classes.values())


def _zero_axis(param: Tensor, model: DDP | None) -> Axis | None:
    """Return the axis over which ZeRO shards the gradient, also where this rank has no gradient."""
    if model is not None:
        return model._axes.shard if model.zero else None
    return param.grad.slot.bucket.axis if isinstance(param.grad, ShardedGradient) else None


def _shard_axes(param: Tensor) -> list[Axis]:
    if not isinstance(param, DTensor):
        return []
    dims = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
    return [Axis.of_dim(param.device_mesh, dim) for dim in dims]


def _extra_axes(norm_axes: Iterable[DeviceMesh], parameters: Sequence[Tensor], model: DDP | None) -> list[Axis]:
    meshes = [norm_axes] if isinstance(norm_axes, DeviceMesh) else norm_axes
    extra = [Axis.of(mesh, role="norm_axes") for mesh in meshes]
    param_meshes = {p.device_mesh for p in parameters if isinstance(p, DTensor)}
    counted = {Axis.of_dim(mesh, dim).ranks for mesh in param_meshes for dim in range(mesh.ndim)}
    if model is not None:
        counted |= {axis.ranks for axis in (model._axes.all, model._axes.shard, model._axes.replicate)}
    for axis in extra:
        if axis.size > 1 and axis.ranks in counted:
            raise ValueError(
                f"norm_axes has the axis {axis.name!r}, over which the parameters are distributed or replicated and "
                'which counts already; give only axes whose ranks hold different parameters, such as mesh["pp"]'
            )
    return [axis for axis in extra if axis.size > 1]


def _global_norm(parameters: Sequence[Tensor], model: DDP | None, norm_type: float, extra_axes: list[Axis]) -> Tensor:
    """Return the p-norm over all ranks as a 0-dim float64 tensor."""
    device = _device(parameters, extra_axes)
    classes = _classes(parameters, model)
    if model is not None and model.reduction == "ordered" and norm_type in EXACT_NORMS:
        parts = [(_gradients(each.parameters), each.axes.values()) for each in classes]
        return exact_norm(parts, norm_type, extra_axes, device)
    sums = [_power_sum(_gradients(each.parameters), norm_type, device) for each in classes]
    axes = {ranks: axis for each in classes for ranks, axis in each.axes.items()}
    for ranks, axis in axes.items():
        involved = [i for i, each in enumerate(classes) if ranks in each.axes]
        reduced = _all_reduce(torch.stack([sums[i] for i in involved]), norm_type, axis)
        for i, value in zip(involved, reduced.unbind(), strict=True):
            sums[i] = value
    total = _combine([*sums, torch.zeros((), dtype=torch.float64, device=device)], norm_type)
    for axis in extra_axes:
        total = _all_reduce(total, norm_type, axis)
    if model is not None and model.zero and model._axes.replicate.size > 1:
        # Each replica has added up for itself, perhaps in an order of its own: they must not part in the last bit.
        total = _all_reduce(total, math.inf, model._axes.replicate)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the local parts of the gradients that are there."""
    found = []
    for param in parameters:
        grad = local_gradient(param)
        if grad is not None:
            found.append(grad)
    return found


def _device(parameters: Sequence[Tensor], extra_axes: list[Axis]) -> torch.device:
    """Return where to compute: also a rank without parameters takes part in the reductions."""
    if parameters:
        return _torch.local_tensor(parameters[0]).device
    return torch.empty(0, device=extra_axes[0].device_type).device if extra_axes else torch.device("cpu")


def _power_sum(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p (for p = inf: the maximum of |g|) of local tensors as a 0-dim float64 tensor."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for (_, dtype), group in _by_device_and_dtype(grads).items():
        wide = torch.promote_types(dtype, torch.float32)
        found = _torch.foreach_norms(group, norm_type, wide)
        norms += [torch.stack(found).to(device, torch.float64)] if found else []
    norms = torch.cat([norm.view(-1) for norm in norms])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _combine(sums: list[Tensor], norm_type: float) -> Tensor:
    stacked = torch.stack(sums)
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def _all_reduce(tensor: Tensor, norm_type: float, axis: Axis) -> Tensor:
    work = axis.all_reduce(tensor, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    if work is not None:
        work.wait()
    return tensor


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
