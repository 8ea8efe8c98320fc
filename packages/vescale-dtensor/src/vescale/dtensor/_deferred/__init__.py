"""Deferred initialization: construct a model without memory, then make only this rank's part of it real.

Files, each using only those before it: `_ops` (tables of operators), `_tape` (the recorded program), `_generators` (states),
`_tensor` (the deferred tensor), `_liveness` and `_shards` (planning), `_replay`, `_demand` (contents while recording), `_mode`
(recording), `_slots` (tensors of a module), `_api`.
"""

from ._api import deferred_init, is_deferred, materialize
from ._tensor import DeferredTensorError

__all__ = ["DeferredTensorError", "deferred_init", "is_deferred", "materialize"]
