"""Compute the shape of an operator's result only once in a test session.

For every new combination of operator and layout, DTensor runs the operator on tensors without storage to get the shape,
strides and dtype of its result. That takes milliseconds, a test of a model has hundreds of combinations, and each rank
of each test starts with an empty cache: a third of the time of many such tests. The result depends only on the global
tensors, not on mesh, placements or rank. So a rank reports its results, and the ranks of later tests inherit them:

    parent    known ──── fork ─────────────────────────── update known ─── fork ──── ...
    rank               known  ──  compute the rest ──────── report

Only `aten` operators are cached, and only calls whose arguments are described completely by shapes, strides, dtypes and
plain Python values. All other calls, errors, and calls while torch traces go to torch. `VESCALE_TESTING_SHAPES=0`
disables the cache.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from vescale_testing._torch import DTensorSpec, TensorMeta, active_modes, is_tracing, replace_shape_propagation

#: The cache of this process: from the description of a call to the metadata of its result.
known: dict[Hashable, Any] = {}

_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):  # noqa: N818 - not an error
    """An argument that this module cannot describe."""


def cache_shapes() -> dict[Hashable, Any]:
    """Let this process use the cache; return the dictionary that collects its new entries."""
    computed: dict[Hashable, Any] = {}
    if os.environ.get("VESCALE_TESTING_SHAPES") == "0":
        return computed

    def cached(stock: Any, propagator: Any, schema: Any) -> Any:
        key = _describe_call(schema)
        if key is None:
            return stock(propagator, schema)
        if key not in known:
            meta = stock(propagator, schema)
            if not _is_plain(meta):
                return meta
            known[key] = computed[key] = meta
        meta = known[key]
        return list(meta) if isinstance(meta, list) else meta

    replace_shape_propagation(cached)
    return computed


def _describe_call(schema: Any) -> Hashable | None:
    """Return a description of everything that determines the result's metadata, or None if there is none."""
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
    """Return whether metadata consists of numbers, not of a compiler's symbols."""
    if isinstance(meta, TensorMeta):
        return all(type(number) is int for number in (*meta.shape, *meta.stride))
    return isinstance(meta, list | tuple) and all(each is None or _is_plain(each) for each in meta)
