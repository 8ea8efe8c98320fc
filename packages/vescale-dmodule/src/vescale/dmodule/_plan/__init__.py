"""A plan as data: checked and resolved before any communication, then parameters become DTensors.

::

    placements      the entry of one tensor, checked against mesh and shape
    inputs          an ``.input`` entry, matched with the signature of a forward
    attributes      attributes that a plan changes
    parameters      ties checked; parameters and buffers become DTensors
    resolve         all sections: regexes to names (with ``_experts.plan`` for the expert section)
    describe        the layouts of all parameters, printed without ranks

Each file imports only those above it. Everything but ``parameters.distribute`` is a pure function.
"""
