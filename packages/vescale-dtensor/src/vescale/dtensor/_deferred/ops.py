"""Properties of single ATen operators for deferred initialization: tables and small predicates, nothing else.

An operator that is in no table is assumed to read all its tensor arguments, and to need the full tensors.
"""

from __future__ import annotations

import torch

from .._random.stock.draw import PIECEWISE_OPS
from .._torch.recording import Op, operators

__all__ = [
    "ALIAS",
    "EXACT_POINTWISE",
    "FILLS",
    "GEOMETRY_FACTORIES",
    "OVERWRITES",
    "RANDOM_FACTORIES",
    "REFUSED",
    "SAME_KIND",
    "UNINITIALIZED",
    "fill_number",
    "scale_of_second",
]

aten = torch.ops.aten

ALIAS = operators({"detach": ("default",), "alias": ("default",)})
"""Operators allowed on a deferred tensor after its constructor: `nn.Parameter(t)`, `t.data`, `state_dict()`."""

SAME_KIND = aten._has_compatible_shallow_copy_type.default
"""The check that `a.data = b` and `module.to(...)` run first: whether `b` can replace `a`."""

REFUSED = operators(
    {
        "set_": (
            "default",
            "source_Storage",
            "source_Storage_storage_offset",
            "source_Tensor",
            "source_Tensor_storage_offset",
        ),
        "resize_": ("default",),
        "resize_as_": ("default",),
    }
)
"""Operators that change the storage of a tensor; a deferred tensor has none."""


def _factories(names: str) -> frozenset[Op]:
    return operators(dict.fromkeys(names.split(), ("default", "memory_format")))


UNINITIALIZED = _factories("empty empty_strided empty_permuted empty_like new_empty new_empty_strided")
ZEROS = _factories("zeros zeros_like new_zeros")
ONES = _factories("ones ones_like new_ones")
FULL = _factories("full full_like new_full")

GEOMETRY_FACTORIES = UNINITIALIZED | ZEROS | ONES | FULL
"""Factories of constant or uninitialized tensors; they read only the shape of their arguments."""


def fill_number(op: Op, args: tuple, kwargs: dict) -> object:
    """Return the number that a call of `ZEROS`, `ONES`, `FULL` or `FILLS` writes everywhere."""
    if op in ZEROS or op is aten.zero_.default:
        return 0
    if op in ONES:
        return 1
    position = 2 if op is aten.new_full.default else 1
    return args[position] if len(args) > position else kwargs["value" if op in FILLS else "fill_value"]


RANDOM_FACTORIES = {
    **dict.fromkeys((aten.rand.default, aten.rand.generator, aten.rand_like.default), aten.uniform_.default),
    **dict.fromkeys((aten.randn.default, aten.randn.generator, aten.randn_like.default), aten.normal_.default),
}
"""Random factory -> the in-place draw, without arguments, that it equals on an empty tensor."""

FILLS = operators({"zero_": ("default",), "fill_": ("Scalar",)})
"""In-place operators that give every element one value known from the arguments."""

OVERWRITES = PIECEWISE_OPS | FILLS | operators({"fill_": ("Tensor",), "copy_": ("default",)})
"""In-place operators that do not read the values they overwrite."""

EXACT_POINTWISE = FILLS | operators(
    {
        "fill_": ("Tensor",),
        "copy_": ("default",),
        "clone": ("default",),
        "_to_copy": ("default",),
        **dict.fromkeys(("mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_"), ("Tensor", "Scalar")),
        **dict.fromkeys(("neg", "neg_", "abs", "abs_", "sqrt", "sqrt_", "clamp", "clamp_"), ("default",)),
        **dict.fromkeys(("clamp_min", "clamp_min_", "clamp_max", "clamp_max_"), ("default",)),
    }
)
"""Element-wise operators whose result for an element does not depend on the element's position.

That holds only for correctly rounded arithmetic. `exp`, `erfinv` and similar functions round differently in the
vectorized part and in the remainder of a loop, so on a shard their last bit may differ. They run on full tensors.
"""


def scale_of_second(op: Op, args: tuple, kwargs: dict) -> object:
    """Return `alpha` of an addition or subtraction: a kernel may fuse any value but 1 into a single rounding."""
    if not op.name().startswith(("aten::add", "aten::sub")):
        return 1
    return kwargs.get("alpha", args[2] if len(args) > 2 else 1)
