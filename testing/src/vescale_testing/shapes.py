"""Ask torch only once, in all tests together, which shape an operator's result has.

For every new combination of operator and layout, DTensor runs the operator on tensors without storage to see the shape,
strides and dtype of its result. That takes milliseconds, a test of a model has hundreds of combinations, and each rank
of each test starts anew: a third of the time of many such tests. The result depends on the whole tensors alone,
not on mesh, placements or rank. So a rank reports what torch has told it, and the ranks of later tests inherit it:

    parent    known ──── fork ─────────────────────────── update known ─── fork ──── ...
    rank               known  ──  ask torch for the rest ── report

Only the library's own operators (`aten`) are remembered, and only calls whose arguments are described completely by
shapes, strides, dtypes and plain Python values. Every other call, every error, and every call while torch traces, asks
torch. `VESCALE_TESTING_SHAPES=0` switches all of it off.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from vescale_testing._torch import DTensorSpec, TensorMeta, active_modes, is_tracing, replace_shape_propagation

#: What is known in this process: from a description of a call to the metadata of its result.
known: dict[Hashable, Any] = {}

_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):  # noqa: N818 - not an error
    """An argument that this module cannot describe."""


def remember_shapes() -> dict[Hashable, Any]:
    """Let this process use what is known; return the dictionary that collects what is asked from here on."""
    learned: dict[Hashable, Any] = {}
    if os.environ.get("VESCALE_TESTING_SHAPES") == "0":
        return learned

    def remembering(stock: Any, propagator: Any, schema: Any) -> Any:
        key = _describe_call(schema)
        if key is None:
            return stock(propagator, schema)
        if key not in known:
            meta = stock(propagator, schema)
            if not _is_plain(meta):
                return meta
            known[key] = learned[key] = meta
        meta = known[key]
        return list(meta) if isinstance(meta, list) else meta

    replace_shape_propagation(remembering)
    return learned


def _describe_call(schema: Any) -> Hashable | None:
    """Return all that the result's metadata depends on, or None where that cannot be said."""
    if schema.op.namespace != "aten" or is_tracing():
        return None
    try:
        described = _describe(schema.args_schema), _describe(schema.kwargs_schema)
    except _Unknown:
        return None
    return str(schema.op), *described, str(torch.get_default_dtype()), active_modes()


def _describe(value: Any) -> Hashable:
    """Describe an argument; unlike the argument itself, 1, 1.0 and True have different descriptions."""
    kind = type(value)
    if isinstance(value, DTensorSpec):
        if value.tensor_meta is None or not _is_plain(value.tensor_meta):
            raise _Unknown
        shape, stride, dtype = value.tensor_meta
        return "tensor", tuple(shape), tuple(stride), str(dtype), value.mesh.device_type
    if value is None or kind in (bool, int, float, complex, str):
        return kind.__name__, repr(value)
    if isinstance(value, _PLAIN):
        return kind.__name__, str(value)
    if isinstance(value, list | tuple):
        return kind.__name__, *map(_describe, value)
    if kind is dict:
        return "dict", *((name, _describe(each)) for name, each in sorted(value.items()))
    raise _Unknown


def _is_plain(meta: Any) -> bool:
    """Whether metadata has numbers alone, not the symbols of a compiler."""
    if isinstance(meta, TensorMeta):
        return all(type(number) is int for number in (*meta.shape, *meta.stride))
    return isinstance(meta, list | tuple) and all(each is None or _is_plain(each) for each in meta)
