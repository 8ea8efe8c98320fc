"""A plan for any module, derived from its dataflow; a file imports only files above it.

::

    cuts        which rank has which indices of a dim
    graph       a run of the module as data
    rule        which dims of an operator are cut together
    rules       the rules of all operators
    spread      from one cut dim to all tensors that are cut with it
    sequence    activations between groups, cut over the sequence
    choose      groups of matrices to cut
    pins        where gradients become whole: a minimum cut
    assemble    groups to a plan, by names
    experts     modules of experts
    inputs      guesses of example inputs
    trace       the run on fake tensors
    repeats     key-value heads that are repeated, where ranks are more
    rehearse    the code on local shapes: attributes, modules for eager mode
    trial       a step on DTensors, without data
    derived     ``derive``
"""

from .derived import DerivedPlan, derive

__all__ = ["DerivedPlan", "derive"]
