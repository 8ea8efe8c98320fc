"""Try a plan: one step of the parallelized module, in eager mode, without data and without other ranks.

The module is a copy on fake tensors, and the mesh one of ranks that do not exist. DTensor's rules run on it as they do
later, so an operator that would communicate on its own, or has no rule, is found here. All collectives are logged.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale.dtensor.debug import CommLog, comm_log
from vescale.dtensor.extension import aligned_gradient, attach_gradient_receiver, tensors_in

from ... import _torch
from ..._plan.describe import largest_shard
from ..._plan.resolve import resolve
from ...parallelize import execute
from .experts import install_stand_ins
from .trace import read_as_zeros, shadow

__all__ = ["AXIS", "Values", "try_plan", "without_values"]

AXIS = "vescale.dmodule.plans.derive"
"""Name of the axis: torch keeps layouts by mesh, and those of a ghost must not be those of a real one."""


def try_plan(
    module: nn.Module,
    plan: Mapping[str, Any],
    inputs: Mapping[str, object],
    degree: int,
    *,
    whole: Iterable[str],
) -> CommLog:
    """Run a step of a plan, forward and backward, and return its collectives.

    Args:
        module: real, on the meta device, or deferred; it stays as it is.
        plan: of an axis :data:`AXIS`.
        inputs: arguments, see :mod:`.inputs`.
        degree: number of ranks.
        whole: modules whose code depends on values; others stand in for them.

    Raises:
        Exception: whatever the step raises.
    """
    mode = _torch.fake_tensors()
    copied = shadow(module, mode)
    install_stand_ins(copied, whole)
    with _torch.ghost_world(degree), _torch.quiet_fakes(), Values():
        mesh = _torch.ghost_mesh("cpu", AXIS, size=degree, coord=0)
        resolved = resolve(copied, mesh, plan, allow_empty=True)
        _place(copied, mesh, resolved.tensors)
        execute(copied, mesh, resolved)
        for parameter in copied.parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                attach_gradient_receiver(parameter, _OneByOne(parameter))
        with comm_log(copied, mesh=mesh) as log:
            result = copied(**without_values(inputs, mode))
            ends = [t for t in tensors_in(result, dataclasses=True) if t.requires_grad]
            total = sum((t.real if t.is_complex() else t).sum() for t in ends)
            if isinstance(total, Tensor):
                total.backward()
    return log


def without_values(inputs: Mapping[str, object], mode: _torch.FakeTensorMode) -> dict[str, object]:
    """Return inputs whose tensors are fake; those of floating point have gradients, as between parts of a model."""

    def emptied(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty(value.shape, dtype=value.dtype, device="cpu", requires_grad=value.is_floating_point())

    return _torch.tree_map(emptied, dict(inputs))


class Values(_torch.TorchDispatchMode):
    """Read zeros where code reads values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return read_as_zeros(func, args, kwargs or {})


class _OneByOne:
    """Sums the gradient of a parameter when it comes, so that the log has the parameter's name."""

    def __init__(self, parameter: DTensor):
        self.parameter = weakref.ref(parameter)

    def receive(self, local: Tensor, placements: tuple[Placement, ...]) -> None:
        """Sum a gradient."""
        aligned_gradient(self.parameter(), local, placements)


def _place(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, tuple[Placement, ...]]) -> None:
    """Replace parameters, and buffers with placements, by DTensors of empty shards."""
    made: dict[int, Tensor] = {}
    for owner, part in module.named_modules(remove_duplicate=False):
        for table in _torch.tensor_tables(part):
            for key, tensor in table.items():
                name = f"{owner}.{key}" if owner else key
                if tensor is None or name not in placements:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _empty(tensor, mesh, placements[name])
                table[key] = made[id(tensor)]


def _empty(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    local = tensor.detach().new_empty(largest_shard(tuple(tensor.shape), placements, list(mesh.shape)))
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
