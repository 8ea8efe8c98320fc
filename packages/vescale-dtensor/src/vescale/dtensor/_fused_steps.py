"""Fused steps of optimizers on sharded parameters: every rank updates its shards, as they are.

``torch.optim.AdamW(fused=True)`` and its relatives are one operator over lists of parameters, gradients and states. It
treats every element alike, so nothing moves where those of one parameter are placed alike. Stock DTensor gets there
too, but describes every tensor of the lists anew in each step, which takes longer than the step itself.

All other calls are left to stock DTensor: gradients in other placements than their parameters, values that are not
reduced yet, numbers that are DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch

__all__ = ["fused_step_handlers"]

NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_")


def fused_step_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handler of every fused optimizer step that this torch has."""
    packets = [getattr(torch.ops.aten, name, None) for name in NAMES]
    return {getattr(packet, name): _step for packet in packets if packet is not None for name in packet.overloads()}


def _step(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    parameters, *others = args
    if not _fit(parameters, [arg for arg in others if isinstance(arg, (list, tuple))]):
        return _torch.stock_dispatch(op, args, kwargs)
    if any(isinstance(value, DTensor) for value in (*others, *kwargs.values())):
        return _torch.stock_dispatch(op, args, kwargs)
    shards = [list(map(_local, arg)) if isinstance(arg, (list, tuple)) else arg for arg in args]
    op(*shards, **kwargs)
    return None


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _fit(parameters: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> bool:
    """Tell whether the tensors at each position of all lists are placed like the parameter there, or are numbers."""
    if not all(isinstance(parameter, DTensor) for parameter in parameters):
        return False
    layouts = [_torch.placements_of(parameter) for parameter in parameters]
    if any(placement.is_partial() for layout in set(layouts) for placement in layout):
        return False
    shapes, meshes = [p.shape for p in parameters], [p.device_mesh for p in parameters]
    for column in others:
        if not column:  # a state that this call of the operator does without
            continue
        if len(column) != len(parameters):
            return False
        if not isinstance(column[0], DTensor):
            if any(isinstance(tensor, DTensor) or tensor.numel() != 1 for tensor in column):
                return False
            continue
        if not all(isinstance(tensor, DTensor) for tensor in column):
            return False
        if [_torch.placements_of(tensor) for tensor in column] != layouts or [t.shape for t in column] != shapes:
            return False
        if any(tensor.device_mesh is not mesh for tensor, mesh in zip(column, meshes, strict=True)):
            return False
    return True
