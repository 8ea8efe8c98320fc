"""Private names of torch, in one place: each of them may change between torch versions."""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "TorchDispatchMode",
    "active_modes",
    "autograd_is_no_torch_function",
    "is_tracing",
    "preload",
    "replace_shape_propagation",
    "tree_leaves",
]


def preload() -> None:
    """Import the modules that torch imports at the first use of a DTensor, which would take a second on each rank."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.tensor")


def autograd_is_no_torch_function() -> AbstractContextManager:
    """Hide `torch.autograd.grad` and `backward` from function modes: a mode is off while it handles a call."""
    return mock.patch.object(torch.autograd, "has_torch_function", _never)


def _never(_: object) -> bool:
    return False


def replace_shape_propagation(instead: Callable[[Callable, Any, Any], Any]) -> None:
    """Let DTensor call `instead(stock, propagator, op_schema)` for the metadata of an operator's result."""
    stock = ShardingPropagator._propagate_tensor_meta_non_cached

    @functools.wraps(stock)
    def propagate(propagator: Any, op_schema: Any) -> Any:
        return instead(stock, propagator, op_schema)

    owner: Any = ShardingPropagator
    owner._propagate_tensor_meta_non_cached = propagate


def is_tracing() -> bool:
    """Return whether torch runs on tensors without storage now, or traces."""
    return detect_fake_mode() is not None or bool(_are_we_tracing())


def active_modes() -> tuple[str, ...]:
    """Return the types of the function and dispatch modes that are active."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return tuple(type(mode).__qualname__ for mode in modes)
