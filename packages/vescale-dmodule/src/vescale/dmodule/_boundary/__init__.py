"""Boundaries of modules: values are brought to the placements of the plan where they enter or leave a module.

::

    values          nested arguments and results: walk, rebuild, describe, copy
    convert         bring values to planned placements, differentiably
    hooks           the module hooks that do so; they share one Phase
    edges           between DTensors and local tensors, without communication
    rows_axis       between the mesh of the plan and one with an axis of rows, without communication
    local_region    modules that run on local tensors in every mode

Each file imports only those above it.
"""
