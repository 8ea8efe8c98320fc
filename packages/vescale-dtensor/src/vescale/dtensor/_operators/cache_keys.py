"""Arguments that stock DTensor forgets in the key of its cache of sharding decisions.

The cache answers a second call on operands of the same shape and placements without a look at its other arguments,
except those from a registered position on. For the operators below that position comes after an argument that decides
the shape of the result: ``torch.topk(x, 2)`` after ``torch.topk(x, 1)`` reports the shape of the first call.
"""

from __future__ import annotations

from .._torch import dispatch as _torch

__all__ = ["complete_cache_keys"]

# operator -> position of the first argument that must be in the key
FIRST_ARGUMENT = {
    "_index_put_impl_": 3,
    "histc": 1,
    "index_put": 3,
    "index_put_": 3,
    "kthvalue": 1,
    "topk": 1,
}


def complete_cache_keys() -> None:
    """Put the missing arguments into the keys. Safe to call more than once."""
    for name, position in FIRST_ARGUMENT.items():
        _torch.set_first_cached_argument(_torch.overload(name), position)
