"""The only file of ``vescale.dmodule`` that touches private torch names."""

from __future__ import annotations

import contextlib

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = ["explicit_redistribution", "shard_of", "tree_leaves", "tree_map", "tree_map_only"]


def explicit_redistribution() -> contextlib.AbstractContextManager:
    """Return a context in which an operator that needs communication to bring its operands together raises RuntimeError."""
    return ExplicitRedistributionContext(enable=True, strict=False, mode="raise")


def shard_of(tensor: DTensor) -> Tensor:
    """Return the local shard itself, outside autograd."""
    return tensor._local_tensor
