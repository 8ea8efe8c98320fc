"""Static mode: the module's own code on local tensors, communication only at the boundaries of the plan.

Files, from data to execution::

    _names.py          full names
    _steps.py          from one layout to another, as steps of one axis each
    _collectives.py    a step on local tensors
    _interleaved.py    interleaved shards as plain ones
    _conversions.py    all steps of a boundary, differentiable
    _values.py         tensors inside of arguments and results
    _record.py         crossings: what a rehearsal finds
    _findings.py       all that rehearsals have found
    _rehearsal.py      a run that leaves nothing behind; the comparison of two
    _leaves.py         parameters as local tensors, and their gradients
    _swaps.py          attributes with local values
    _direct.py         boundaries without hooks
    _modules.py        embeddings and biases
    _overlap.py        weight gradients while a reduction is under way
    _random.py         draws of sharded tensors
    _region.py         parts that stay in eager mode
    _experts.py        experts
    _compile.py        blocks as compiled functions
    _async_tp.py       products and collectives in pieces
    _learning.py       how a program is made
    _program.py        a module that runs on local tensors
"""

from .patch import set_attributes
from .program import StaticProgram

__all__ = ["StaticProgram", "set_attributes"]
