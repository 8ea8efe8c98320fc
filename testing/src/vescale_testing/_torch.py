"""The names of torch that are private, in one place: everything here may move between torch versions."""

import importlib
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "autograd_is_no_torch_function", "preload", "tree_leaves"]


def preload() -> None:
    """Import what torch imports at the first use of a DTensor, so that forked ranks find it: else a second for each."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.tensor")


def autograd_is_no_torch_function() -> AbstractContextManager:
    """Keep `torch.autograd.grad` and `backward` from offering themselves to a function mode, which switches it off."""
    return mock.patch.object(torch.autograd, "has_torch_function", _never)


def _never(_: object) -> bool:
    return False
