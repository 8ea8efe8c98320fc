"""Operators on the rows of all ranks, while everything around them runs on the rows of this rank.

The placements of values decide those of gradients (`_boundary.rows_axis`), so a recording needs no backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale.dtensor import extension

from .._boundary.edges import unwrapped, wrapped
from .._boundary.rows_axis import gradient_over_rows, whole_extremes
from .._static.operator_mode import OperatorHooks, OperatorMode, active_mode, inactive
from .._static.operators import RecordedOperator
from .values import WAY_OUT

__all__ = ["RowWiseHooks", "RowsHooks", "from_all_rows", "on_all_rows"]


def on_all_rows(local: Tensor, placements: Sequence[Placement], shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """Return a value of local code as a DTensor."""
    gradient = tuple(map(gradient_over_rows, placements)) if local.requires_grad else None
    return wrapped(local, mesh, tuple(placements), shape=shape, gradient=gradient)


def from_all_rows(value: DTensor) -> Tensor:
    """Return what local code has of a DTensor."""
    # `unwrapped` counts the gradient of a mean N times, and a mean over ranks takes that back
    gradient = (p if p.is_partial("avg") else gradient_over_rows(p) for p in value.placements)
    return unwrapped(value, tuple(gradient))


class RowsMode(OperatorMode):
    """Run recorded operators of one call of a module on the rows of all ranks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.sees(func):
            return func(*args, **(kwargs or {}))
        self.call.check_position(self.name)
        result = super().__torch_function__(func, types, args, kwargs)
        self.call.note_position()
        return result

    def _run_on_dtensors(self, operator: RecordedOperator, args: tuple, kwargs: dict) -> object:
        return whole_extremes(super()._run_on_dtensors(operator, args, kwargs))

    def _wrapped(self, leaf: Tensor, place: int, operator: RecordedOperator) -> DTensor:
        operand = operator.operands[place]
        value = leaf.clone() if place in operator.written else leaf
        return on_all_rows(value, operand.placements, operand.shape, self.mesh)

    def _unwrapped(self, leaf: DTensor, _gradient: object) -> Tensor:
        return from_all_rows(leaf)

    def _ways_out(self, **_kind: bool) -> str:
        return WAY_OUT


def _carry() -> Callable[[], AbstractContextManager] | None:
    """Return what a function that backward repeats runs in, where no hook runs; see ``extension.carriers``."""
    mode = active_mode()
    return functools.partial(mode.repeated, mode.position) if isinstance(mode, RowsMode) else None


extension.carriers.append(_carry)


class RowsHooks(OperatorHooks):
    """Hooks that run the recorded operators of a module on the rows of all ranks."""

    mode = RowsMode


class RowWiseHooks:
    """Hooks that run a module on the rows of this rank as it is, inside of modules that have recorded operators."""

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager] = []

    def register(self, module: nn.Module) -> None:
        """Hook a module."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, prepend=True, always_call=True)

    def enter(self, _module: nn.Module, _args: tuple) -> None:
        """Stop running recorded operators."""
        self._entered.append(inactive())
        self._entered[-1].__enter__()

    def leave(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        """Run them again."""
        self._entered.pop().__exit__(None, None, None)

    # in compiled code a call is not recorded
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"
