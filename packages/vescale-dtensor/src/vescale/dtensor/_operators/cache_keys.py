"""Arguments that stock DTensor forgets in the key of its cache of sharding decisions.

The cache answers a second call on operands of the same shape and placements without a look at its other arguments,
except those from a registered position on. For the operators below that position comes after an argument that decides
the shape of the result: ``torch.topk(x, 2)`` after ``torch.topk(x, 1)`` reports the shape of the first call.
"""

from __future__ import annotations

from .._torch import dispatch as _torch

__all__ = ["first_arguments"]

# operator -> position of the first argument that must be in the key
FIRST_ARGUMENT = {
    "_index_put_impl_": 3,
    "histc": 1,
    "index_put": 3,
    "index_put_": 3,
    "kthvalue": 1,
    "topk": 1,
}


def first_arguments() -> dict[_torch.Op | None, int]:
    """Return, by operator, the position of the first argument that must be in the key; None is one torch lacks."""
    return {_torch.overload(name): position for name, position in FIRST_ARGUMENT.items()}
