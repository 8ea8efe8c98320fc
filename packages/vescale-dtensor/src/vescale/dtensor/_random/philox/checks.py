"""Checks of random operators' arguments, with the meaning of stock torch's and before anything is drawn."""

from __future__ import annotations

import torch

__all__ = ["at_least", "between", "floating", "integer_range", "probability", "real"]


def floating(op: str, dtype: torch.dtype) -> None:
    """Raise NotImplementedError unless ``dtype`` is a real floating-point type."""
    if not dtype.is_floating_point:
        raise NotImplementedError(f"{op} needs a floating-point tensor, got {dtype}")


def real(op: str, dtype: torch.dtype) -> None:
    """Raise NotImplementedError for complex numbers."""
    if dtype.is_complex:
        raise NotImplementedError(f"{op} needs a tensor of real numbers, got {dtype}")


def probability(op: str, p: float) -> None:
    """Raise RuntimeError unless ``p`` is in [0, 1]."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"{op} expects p to be in [0, 1], but got p={p}")


def at_least(op: str, name: str, value: float, bound: float) -> None:
    """Raise RuntimeError if ``value < bound``, or if it is not a number."""
    if not value >= bound:
        raise RuntimeError(f"{op} expects {name} >= {bound}, but found {name}={value}")


def between(op: str, name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise RuntimeError unless ``low < value < high``."""
    if not low < value < high:
        raise RuntimeError(f"{op} expects {low} < {name} < {high}, but found {name}={value}")


def integer_range(op: str, dtype: torch.dtype, low: int, high: int) -> None:
    """Raise RuntimeError unless ``[low, high)`` is not empty and ``dtype`` holds its integers."""
    if not low < high:
        raise RuntimeError(f"{op} expects 'from' to be less than 'to', but got from={low} >= to={high}")
    if dtype.is_floating_point:
        return
    smallest, largest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if low < smallest or high - 1 > largest:
        raise RuntimeError(f"{op} expects from={low} and to - 1={high - 1} to be in the range of {dtype}")
