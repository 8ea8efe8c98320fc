"""Deterministic operators: right under every sharding, or refused.

Stock DTensor knows for many operators how sharded operands give sharded results. For the others it raises, and for
some it is wrong: it returns another value, another gradient, or fails on those ranks alone whose shard is empty. This
package replaces the second and third kind, operator by operator; what stock torch does right stays as it is, at its
speed::

    _gather.py    whole operands on every rank: right for every deterministic operator
    _guard.py     stock rule, after operands that it cannot take (empty or uneven shards ...) have been gathered
    _compose.py   the operator's definition by simpler ones, which keeps the shards
    _tables.py    which operator gets which rule, and why

Source of the tables: the sweep over torch's own operator database in the folder ``coverage`` of the repository.
"""

from ._tables import fallback, operator_handlers

__all__ = ["fallback", "operator_handlers"]
