"""Deterministic operators: right under every sharding, or refused.

Stock DTensor has a rule for many operators: how sharded operands give sharded results. For the others it raises, and
for some it is wrong: it returns another value, another gradient, or fails on those ranks alone whose shard is empty.
This package replaces the second and third kind, operator by operator; what stock torch does right stays as it is, at
its speed::

    tables      which operator gets which rule, and why
    gather      full operands on every rank: right for every deterministic operator
    decompose   the operator's definition by simpler ones, which keeps the shards
    review      stock decisions that are wrong for the shapes and placements at hand, whatever the operator
    gradients   operators of autograd's formulas
    views       views that could only be given as copies, what is written to them, changes of shape in place
    attention, loss, vocabulary, scalars       operators with algorithms of their own
    operands    the tensors among the arguments
    strict      implicit redistributions refused

Source of the tables: the sweep over torch's own operator database in the folder ``coverage`` of the repository.
"""

from .review import review
from .tables import fallback, first_arguments, operator_handlers
from .views import forget_copies

__all__ = ["fallback", "first_arguments", "forget_copies", "operator_handlers", "review"]
