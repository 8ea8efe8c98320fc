"""Boundaries: what enters or leaves a module is brought to the placements that the plan names.

A plan entry mirrors the structure of the values: placements for a tensor, a list for positions (or tuple outputs), a dict
for names (arguments, keys, dataclass fields), None to leave a value as it is. A plain tensor at a boundary is taken as
equal on all ranks of the mesh, as everything outside the parallel module is.

The conversions are differentiable; the backward of each one is its conjugate (all-gather against reduce-scatter,
all-reduce against identity), so a boundary fixes the layout of gradients too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.overrides import handle_torch_function, has_torch_function

from . import _torch
from ._placements import check_dims, is_placement_spec, normalize
from .errors import PlanError

__all__ = ["as_dtensor", "bring", "install_inputs", "install_outputs", "place", "to_plain"]


def as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a plain tensor that is equal on all ranks as a replicated DTensor; gradients come back reduced."""
    with _torch.no_function_modes():  # what DTensor does inside is no call of the user's program
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def bring(tensor: Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> DTensor:
    """Return ``tensor`` in ``placements``, differentiably.

    Note [boundaries are torch functions]: like an operator of torch, this and :func:`to_plain` offer themselves to function
    modes and tensor subclasses first. A pipeline that stands in for values of other stages sees one call, whatever
    communication it takes, and a stand-in needs not know DTensor.
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(bring, (tensor,), tensor, placements, mesh)
    tensor = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, mesh)
    moved = tuple(tensor.placements) != placements
    summed = any(p.is_partial() for p in tensor.placements)
    if moved:
        tensor = tensor.redistribute(placements=placements)
    # A redistribution from Replicate or Shard brings its gradient back to that layout by itself.
    return tensor if moved and not summed else _PinGradient.apply(tensor)


def to_plain(tensor: Tensor) -> Tensor:
    """Return a replicated DTensor as a plain tensor and a partial one reduced; leave sharded and plain ones as they are.

    See Note [boundaries are torch functions].
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(to_plain, (tensor,), tensor)
    if not isinstance(tensor, DTensor) or any(p.is_shard() for p in tensor.placements):
        return tensor
    if any(p.is_partial() for p in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor.to_local()


def place(value: object, spec: object, mesh: DeviceMesh, where: str) -> object:
    """Return ``value`` with its tensors in the placements of ``spec``.

    Raises:
        PlanError: the structure of ``spec`` does not fit the value, naming the boundary.
    """
    if spec is None or value is None:
        return value
    if is_placement_spec(spec):
        return _place_tensor(value, normalize(spec, mesh.mesh_dim_names, where), mesh, where)
    if isinstance(spec, Mapping):
        return _place_fields(value, spec, mesh, where)
    if isinstance(spec, Sequence) and isinstance(value, (tuple, list)):
        if len(spec) > len(value):
            raise PlanError(f"{where}: the plan has {len(spec)} entries, the module gave {len(value)} values")
        placed = [place(v, s, mesh, f"{where}[{i}]") for i, (v, s) in enumerate(zip(value, spec, strict=False))]
        placed += value[len(spec) :]
        return type(value)(placed) if type(value) in (tuple, list) else type(value)(*placed)
    if isinstance(spec, Sequence) and len(spec) == 1:  # a module with one output may be written as a list of one
        return place(value, spec[0], mesh, where)
    raise PlanError(f"{where}: the plan says {spec!r}, but the value is a {type(value).__name__}")


def _place_tensor(value: object, placements: tuple[Placement, ...], mesh: DeviceMesh, where: str) -> DTensor:
    if not isinstance(value, Tensor):
        raise PlanError(f"{where}: the plan gives placements {placements}, but the value is a {type(value).__name__}")
    check_dims(placements, value.shape, where)
    return bring(value, placements, mesh)


class _PinGradient(torch.autograd.Function):
    """Identity whose gradient has the placements of the value; partial sums from both sides never meet further up."""

    @staticmethod
    def forward(ctx, tensor: DTensor) -> DTensor:
        ctx.placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


def _place_fields(value: object, spec: Mapping, mesh: DeviceMesh, where: str) -> object:
    if isinstance(value, Mapping):
        fields = value
    elif dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:
        raise PlanError(f"{where}: the plan names {sorted(spec)}, but the value is a {type(value).__name__}")
    missing = [name for name in spec if name not in fields]
    if missing:
        raise PlanError(f"{where}: no field {missing[0]!r}; fields are {sorted(map(str, fields))}")
    placed = {name: place(fields[name], sub, mesh, f"{where}.{name}") for name, sub in spec.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **placed)
    return type(value)({**value, **placed})


def install_inputs(module: nn.Module, name: str, spec: object, mesh: DeviceMesh) -> None:
    """Convert the inputs of ``module`` on every call: a list by position, a dict by argument name."""
    signature = inspect.signature(module.forward)
    where = f"{name}.input" if name else "input"
    positions = list(signature.parameters)
    if is_placement_spec(spec):
        spec = [spec]
    if not isinstance(spec, Mapping):
        if len(spec) > len(positions):
            raise PlanError(f"{where}: the plan has {len(spec)} entries, forward takes {positions}")
        spec = dict(zip(positions, spec, strict=False))
    unknown = [argument for argument in spec if argument not in positions]
    if unknown:
        raise PlanError(f"{where}: forward has no argument {unknown[0]!r}; its arguments are {positions}")

    def convert(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        bound = signature.bind(*args, **kwargs)
        for argument, placements in spec.items():
            if argument in bound.arguments:
                bound.arguments[argument] = place(bound.arguments[argument], placements, mesh, f"{where} {argument!r}")
        return bound.args, bound.kwargs

    module.register_forward_pre_hook(convert, with_kwargs=True)


def install_outputs(module: nn.Module, name: str, spec: object, mesh: DeviceMesh) -> None:
    """Convert what ``module`` returns on every call."""
    where = f"{name}.output" if name else "output"
    module.register_forward_hook(lambda _module, _args, output: place(output, spec, mesh, where))
