"""Exact mode: the same bits on every layout.

Forms are written once, on global tensors, above DTensor. Files, each of which imports only those before it:

blocks        blocks of a dim, and whether shards hold whole ones; integers only
laid          a tensor as its local part and its layout
tree          sums in an order that no layout changes
kernels       kernel calls of canonical shapes
products      matrices, batches of them, convolutions
sums          sums, means, variances, norms
norms         layer, RMS, group and batch norm
losses        softmax, log-softmax, losses over classes
pointwise     functions of single elements, in whole vectors
passing       operators that add nothing
whole         operators without a form: the call of one device
collectives   collectives that add are refused
mode          which form an operator has
api           the context
"""

from .api import exact, set_exact

__all__ = ["exact", "set_exact"]
