"""Registration with torch's dispatcher: what importing ``vescale.dtensor`` changes, and how to switch it off.

The changes concern DTensors only; plain tensors run stock torch, always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import _torch
from ._attention import register_attention_rules
from ._random_rules import handlers

__all__ = ["disabled", "register"]


def register() -> None:
    """Install the rules for random operators and attention. Called once, on import."""
    _torch.handler_table().update(handlers())
    register_attention_rules()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run random operators on DTensors as stock torch does, for comparison. Process-wide while the context is open.

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
