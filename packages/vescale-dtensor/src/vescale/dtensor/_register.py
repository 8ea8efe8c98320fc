"""Registration with torch's dispatcher: what importing ``vescale.dtensor`` changes, and how to switch it off.

The changes concern DTensors only; plain tensors run stock torch, always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import _torch
from ._attention import attention_handlers
from ._cache_keys import complete_cache_keys
from ._composite import composite_handlers
from ._loss import loss_handlers
from ._random_rules import handlers
from ._scalar import scalar_handlers

__all__ = ["disabled", "register"]


def register() -> None:
    """Install all rules. Called once, on import."""
    complete_cache_keys()
    others = attention_handlers() | loss_handlers() | scalar_handlers()
    _torch.handler_table().update(composite_handlers() | handlers() | others)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run random operators as stock torch does, for comparison. Process-wide while the context is open.

    Shards then draw for themselves, and the contexts of :mod:`vescale.dtensor.random` do nothing. Rules that do not
    concern random numbers stay.

    Example:
        >>> with disabled():                        # doctest: +SKIP
        ...     dropped = torch.dropout(x, 0.5, True)   # on a CPU mesh every shard repeats the same mask
    """
    table = _torch.handler_table()
    saved = {op: table.pop(op) for op in handlers().keys() - attention_handlers().keys() if op in table}
    try:
        yield
    finally:
        table.update(saved)
