"""Registration with torch's dispatcher: what importing ``vescale.dtensor`` changes, and how to switch it off.

The changes concern DTensors only; plain tensors run stock torch, always.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from ._exit import wait_at_exit
from ._operators import fallback, forget_copies, operator_handlers, review
from ._operators.attention import attention_handlers
from ._operators.cache_keys import complete_cache_keys
from ._operators.composite import composite_handlers
from ._operators.linear import install_whole_summands
from ._operators.loss import loss_handlers
from ._operators.scalars import scalar_handlers
from ._operators.vocabulary import vocab_handlers
from ._placements.hooks import install as install_placements
from ._random.stock.factories import install_factories
from ._random.stock.rules import handlers
from ._random.streams import switchable
from ._torch import dispatch as _torch
from .debug._repr import install_repr, remove_repr

__all__ = ["disabled", "register"]

Table = dict[_torch.Op, _torch.Handler]

INSTALLED: set[str] = set()
"""The families of rules that are in force."""


@functools.cache
def families() -> dict[str, Table]:
    """Return our handlers by family; no operator is in two of them."""
    others = operator_handlers() | composite_handlers() | scalar_handlers()
    for special in (attention_handlers(), loss_handlers(), vocab_handlers()):
        others |= special
    random = {op: switchable(handler) for op, handler in handlers().items() if op not in attention_handlers()}
    return {
        "random": random,
        "operators": {op: handler for op, handler in others.items() if op not in random},
        "repr": {},
    }


def register() -> None:
    """Install all rules. Called once, on import."""
    complete_cache_keys()
    install_placements()
    install_factories()
    _torch.keep_handlers_after_loss_parallel()
    wait_at_exit()
    for name in families():
        _install(name)


def _install(name: str) -> None:
    _torch.handler_table().update(families()[name])
    if name == "operators":
        _torch.review_propagation(fallback, review)
        install_whole_summands()
    if name == "repr":
        install_repr()
    INSTALLED.add(name)


def _remove(name: str) -> None:
    table, stock = _torch.handler_table(), _torch.stock_handlers()
    for op in families()[name]:
        table.pop(op, None)
        if op in stock:
            table[op] = stock[op]
    if name == "operators":
        _torch.review_propagation(None, None)
        _torch.set_division_into_partials(None)
    if name == "repr":
        remove_repr()
    INSTALLED.discard(name)


@contextlib.contextmanager
def disabled(*names: str) -> Iterator[None]:
    """Run DTensors as stock torch does, for comparison. Process-wide while the context is open.

    Args:
        names: the families of rules to take out: ``"random"`` (random operators; shards then draw for themselves, and
            the contexts of :mod:`vescale.dtensor.random` do nothing), ``"operators"`` (all other operators) and
            ``"repr"``. None names all.

    Raises:
        ValueError: no such family.

    Example:
        >>> with disabled("random"):                # doctest: +SKIP
        ...     dropped = torch.dropout(x, 0.5, True)   # on a CPU mesh every shard repeats the same mask
    """
    unknown = [name for name in names if name not in families()]
    if unknown:
        raise ValueError(f"disabled() takes the families {', '.join(families())}; got {', '.join(unknown)}")
    forget_copies()
    removed = [name for name in names or families() if name in INSTALLED]
    for name in removed:
        _remove(name)
    try:
        yield
    finally:
        forget_copies()
        for name in removed:
            _install(name)
