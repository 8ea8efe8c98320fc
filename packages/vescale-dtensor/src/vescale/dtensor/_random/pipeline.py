"""What a pipeline needs to know about random numbers: parts of a batch, and streams other than torch's.

`vescale-pipe` finds this class by its entry point; ``docs/protocols.md`` has the protocol. Stages skip what other
stages draw by moving the generators. A move is no draw: `random_position` counts positions before and after it as
equal.
"""

from __future__ import annotations

import contextlib
import math

import torch

from .._exact_context import exact_num_blocks
from ..errors import UnsupportedOperator
from .batch import window
from .global_position import BatchWindow
from .philox import state as philox_state
from .state import current, moving

__all__ = ["PipelineDraws"]


class PipelineDraws:
    """Random numbers of micro-batches that are parts of a batch, on stages that run a part of the program each.

    Example:
        >>> import torch
        >>> torch.manual_seed(0)                                    # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> whole = torch.rand(4)
        >>> with PipelineDraws.part(1, 2):
        ...     second = torch.manual_seed(0) and torch.rand(2)
        >>> torch.equal(second, whole[2:])
        True
    """

    @staticmethod
    def stream() -> str:
        """Return the name of the stream in force; that of torch's own generators is "torch"."""
        return current()

    @staticmethod
    def position() -> tuple[int, int]:
        """Return seed and number of the next draw in the stream in force, if that is not torch's own."""
        return tuple(philox_state.read(torch.get_rng_state()))

    @staticmethod
    def move(seed: int, number: int) -> None:
        """Set the stream in force to this position, if that is not torch's own; batch windows stay."""
        torch.set_rng_state(philox_state.write(philox_state.Position(seed, number), torch.get_rng_state()))

    @staticmethod
    def part(index: int, count: int, size: int = 1) -> contextlib.AbstractContextManager[None]:
        """Return a context in which dim 0 of every tensor drawn is a part of the batch.

        Args:
            index: the first of the equal parts that it is.
            count: number of equal parts of the batch.
            size: number of parts that it is.

        Raises:
            UnsupportedOperator: A part runs inside of :func:`vescale.dtensor.exact`, alone.
        """
        if count > size and exact_num_blocks() is not None:
            raise UnsupportedOperator(
                "a pipeline inside of vescale.dtensor.exact: expected one micro-batch, got part "
                f"{index + 1} of {count} of a batch, whose sums over rows are not those of one device; use "
                "PipelinePlan(num_microbatches=1), as vescale.Plan(exact=8) does"
            )
        unit = math.gcd(index, count, size)
        return window(BatchWindow(index // unit, count // unit, size=size // unit))

    @staticmethod
    def moving(device_type: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which generators are moved, which is no draw."""
        return moving(device_type)
