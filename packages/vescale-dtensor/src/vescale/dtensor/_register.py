"""Registration with torch's dispatcher: what importing ``vescale.dtensor`` changes, and how to switch it off.

The changes concern DTensors only; plain tensors run stock torch, always.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from . import _torch
from ._attention import attention_handlers
from ._cache_keys import complete_cache_keys
from ._composite import composite_handlers
from ._loss import loss_handlers
from ._operators import fallback, operator_handlers
from ._random_rules import handlers
from ._scalar import scalar_handlers

__all__ = ["disabled", "register"]

Table = dict[_torch.Op, _torch.Handler]

STOCK: Table = {}
"""Torch's own handlers that ours replace."""


@functools.cache
def families() -> dict[str, Table]:
    """Return our handlers by family; no operator is in two of them."""
    others = operator_handlers() | composite_handlers() | attention_handlers() | loss_handlers() | scalar_handlers()
    random = {op: handler for op, handler in handlers().items() if op not in attention_handlers()}
    return {"random": random, "operators": {op: handler for op, handler in others.items() if op not in random}}


def installed() -> Table:
    """Return the handlers that importing the package installs."""
    return families()["random"] | families()["operators"]


def register() -> None:
    """Install all rules. Called once, on import."""
    complete_cache_keys()
    table = _torch.handler_table()
    STOCK.update({op: table[op] for op in installed() if op in table})
    table.update(installed())
    _torch.set_fallback(fallback)


@contextlib.contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Run DTensors as stock torch does, for comparison. Process-wide while the context is open.

    Args:
        names: the families of rules to take out: ``"random"`` (random operators; shards then draw for themselves, and
            the contexts of :mod:`vescale.dtensor.random` do nothing) and ``"operators"`` (all others). None names all.

    Raises:
        ValueError: no such family.

    Example:
        >>> with disabled("random"):                # doctest: +SKIP
        ...     dropped = torch.dropout(x, 0.5, True)   # on a CPU mesh every shard repeats the same mask
    """
    unknown = [name for name in names if name not in families()]
    if unknown:
        raise ValueError(f"disabled() takes the families {', '.join(families())}; got {', '.join(unknown)}")
    table = _torch.handler_table()
    names, before = names or tuple(families()), dict(table)
    if "operators" in names:
        _torch.set_fallback(None)
    for name in names:
        for op in families()[name]:
            table.pop(op, None)
            if op in STOCK:
                table[op] = STOCK[op]
    try:
        yield
    finally:
        table.clear()
        table.update(before)
        if "operators" in names:
            _torch.set_fallback(fallback)
