"""Deterministic operators: right under every sharding, or refused.

Stock DTensor has a sharding rule for many operators. It raises for operators without a rule. Some of its rules are
wrong: they return another value or another gradient, or fail only on ranks whose shard is empty. This package replaces
the missing and the wrong rules, operator by operator. Operators that stock torch runs correctly are unchanged and keep
their speed::

    dims        no rule sees a negative dim
    tables      which operator gets which rule, and why
    gather      run on full operands on every rank: right for every deterministic operator
    decompose   run the operator's definition by simpler operators, which keeps the shards
    review      replace stock decisions that are wrong for these shapes and placements, for any operator
    gradients   operators in autograd's formulas
    copies      writes to views that are copies, and to tensors with such views
    memory_order   results of handlers in the order of the kernel
    exact       operators that compare values, of sums
    given_results   operators that read what they write
    metadata    in-place changes of shape
    versions    writes that autograd does not count
    attention, batch_norm, convolution, loss, vocabulary, lookup, scalars, solvers   operators with own algorithms
    operands    the tensors among the arguments
    strict      refuse implicit redistributions

Source of the tables: the sweep over torch's own operator database in the folder ``coverage`` of the repository.
"""

from .copies import forget_copies
from .given_results import apart
from .memory_order import in_orders_of_kernels, in_row_major_order
from .review import review, without_elements
from .tables import fallback, operator_handlers, pointwise_operators

__all__ = [
    "apart",
    "fallback",
    "forget_copies",
    "in_orders_of_kernels",
    "in_row_major_order",
    "operator_handlers",
    "pointwise_operators",
    "review",
    "without_elements",
]
