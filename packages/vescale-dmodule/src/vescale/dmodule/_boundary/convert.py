"""Bring values to the placements that a plan names for a boundary.

A plan entry mirrors the structure of the values (see ``_plan.placements``). A plain tensor at a boundary is equal on
all ranks of the mesh, like everything outside the parallelized module.

The conversions are differentiable. The backward of each is its conjugate (all-gather and reduce-scatter, all-reduce and
identity), so a boundary fixes the placements of gradients too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.overrides import handle_torch_function, has_torch_function

from .. import _torch
from .._plan.placements import Repeat, is_placements, normalize, on_shape
from ..errors import PlanError
from .values import fields_of, map_tensors, rebuild_fields, rebuild_sequence

__all__ = ["Convert", "as_dtensor", "bring", "in_one_call", "is_plain", "place", "to_plain"]

Convert = Callable[[Tensor, tuple[Placement, ...], str], Tensor]
"""Bring a tensor to placements; the third argument is the name of the boundary."""


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor of torch's own type, not of a subclass."""
    return type(value) in (Tensor, nn.Parameter)


def as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a plain tensor that is equal on all ranks as a replicated DTensor; gradients come back reduced."""
    with _torch.no_function_modes():  # what DTensor does inside is no call of the user's program
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def bring(tensor: Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh, *, is_result: bool = False) -> DTensor:
    """Return ``tensor`` in ``placements``, differentiably.

    Args:
        tensor: a DTensor, or a plain tensor that is equal on all ranks.
        placements: of the result.
        mesh: of the placements.
        is_result: whether ``tensor`` is the result of a module. A result that stays where it is stays the same object,
            so the caller may change it in place. An argument may have other uses, so its module gets an alias.

    Note [boundaries are torch functions]: like an operator of torch, this and :func:`to_plain` offer themselves to
    function modes and tensor subclasses first. A pipeline that stands in for values of other stages sees one call,
    whatever communication it takes, and its stand-ins need no support of DTensor.
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(bring, (tensor,), tensor, placements, mesh, is_result=is_result)
    tensor = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, mesh)
    ahead = tensor.device_mesh.ndim - len(placements)  # an axis of rows, see `rows_axis`
    placements = (*tensor.placements[:ahead], *placements)
    moved = tuple(tensor.placements) != placements
    summed = any(p.is_partial() for p in tensor.placements)
    if moved:
        tensor = tensor.redistribute(placements=placements)
    if moved and not summed:
        return tensor  # the redistribution brings the gradient back to the layout of its operand
    if not (moved or (is_result and not tensor.is_leaf)):
        return _PinGradient.apply(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        _torch.hook_first(tensor, functools.partial(_pinned, _without_partials(tensor)))
    return tensor


def to_plain(tensor: Tensor) -> Tensor:
    """Return a replicated DTensor as a plain tensor, a partial one reduced; sharded and plain ones stay as they are.

    See Note [boundaries are torch functions].
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(to_plain, (tensor,), tensor)
    if not isinstance(tensor, DTensor) or any(p.is_shard() for p in tensor.placements):
        return tensor
    if any(p.is_partial() for p in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor.to_local()


def in_one_call(convert: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``convert(tensor)``, which function modes see as one call; see Note [boundaries are torch functions]."""
    if has_torch_function((tensor,)):
        return handle_torch_function(in_one_call, (tensor,), convert, tensor)
    return convert(tensor)


# ------------------------------------------------------------------------------------------------- structures


def place(value: object, entry: object, mesh: DeviceMesh, where: str, convert: Convert | None = None) -> object:
    """Return ``value`` with its tensors in the placements of ``entry``.

    Args:
        value: a tensor, or a structure of them.
        entry: placements in the same structure.
        mesh: the mesh of the placements.
        where: the boundary's name; a tensor inside of a structure has its path appended.
        convert: brings one tensor to its placements; :func:`bring` by default.

    Raises:
        PlanError: the structure of ``entry`` does not fit the value, naming the boundary.
    """
    if entry is None or value is None:
        return value
    if isinstance(entry, Repeat):
        return place(map_tensors(entry.apply, value), entry.entry, mesh, where, convert)
    if is_placements(entry):
        return _place_tensor(value, normalize(entry, mesh, where), mesh, where, convert)
    if isinstance(entry, Mapping):
        return _place_fields(value, entry, mesh, where, convert)
    if not isinstance(value, tuple | list):
        if len(entry) == 1:  # a module with one output may be written as a list of one
            return place(value, entry[0], mesh, where, convert)
        raise PlanError(
            f"{where}: expected a tuple or list of {len(entry)} values, one per entry of the plan, got one "
            f"{type(value).__name__}; write one entry"
        )
    if len(entry) > len(value):
        raise PlanError(
            f"{where}: expected {len(entry)} values, one per entry of the plan, got {len(value)}; "
            "remove entries from the plan"
        )
    pairs = enumerate(zip(value, entry, strict=False))
    placed = [place(v, e, mesh, f"{where} [{i}]", convert) for i, (v, e) in pairs]
    return rebuild_sequence(value, [*placed, *value[len(entry) :]])


def _place_tensor(
    value: object, placements: tuple[Placement, ...], mesh: DeviceMesh, where: str, convert: Convert | None
) -> Tensor:
    if not isinstance(value, Tensor):
        raise PlanError(
            f"{where}: expected a tensor for the planned placements {placements}, got a {type(value).__name__}; "
            "write None to leave the value as it is"
        )
    placements = on_shape(placements, value.shape, where)
    return bring(value, placements, mesh) if convert is None else convert(value, placements, where)


class _PinGradient(torch.autograd.Function):
    """Identity whose gradient has the placements of the value; partial sums from both sides never meet further up."""

    @staticmethod
    def forward(ctx, tensor: DTensor) -> DTensor:
        ctx.placements = _without_partials(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: DTensor) -> DTensor:
        return _pinned(ctx.placements, grad)


def _pinned(placements: list[Placement], grad: DTensor) -> DTensor:
    return grad.redistribute(placements=placements)


def _without_partials(tensor: DTensor) -> list[Placement]:
    return [Replicate() if p.is_partial() else p for p in tensor.placements]


def _place_fields(value: object, entry: Mapping, mesh: DeviceMesh, where: str, convert: Convert | None) -> object:
    fields = fields_of(value)
    if fields is None:
        raise PlanError(
            f"{where}: expected a dict or dataclass with the planned fields {sorted(entry)}, got a "
            f"{type(value).__name__}; plan it by position"
        )
    missing = [name for name in entry if name not in fields]
    if missing:
        raise PlanError(f"{where}: no field {missing[0]!r}; use one of {sorted(map(str, fields))}")
    placed = {name: place(fields[name], inner, mesh, f"{where} {name!r}", convert) for name, inner in entry.items()}
    return rebuild_fields(value, placed)
