"""The only file of ``vescale.dmodule`` that touches private torch names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "explicit_redistribution",
    "is_implicit_redistribution",
    "no_function_modes",
    "plain_operands_replicated",
    "tensor_hooks",
    "tensor_tables",
    "tree_leaves",
    "tree_map",
]


def explicit_redistribution() -> contextlib.AbstractContextManager:
    """Return a context in which an operator that must communicate to fit its operands together raises RuntimeError."""
    return ExplicitRedistributionContext(enable=True, strict=False, mode="raise")


def is_implicit_redistribution(error: RuntimeError) -> bool:
    """Tell whether an error comes from the context above."""
    return str(error).startswith("Implicit redistribution occurred")


@contextlib.contextmanager
def plain_operands_replicated() -> Iterator[None]:
    """Read plain tensors that meet a DTensor as replicated, then do as before.

    ``torch.distributed.tensor.experimental.implicit_replication`` does the same, but always leaves it switched off,
    also when it was on outside.
    """
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def no_function_modes() -> contextlib.AbstractContextManager:
    """Return a context whose calls reach no ``TorchFunctionMode`` and no ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


def tensor_tables(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """Return the tables of the parameters and of the buffers that ``module`` itself holds; changing them changes it."""
    return module._parameters, module._buffers


def tensor_hooks(tensor: Tensor) -> Iterable[object]:
    """Return the gradient hooks registered on a tensor."""
    return (tensor._backward_hooks or {}).values()
