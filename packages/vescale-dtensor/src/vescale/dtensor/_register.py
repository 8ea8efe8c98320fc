"""Registration with torch's dispatcher: what importing ``vescale.dtensor`` changes, and how to switch it off.

The changes concern DTensors only; plain tensors run stock torch, always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import _torch
from ._attention import register_attention_rules
from ._random_rules import handlers

__all__ = ["disabled", "is_enabled", "register"]


def register() -> None:
    """Install the rules for random operators and attention. Called once, on import."""
    _torch.handler_table().update(handlers())
    register_attention_rules()


def is_enabled() -> bool:
    """Tell whether the rules for random operators are installed, as they are outside :func:`disabled`."""
    return all(op in _torch.handler_table() for op in handlers())


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run random operators as stock torch does, for comparison. Process-wide while the context is open.

    Shards then draw for themselves, and contexts of :mod:`vescale.dtensor.random` that are entered inside do nothing.

    Example:
        >>> with disabled():                        # doctest: +SKIP
        ...     dropped = torch.dropout(x, 0.5, True)   # on a CPU mesh every shard repeats the same mask
    """
    table = _torch.handler_table()
    saved = {op: table.pop(op) for op in handlers() if op in table}
    try:
        yield
    finally:
        table.update(saved)
