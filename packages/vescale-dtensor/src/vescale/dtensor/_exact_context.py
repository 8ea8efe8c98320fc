"""Whether the running code is inside of :func:`vescale.dtensor.exact`; for every layer, so it imports none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["NUM_BLOCKS", "ONE_ADDEND", "SOURCES", "exact_num_blocks", "one_addend"]

NUM_BLOCKS: ContextVar[int | None] = ContextVar("vescale_exact_num_blocks", default=None)
"""The number of blocks of the context around the running code."""

SOURCES: list[Callable[[], int | None]] = []
"""Further sources of that number: threads of autograd have the dispatch modes of their caller, not its context."""

ONE_ADDEND: ContextVar[bool] = ContextVar("vescale_exact_one_addend", default=False)
"""Whether the running code is inside of `one_addend`."""


def exact_num_blocks() -> int | None:
    """Return the number of blocks of the ``exact`` around the running code, or None.

    Example:
        >>> exact_num_blocks()
        >>> with exact(num_blocks=4):                    # doctest: +SKIP
        ...     exact_num_blocks()
        4
    """
    found = NUM_BLOCKS.get()
    return found if found is not None else next(filter(None, (source() for source in SOURCES)), None)


@contextlib.contextmanager
def one_addend() -> Iterator[None]:
    """Let collectives inside add floating-point numbers within ``exact``: of each, all ranks but one have ``-0.0``.

    Such a sum is that one number, in any order of additions: ``x + -0.0`` is ``x`` for every ``x``. So a value that all
    ranks have whole can go through the buffers and collectives of data parallelism, and keep its bits.

    Example:
        >>> with one_addend():                           # doctest: +SKIP
        ...     dist.all_reduce(value if rank == 0 else torch.full_like(value, -0.0))
    """
    token = ONE_ADDEND.set(True)
    try:
        yield
    finally:
        ONE_ADDEND.reset(token)
