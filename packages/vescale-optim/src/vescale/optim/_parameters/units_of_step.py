"""Units of ZeRO 3 while a pipeline's step runs: many forwards and backwards, each of one stage and one micro-batch.

The ranks compare what they have gathered at the end of the step, not of each backward, where a stage would wait for the
same stage of other pipelines. With ``reshard_after_forward=False`` a unit is gathered once, at its first use, and
stays until the gradients of its parameters are complete:

    default       gather F0 free   gather F1 free   gather B0 free   gather B1 free
    otherwise     gather F0        F1               B0               B1 free
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .units import Unit, Units

__all__ = ["UnitsOfStep"]


class UnitsOfStep:
    """Holds the units of a module for one step.

    Args:
        units: All units.
        holds: Whether they stay unsharded between micro-batches.
        parameters: Those whose gradients the step computes.
    """

    def __init__(self, units: Units, *, holds: bool, parameters: Iterable[Tensor]):
        self._units = units
        self._before = units.keeps, units.compares
        units.keeps, units.compares = units.keeps or holds, False
        unit_of = {param: unit for unit in units.all for bucket in unit.buckets for param in bucket.params}
        self._unit_of = {param: unit_of[param] for param in parameters if param in unit_of}
        self._left: dict[Unit, int] = {}
        for unit in self._unit_of.values():
            self._left[unit] = self._left.get(unit, 0) + 1

    def done(self, parameter: Tensor) -> None:
        """Free a unit after the gradient of its last parameter is complete."""
        if (unit := self._unit_of.get(parameter)) is not None:
            self._left[unit] -= 1
            if not self._left[unit] and not self._before[0]:
                self._units.free_idle(unit)

    def compare(self) -> None:
        """Compare what the ranks have gathered.

        Raises:
            RuntimeError: On all ranks, if it differs.
        """
        self._units.check_same()

    def close(self) -> None:
        """Free all units, and compare ranks at the end of each backward again."""
        self._units.keeps, self._units.compares = self._before
        for unit in self._units.all:
            self._units.release(unit)
