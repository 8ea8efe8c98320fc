"""Memory without values has zeros in dry runs, so that their values can be compared.

Code makes such memory to write into it, as for a result that it puts together: views of it are compared before that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import _torch

__all__ = ["initialized"]

UNINITIALIZED = "empty"
"""In the names of functions whose results have no defined values."""


@_torch.unseen
def initialized(function: Callable, result: object) -> object:
    """Return the result of a function, with zeros in it if it has no values."""
    if UNINITIALIZED in getattr(function, "__name__", "") and isinstance(result, Tensor):
        with torch.no_grad():
            result.zero_()
    return result
