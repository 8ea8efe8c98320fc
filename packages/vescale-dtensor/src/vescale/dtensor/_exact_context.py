"""Whether the running code is inside of :func:`vescale.dtensor.exact`; for every layer, so it imports none."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["NUM_BLOCKS", "exact_num_blocks"]

NUM_BLOCKS: ContextVar[int | None] = ContextVar("vescale_exact_num_blocks", default=None)
"""The number of blocks of the context around the running code."""


def exact_num_blocks() -> int | None:
    """Return the number of blocks of the ``exact`` around the running code, or None.

    Example:
        >>> exact_num_blocks()
        >>> with exact(num_blocks=4):                    # doctest: +SKIP
        ...     exact_num_blocks()
        4
    """
    return NUM_BLOCKS.get()
