"""Dropout inside of compiled blocks: the factors are drawn by an operator that no compiler looks into.

On local tensors dropout must draw this rank's part of one device's draw, by the rules of ``vescale.dtensor``. In a
graph that is one operator, which runs when the graph runs and advances the random stream then::

    dropout(x, p)   ->   x * dropout_factors(x, p, layout)          factors are 0 or 1 / (1 - p)

The operator is tagged as random, so a compiler neither drops, repeats nor merges its calls. Dropout of tensors that are
equal on all ranks stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._edges import wrapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ._random import Draw

__all__ = ["CompiledDraws", "draws_obstacle"]

# Operators take numbers, not meshes: a layout is its place in this list, which holds each layout once.
_layouts: list[tuple] = []


@torch.library.custom_op("vescale_dmodule::dropout_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_factors(like: Tensor, p: float, layout: int) -> Tensor:
    """Return what dropout multiplies a local tensor with, of the shape and dtype of ``like``."""
    mesh, placements, shape = _layouts[layout]
    with _torch.no_function_modes(), torch.no_grad():
        ones = wrapped(torch.ones_like(like), mesh, placements, shape=shape)
        return _torch.local_of(F.dropout(ones, p))


@dropout_factors.register_fake
def _(like: Tensor, p: float, layout: int) -> Tensor:  # noqa: ARG001 - the operator's signature
    return torch.empty_like(like)


def _number(layout: tuple) -> int:
    if layout not in _layouts:
        _layouts.append(layout)
    return _layouts.index(layout)


def draws_obstacle(draws: Sequence[Draw]) -> str | None:
    """Return why draws cannot be made in a graph; None if they can."""
    layouts: dict[torch.Size, object] = {}
    for draw in draws:
        if draw.function is not F.dropout or len(draw.operands) != 1:
            return f"only dropout can be compiled on sharded tensors, not {draw}"
        (operand,) = draw.operands
        layout = operand.placements, operand.shape
        if layouts.setdefault(operand.local_shape, layout) != layout:
            return f"dropout of local shape {tuple(operand.local_shape)} has two layouts"
    return None


class CompiledDraws(TorchFunctionMode):
    """Let dropout of the local shapes in ``draws`` draw by their layouts."""

    def __init__(self, draws: Sequence[Draw], mesh: DeviceMesh):
        super().__init__()
        operands = [draw.operands[0] for draw in draws if draw.is_sharded]
        self.layouts = {o.local_shape: _number((mesh, o.placements, o.shape)) for o in operands}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.dropout(*args, **kwargs)
        if func is Tensor.unflatten:  # Python code that a compiler cannot follow from here
            func = torch.unflatten
        return func(*args, **kwargs)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        """Do as the function of torch."""
        layout = self.layouts.get(input.shape)
        if layout is None or not training or p == 0:
            return F.dropout(input, p, training, inplace)
        factors = dropout_factors(input.detach(), float(p), layout)
        return input.mul_(factors) if inplace else input * factors
