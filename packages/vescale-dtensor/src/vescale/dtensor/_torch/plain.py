"""Plain tensors that torch itself makes beside DTensors count as replicated.

DTensor refuses a plain tensor as an operand, because it may differ between the ranks. Torch's own code makes plain
tensors, too: zeros of a gradient's shape, a range of positions, a mask. Those are equal on all ranks. Who made a plain
tensor is known in two places:

- **In a backward pass**, outside of the program's own ``autograd.Function``: a formula of autograd gets DTensors only.
- **In a function of torch that got DTensors and no plain tensor**, such as ``torch.quantile(x, 0.5)``.

There, and only there, DTensor's own switch for this (``implicit_replication``) is on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .dispatch import plain_operands_allowed
from .patches import AttributePatch

__all__ = ["FUNCTIONS", "PlainOperandsPatch"]

FUNCTIONS = ("quantile", "nanquantile", "combinations")
"""Functions of torch, and methods of tensors, that are made of operators and of tensors of their own."""


def _switched(function: Callable, is_on: bool, args: tuple, kwargs: dict) -> object:
    before = plain_operands_allowed()
    torch._C._set_dtensor_allow_implicit_replication(is_on)
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_dtensor_allow_implicit_replication(before)


class PlainOperandsPatch:
    """Let plain tensors of torch stand beside DTensors, in backward passes and in functions that got DTensors only."""

    place = "torch.autograd: what runs a backward pass, and a Function's backward in it; torch.quantile and the like"

    def __init__(self) -> None:
        self._num_passes = 0  # backward passes for which this patch has turned the switch on
        self._lock = threading.Lock()
        self._patches = [
            AttributePatch((torch.autograd, torch.autograd.graph), "_engine_run_backward", self._in_pass),
        ]
        for name in ("apply", "apply_boxed"):  # the second with gradients in a list, not in every version
            if hasattr(torch.autograd.function.BackwardCFunction, name):
                owner = torch.autograd.function.BackwardCFunction
                self._patches.append(AttributePatch((owner,), name, self._in_own_function))
        for name in FUNCTIONS:
            for owner in (torch, Tensor):
                if hasattr(owner, name):
                    self._patches.append(AttributePatch((owner,), name, _among_dtensors))
        masked = (torch.masked, torch.masked._ops)
        names = [n for n in torch.masked.__all__ if callable(getattr(torch.masked._ops, n, None)) and n.islower()]
        self._patches += [AttributePatch(masked, name, _among_dtensors) for name in names]

    def _in_pass(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def run(*args: object, **kwargs: object) -> object:
            if plain_operands_allowed():
                return stock(*args, **kwargs)
            with self._lock:
                self._num_passes += 1
            try:
                return _switched(stock, True, args, kwargs)
            finally:
                with self._lock:
                    self._num_passes -= 1

        return run

    def _in_own_function(self, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def apply(*args: object) -> object:
            if self._num_passes and plain_operands_allowed():
                return _switched(stock, False, args, {})
            return stock(*args)

        return apply

    def install(self) -> None:
        """Replace the functions."""
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        """Put torch's functions back."""
        for patch in self._patches:
            patch.remove()

    def is_installed(self) -> bool:
        """Return whether all functions are replaced."""
        return all(patch.is_installed() for patch in self._patches)


def _among_dtensors(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def call(*args: object, **kwargs: object) -> object:
        tensors = list(tensors_in((args, kwargs)))
        is_own = [isinstance(tensor, DTensor) for tensor in tensors]
        if any(is_own) and all(own or tensor.numel() == 1 for own, tensor in zip(is_own, tensors, strict=True)):
            return _switched(stock, True, args, kwargs)
        return stock(*args, **kwargs)

    return call
