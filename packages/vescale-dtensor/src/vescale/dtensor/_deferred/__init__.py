"""Deferred initialization: construct a model without memory, then make only this rank's part of it real.

Files, each using only those before it::

    ops          tables of operators                       shards       storages that are replayed as shards
    tape         the recorded program                      replay       run a tape
    generators   generator states, recorded and replayed   mode         dispatch the operators of a constructor
    tensor       the tensor without storage                slots        where a module keeps its tensors
    record       append one operator to the tape           materialize  jobs, checks and results of a replay
    liveness     which calls are needed                    api          the public functions
"""

from .api import deferred_init, is_deferred, materialize
from .tensor import DeferredTensorError

__all__ = ["DeferredTensorError", "deferred_init", "is_deferred", "materialize"]
