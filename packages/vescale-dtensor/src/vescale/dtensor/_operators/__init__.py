"""Deterministic operators: right under every sharding, or refused.

Stock DTensor knows for many operators how sharded operands give sharded results. For the others it raises, and for
some it is wrong: it returns another value, another gradient, or fails on those ranks alone whose shard is empty. This
package replaces the second and third kind, operator by operator; what stock torch does right stays as it is, at its
speed::

    _gather.py    whole operands on every rank: right for every deterministic operator
    _compose.py   the operator's definition by simpler ones, which keeps the shards
    _review.py    stock decisions that are wrong for the shapes and placements at hand, whatever the operator
    _plain.py     stock rule, with the plain tensors that gradient formulas make
    _views.py     views that could only be given as copies, and what is written to them
    _slices.py    gradients of slices of uneven shards
    _metadata.py  changes of shape in place
    _convolution.py
    _tables.py    which operator gets which rule, and why

Source of the tables: the sweep over torch's own operator database in the folder ``coverage`` of the repository.
"""

from .review import review
from .tables import fallback, operator_handlers
from .views import forget_copies

__all__ = ["fallback", "forget_copies", "operator_handlers", "review"]
