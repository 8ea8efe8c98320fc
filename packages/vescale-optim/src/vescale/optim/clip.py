"""Gradient clipping by the norm that one device would compute.

Over a mesh a gradient's elements are distributed in several ways at once: a tensor-parallel weight is sharded over tp,
a norm's gain is replicated over tp, ZeRO shards both over dp, and other pipeline stages hold other parameters. The
p-norm of all of them is the p-th root of a sum in which every element counts once:

    class of parameters, by the axes over which they are sharded    {}     {tp}    {dp}    {tp, dp}
    local sum of |g|^p                                              s0     s1      s2      s3
    added on the ranks that are first along the other axes          tp,dp  dp      tp      -
    one all-reduce of that number over all ranks: of tp, dp and norm_axes, whose ranks hold different parameters

So there is one all-reduce of one number, for any number of parameters, classes and axes, and all ranks receive the same
bits (`_norm/counting.py`, `_ranks/span.py`). For the infinity norm, the maximum replaces the sum. Exact norms take one
more all-reduce (`_norm/exact.py`). The host does not wait, except with ``error_if_nonfinite``. Replicas (of a gain over
tp, of shards in hybrid sharding) count once.

Inside of ``vescale.dtensor.exact`` the norm is torch's in one process, bit for bit (`_norm/by_tree.py`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import UnsupportedOperator
from vescale.dtensor.extension import Fact, Turns, exact_num_blocks

from . import _torch
from ._gradients.placeholder import ShardedGradient, align_gradients, local_gradient
from ._norm.by_tree import norm_by_tree, norms_by_tree, of_all_stages
from ._norm.counting import Counting
from ._norm.exact import EXACT_NORMS, exact_norm
from ._ranks.axis import Axis
from ._ranks.data_axes import DataAxes
from ._ranks.span import KnownAxis, Ranks
from .ddp import DDP

__all__ = ["check_max_norm", "clip_grad_norm_", "distribution_axes", "mesh_axes"]

#: Calls by axis, to compare arguments now and then. Process-wide, because no object outlives the calls of a function.
_turns: dict[tuple[object, ...], Turns] = {}


def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    norm_axes: Iterable[DeviceMesh] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients, in place, so that their global norm is at most ``max_norm``.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)``, at most 1. Sums over ranks
    and the norm itself are taken in float64, sums of a tensor in float32 or, for float64, in float64.

    Every rank of the meshes of the parameters, of ``DDP`` and of ``norm_axes`` must call it, as often as the others,
    also ranks that only hold replicas. If their meshes are slices of one mesh, it is one all-reduce over all of them
    (two for norms of order 1 and 2 with ``DDP(reduction="ordered")``). Each axis that is not a slice of that mesh takes
    one more. In the first call with a mesh or ``norm_axes`` the ranks also compare axes and arguments; the host waits.
    They compare arguments again in every N-th call (`vescale.dtensor.check_ranks`).

    Args:
        model_or_parameters: A ``DDP``, another module, or parameters. Parameters may be plain tensors or DTensors.
        max_norm: Largest norm: a positive number; ``math.inf`` only measures, and writes no gradient. torch takes any
            number, and turns the gradients around for a negative one.
        norm_type: The p of the p-norm; positive, may be ``math.inf``.
        norm_axes: 1-D meshes whose ranks hold different parameters, for example ``(mesh["pp"],)``.
        error_if_nonfinite: Raise if the norm is nan or infinite; the host waits for the result then.

    Returns:
        The norm before clipping, a 0-dim tensor, the same on every rank; in float64 if a parameter of this rank is,
        else in float32.

    Raises:
        TypeError: If ``max_norm`` or ``norm_type`` is not a number.
        ValueError: If ``max_norm`` or ``norm_type`` is not positive, a norm axis is not 1-D or is counted already, or
            ranks of a mesh have parameters of different meshes; or, on every rank, if ``max_norm`` or ``norm_type``
            differs between ranks.
        RuntimeError: For gradients accumulated under ``no_sync`` and not reduced; if ``error_if_nonfinite`` applies.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
    """
    max_norm = check_max_norm("clip_grad_norm_: max_norm", max_norm)
    norm_type = _positive_number("clip_grad_norm_: norm_type", norm_type, fix="pass 2.0, or math.inf for the maximum")
    _check_others(norm_axes, error_if_nonfinite)
    model = model_or_parameters if isinstance(model_or_parameters, DDP) else None
    parameters = _parameters(model_or_parameters)
    classes = _classes(parameters, model)
    known = _known_axes(classes, model)
    extra_axes = _extra_axes(norm_axes, known)
    if model is not None:
        model.check_reduced()
    align_gradients(parameters)
    parts = [_gradients(each.parameters) for each in classes]  # raises, if at all, before the first collective
    counting = _counting(classes, known, extra_axes)
    _compare({"max_norm": max_norm, "norm_type": norm_type}, parameters, model, extra_axes)
    if exact_num_blocks() is not None:
        norm = _norm_by_tree(parameters, norm_type, model, [each.axis for each in extra_axes])
    else:
        exactly = model is not None and model.reduction == "ordered" and norm_type in EXACT_NORMS
        norm = _global_norm(parts, norm_type, counting, _device(classes, counting.axes), exactly=exactly)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}; to go on nevertheless pass "
            "error_if_nonfinite=False"
        )
    if max_norm < math.inf:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for (device, dtype), group in _by_device_and_dtype(_gradients(parameters)).items():
            _torch.foreach_mul_(group, factor.to(device, dtype))
    wide = any(p.dtype == torch.float64 for p in parameters)
    return norm if wide else norm.float()


def _norm_by_tree(parameters: Sequence[Tensor], norm_type: float, model: DDP | None, stages: Sequence[Axis]) -> Tensor:
    """Return the norm inside of ``vescale.dtensor.exact``.

    Raises:
        UnsupportedOperator: Other ranks have other parameters, whose place in the order of additions is unknown.
    """
    norms = norms_by_tree(parameters, norm_type)
    if not stages:
        return norm_by_tree(list(norms.values()), norm_type)
    if model is None or not model.parameter_order:
        raise UnsupportedOperator(
            f"clip_grad_norm_ over the axis {stages[0].name!r} inside of vescale.dtensor.exact: expected all "
            "parameters on every rank, got ranks with others, whose place in the order of additions is unknown; use "
            "vescale.Plan(exact=8)"
        )
    named = {name: norms[param] for name, param in model.named_parameters() if param in norms}
    return norm_by_tree(of_all_stages(named, stages, model.parameter_order), norm_type)


def check_max_norm(what: str, value: Any) -> float:
    """Return the largest norm of a clipping as a float; ``what`` begins the error.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not positive, or nan.
    """
    return _positive_number(what, value, fix="pass a norm such as 1.0; math.inf only measures the norm")


def _check_others(norm_axes: Any, error_if_nonfinite: Any) -> None:
    if not isinstance(norm_axes, DeviceMesh | Iterable) or isinstance(norm_axes, str):
        raise TypeError(f"clip_grad_norm_: expected meshes for norm_axes, got {norm_axes!r}; pass (mesh['pp'],)")
    if not isinstance(error_if_nonfinite, bool):
        raise TypeError(f"clip_grad_norm_: expected bool for error_if_nonfinite, got {error_if_nonfinite!r}")


def _positive_number(what: str, value: Any, *, fix: str) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"{what}: expected a positive number, got {value!r}; {fix}")
    number = float(value)
    if not number > 0:
        raise ValueError(f"{what}: expected a positive number, got {number}; {fix}")
    return number


def _parameters(model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(model_or_parameters, nn.Module):
        return [p for p in model_or_parameters.parameters() if p.requires_grad]
    if isinstance(model_or_parameters, Tensor):
        return [model_or_parameters]
    found = list(model_or_parameters) if isinstance(model_or_parameters, Iterable) else [model_or_parameters]
    for item in found:
        if not isinstance(item, Tensor):
            raise TypeError(
                f"clip_grad_norm_: model_or_parameters: expected a module or parameters, got {item!r}; pass "
                "model.parameters()"
            )
    return found


def _compare(
    arguments: Mapping[str, float], parameters: Sequence[Tensor], model: DDP | None, extra_axes: Sequence[KnownAxis]
) -> None:
    """Compare the arguments over all ranks, in the first call with these axes and in every N-th.

    Raises:
        ValueError: On every rank, if they differ.
    """
    for axis in [*mesh_axes(parameters, model), *(each.axis for each in extra_axes)]:
        if _turns.setdefault((dist.group.WORLD, axis.ranks), Turns()).is_due():
            fix = "pass the same on all ranks"
            facts = [Fact(f"{name} of clip_grad_norm_", str(value), fix) for name, value in arguments.items()]
            axis.check_facts(facts, what="the arguments of clip_grad_norm_")


def mesh_axes(parameters: Sequence[Tensor], model: DDP | None) -> list[Axis]:
    """Return the axes of more than one rank of ``DDP`` and of the meshes of parameters, also those of replicas."""
    axes = [data.all for data in _different(_data_axes(param, model) for param in parameters)]
    for mesh in dict.fromkeys(param.device_mesh for param in parameters if isinstance(param, DTensor)):
        axes += [Axis.of_dim(mesh, dim) for dim in range(mesh.ndim)]
    return list({axis.ranks: axis for axis in axes if axis.size > 1}.values())


def distribution_axes(
    parameters: Sequence[Tensor], model: DDP | None, norm_axes: Iterable[DeviceMesh] = ()
) -> list[Axis]:
    """Return axes that join all ranks that hold other parts of these parameters, or other parameters."""
    classes = _classes(parameters, model)
    known = _known_axes(classes, model)
    return _counting(classes, known, _extra_axes(norm_axes, known)).axes


@dataclass
class _Class:
    """Parameters whose gradients are sharded over the same axes, perhaps none.

    Attributes:
        parameters: The parameters.
        axes: Axes of more than one rank over which they are sharded.
        mesh: Their mesh if they are DTensors.
        data: The axes of the ``DDP`` that owns them; None if unknown.
    """

    parameters: list[Tensor] = field(default_factory=list)
    axes: dict[Ranks, Axis] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    data: DataAxes | None = None


def _classes(parameters: Sequence[Tensor], model: DDP | None) -> list[_Class]:
    """Sort parameters by layout, in order of first appearance: the same on all ranks that share the parameters."""
    classes: dict[object, _Class] = {}
    for param in parameters:
        zero_axis = _zero_axis(param, model)
        layout = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        key = (layout, zero_axis)
        if key not in classes:
            axes = [*_shard_axes(param), *([zero_axis] if zero_axis else [])]
            axes = {axis.ranks: axis for axis in axes if axis.size > 1}
            classes[key] = _Class([], axes, layout and layout[0], _data_axes(param, model))
        classes[key].parameters.append(param)
    return list(classes.values())


def _zero_axis(param: Tensor, model: DDP | None) -> Axis | None:
    """Return the axis over which ZeRO shards the gradient, even if this rank has no gradient."""
    if model is not None:
        return model.data_axes.shard if model.zero else None
    return param.grad.slot.bucket.axis if isinstance(param.grad, ShardedGradient) else None


def _shard_axes(param: Tensor) -> list[Axis]:
    if not isinstance(param, DTensor):
        return []
    dims = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
    return [Axis.of_dim(param.device_mesh, dim) for dim in dims]


def _data_axes(param: Tensor, model: DDP | None) -> DataAxes | None:
    """Return the axes of the model's ``DDP``, or of the ``DDP`` that has sharded the gradient."""
    if model is not None:
        return model.data_axes
    return param.grad.slot.bucket.axes if isinstance(param.grad, ShardedGradient) else None


def _known_axes(classes: Sequence[_Class], model: DDP | None) -> dict[Ranks, KnownAxis]:
    """Return the axes over which parameters are distributed or replicated, as far as their meshes are known."""
    found = []
    for data in _different(each.data for each in classes):
        axes, meshes = (data.all, data.shard, data.replicate), data.meshes
        if model is not None:
            found += [KnownAxis.of(axis, model.mesh_axis) for axis in axes]
        elif len(meshes) == 1:
            found.append(KnownAxis.of(data.all, meshes[0]))
        else:  # the mesh of which both are slices is unavailable
            found += [
                KnownAxis.of(axis, mesh) for axis, mesh in zip((data.replicate, data.shard), meshes, strict=False)
            ]
    for mesh in dict.fromkeys(each.mesh for each in classes if each.mesh is not None):
        found += [KnownAxis.of(Axis.of_dim(mesh, dim), mesh) for dim in range(mesh.ndim)]
    known: dict[Ranks, KnownAxis] = {}
    for each in found:
        if each.axis.size > 1:
            known.setdefault(each.axis.ranks, each)
    return known


def _different(found: Iterable[DataAxes | None]) -> list[DataAxes]:
    return list({id(data): data for data in found if data is not None}.values())


def _extra_axes(norm_axes: Iterable[DeviceMesh], known: Mapping[Ranks, KnownAxis]) -> list[KnownAxis]:
    meshes = [norm_axes] if isinstance(norm_axes, DeviceMesh) else norm_axes
    extra = [KnownAxis.of(Axis.of(mesh, role="norm_axes"), mesh) for mesh in meshes]
    counted = [set(ranks) for ranks in known]
    for each in extra:
        if any(len(ranks.intersection(each.axis.ranks)) > 1 for ranks in counted):
            raise ValueError(
                f"norm_axes has the axis {each.axis.name!r}, over which the parameters are distributed or replicated "
                "(or another of norm_axes goes) and which counts already; give only axes whose ranks hold different "
                'parameters, such as mesh["pp"]'
            )
        counted.append(set(each.axis.ranks))
    return [each for each in extra if each.axis.size > 1]


def _counting(classes: Sequence[_Class], known: Mapping[Ranks, KnownAxis], extra_axes: Sequence[KnownAxis]) -> Counting:
    sharded = [data for data in _different(each.data for each in classes) if data.shard.size > 1]
    return Counting.of([each.axes for each in classes], known, extra_axes, [data.replicate for data in sharded])


def _global_norm(
    parts: Sequence[Sequence[Tensor]], norm_type: float, counting: Counting, device: torch.device, *, exactly: bool
) -> Tensor:
    """Return the p-norm over all ranks, of the gradients of each class, as a 0-dim float64 tensor."""
    if exactly:
        return exact_norm(parts, norm_type, counting, device)
    parts = [part if share.is_needed else [] for part, share in zip(parts, counting.shares, strict=True)]
    sums = [_power_sum(part, norm_type, device) for part in parts]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        return _largest(torch.stack([*sums, zero]), counting)
    # Replicas outside the span have computed their sums separately, perhaps in another order.
    return counting.same(counting.sum(sums, zero=zero)) ** (1.0 / norm_type)


def _largest(numbers: Tensor, counting: Counting) -> Tensor:
    """Return the largest number of all ranks, or nan if there is one; backends do not define the maximum of nan."""
    nan = numbers.isnan()
    local = torch.stack([numbers.masked_fill(nan, 0.0).max(), nan.any().double()])
    largest, any_nan = counting.largest(local).unbind()
    return torch.where(any_nan > 0, math.nan, largest)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the local parts of the existing gradients."""
    found = []
    for param in parameters:
        grad = local_gradient(param)
        if grad is not None:
            found.append(grad)
    return found


def _device(classes: Sequence[_Class], axes: Sequence[Axis]) -> torch.device:
    """Return the device of the axes' collectives, also on a rank without parameters, or with parameters elsewhere."""
    device = _torch.local_tensor(classes[0].parameters[0]).device if classes else torch.device("cpu")
    other = next((axis.device_type for axis in axes if axis.device_type != device.type), None)
    return device if other is None else torch.empty(0, device=other).device


def _power_sum(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p (for p = inf: the maximum of |g|) of local tensors as a 0-dim float64 tensor."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for (_, dtype), group in _by_device_and_dtype(grads).items():
        wide = torch.promote_types(dtype, torch.float32)
        found = _torch.foreach_norms(group, norm_type, wide)
        norms += [torch.stack(found).to(device, torch.float64)] if found else []
    norms = torch.cat([norm.view(-1) for norm in norms])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups
