"""Deferred initialization: construct a model without memory, then make only this rank's part of it real.

Files, each using only those before it::

    _tree         leaves of arguments
    _torch        private names of torch                    _shards       which storages live as shards, and how
    _ops          tables of operators                       _replay       run a tape
    _tape         the recorded program                      _demand       contents while recording
    _generators   their states, recorded and replayed       _mode         what becomes of each operator of a constructor
    _tensor       the tensor without storage                _slots        where a module keeps its tensors
    _record       one operator onto the tape                _materialize  what is wanted where, checks, results
    _liveness     which calls matter                        _api          the public functions
"""

from .api import deferred_init, is_deferred, materialize
from .tensor import DeferredTensorError

__all__ = ["DeferredTensorError", "deferred_init", "is_deferred", "materialize"]
