"""Fused steps of optimizers on sharded parameters: every rank updates its shards, as they are.

``torch.optim.AdamW(fused=True)`` and its relatives are one operator over lists of parameters, gradients and states. It
treats every element alike, so nothing moves where those of one parameter are placed alike. Stock DTensor gets there
too, but describes every tensor of the lists anew in each step, which takes longer than the step itself.

All other calls are left to stock DTensor: gradients in other placements than their parameters, values that are not
reduced yet, numbers that are DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._torch import dispatch as _torch

__all__ = ["fused_step_handlers"]

NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_")


def fused_step_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handler of every fused optimizer step that this torch has."""
    packets = [getattr(torch.ops.aten, name, None) for name in NAMES]
    return {getattr(packet, name): _step for packet in packets if packet is not None for name in packet.overloads()}


def _step(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())) or not _fit(lists):
        return _torch.stock_dispatch(op, args, kwargs)
    op(*map(_shards, args), **kwargs)
    return None


def _shards(arg: object) -> object:
    if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], DTensor):
        return arg
    return list(map(_torch.local_tensor, arg))


def _fit(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Tell whether the tensors at each position of all lists are placed like the parameter there, or are numbers."""
    sharded = [column for column in lists if isinstance(column[0], DTensor)]
    numbers = [column for column in lists if not isinstance(column[0], DTensor)]
    if not sharded or sharded[0] is not lists[0] or len(set(map(len, lists))) > 1:
        return False
    return all(map(_are_numbers, numbers)) and _are_alike(sharded)


def _are_numbers(column: Sequence[Tensor]) -> bool:
    return not any(issubclass(kind, DTensor) for kind in set(map(type, column))) and set(map(Tensor.numel, column)) == {
        1
    }


_alike: dict[int, list[list[_torch.Spec]]] = {}
"""By identity of the first layout, layouts that were found to be alike. They are kept, so that no other has its id."""

MANY = 64  # lists of layouts that are remembered


def _are_alike(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Tell whether all columns hold DTensors of the same layouts, row by row, without a sum to be taken.

    The layouts of parameters, gradients and states are the same objects in every step, more often than not.
    """
    if not all(issubclass(kind, DTensor) for column in columns for kind in set(map(type, column))):
        return False
    layouts = [list(map(_torch.spec, column)) for column in columns]
    known = _alike.get(id(layouts[0][0]))
    if known is not None and len(known) == len(layouts) and all(map(_are_same, known, layouts)):
        return True
    first = layouts[0]
    if any(p.is_partial() for placements in {layout.placements for layout in first} for p in placements):
        return False
    if not all(a is b or _fits(a, b) for others in layouts[1:] for a, b in zip(first, others, strict=True)):
        return False
    if len(_alike) == MANY:
        _alike.clear()
    _alike[id(first[0])] = layouts
    return True


def _are_same(some: list[_torch.Spec], others: list[_torch.Spec]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _fits(one: _torch.Spec, other: _torch.Spec) -> bool:
    return one.placements == other.placements and one.shape == other.shape and one.mesh is other.mesh
