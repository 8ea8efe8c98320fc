"""Deferred initialization: construct a model without memory, then make only this rank's part of it real.

Files, each using only those before it::

    ops          tables of operators                       replay       run a tape
    tape         the recorded program                      demand       contents while recording
    generators   their states, recorded and replayed       mode         what becomes of each operator of a constructor
    tensor       the tensor without storage                slots        where a module keeps its tensors
    record       one operator onto the tape                materialize  what is wanted where, checks, results
    liveness     which calls matter                        api          the public functions
    shards       which storages live as shards, and how
"""

from .api import deferred_init, is_deferred, materialize
from .tensor import DeferredTensorError

__all__ = ["DeferredTensorError", "deferred_init", "is_deferred", "materialize"]
