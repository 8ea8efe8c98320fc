"""The only file of ``vescale.dmodule`` that touches private torch names."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["explicit_redistribution", "no_function_modes", "tree_leaves", "tree_map", "tree_map_only"]


def explicit_redistribution() -> contextlib.AbstractContextManager:
    """Return a context in which an operator that needs communication to bring its operands together raises RuntimeError."""
    return ExplicitRedistributionContext(enable=True, strict=False, mode="raise")


def no_function_modes() -> contextlib.AbstractContextManager:
    """Return a context whose calls reach no ``TorchFunctionMode`` and no ``__torch_function__``."""
    return torch._C.DisableTorchFunction()
