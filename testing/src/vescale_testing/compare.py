"""Compare two trainings and name the first thing that differs.

The reference is always the unmodified program on one process. A `TrainingRecord` holds the results of a training. Two
records are the same training if every loss, gradient norm, gradient, parameter and optimizer state agrees:

    relative difference of a tensor  =  max |actual - expected|  /  max(1e-30, max |expected|)

one number per tensor, so that an element near zero in a tensor of ones does not ask for more digits than the
arithmetic has. Bounds that mean something: 1e-10 in float64; `bitwise=True` where the order of additions is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from vescale_testing.gather import gather_full, gather_named, gather_state


@dataclass(frozen=True)
class TrainingRecord:
    """The results of a training, in full tensors.

    Attributes:
        losses: Loss of each step.
        grad_norms: Global gradient norm of each step, or empty.
        grads: Gradients of the last step, by fully qualified name.
        params: Parameters after the last step.
        optimizer_state: State after the last step: `{fqn: {"exp_avg": tensor, ...}}`.
    """

    losses: Sequence[Any] = ()
    grad_norms: Sequence[Any] = ()
    grads: Mapping[str, torch.Tensor] = field(default_factory=dict)
    params: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer_state: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def collect(
        cls,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        losses: Sequence[Any] = (),
        grad_norms: Sequence[Any] = (),
    ) -> Self:
        """Gather the full tensors of a model and an optimizer, on one process or, as a collective, over all ranks.

        Works for a plain module and optimizer, for DTensor parameters, for pipeline stages (each rank adds its names),
        and for an optimizer whose `state_dict()["state"]` is keyed by name and holds boxed values. A tied parameter
        appears under each of its names in the model's `state_dict()`. Parameters without a gradient are left out of
        `grads`.

        Args:
            model: The module itself, not a wrapper that prefixes its names.
            optimizer: A `torch.optim.Optimizer` of its parameters, or any object with such a `state_dict()`.
            losses: Loss of each step; numbers, tensors or DTensors.
            grad_norms: Gradient norm of each step; numbers, tensors or DTensors.
        """
        values = model.state_dict(keep_vars=True)
        params = {name: value for name, value in values.items() if isinstance(value, torch.nn.Parameter)}
        return cls(
            losses=[_number(loss) for loss in losses],
            grad_norms=[_number(norm) for norm in grad_norms],
            grads=gather_named({name: p.grad for name, p in params.items() if p.grad is not None}),
            params=gather_named(params),
            optimizer_state=gather_state(_state_by_name(params, optimizer)) if optimizer is not None else {},
        )


def assert_same_training(
    actual: TrainingRecord, expected: TrainingRecord, *, rtol: float | None = None, bitwise: bool = False
) -> None:
    """Check that two trainings are the same; the error names the first thing that differs.

    Compared in this order: loss and gradient norm step by step, then gradients, parameters and optimizer state in the
    order of `expected`. The relative difference of a tensor is max|actual - expected| / max(1e-30, max|expected|).
    Values that are not finite never agree. Shapes and dtypes must be equal. Both records must have the same entries.

    Args:
        actual: The training under test.
        expected: The reference.
        rtol: Largest relative difference allowed, for example 1e-10.
        bitwise: Ask for equal values instead (zeros of either sign are equal).

    Raises:
        AssertionError: Naming kind, parameter, step, relative and largest difference, its index and both values, and
            how many of all compared values differ.
        TypeError: If a record holds a DTensor or another value that is not a full tensor.
        ValueError: If not exactly one of `rtol` and `bitwise` is given, or `expected` holds nothing to compare with.

    Example:
        >>> reference = TrainingRecord(losses=[2.0, 1.5])
        >>> assert_same_training(TrainingRecord(losses=[2.0, 1.5 + 1e-12]), reference, rtol=1e-10)
        >>> assert_same_training(TrainingRecord(losses=[2.0, 1.4]), reference, rtol=1e-10)
        Traceback (most recent call last):
        AssertionError: loss of step 2 differs by 0.0667 (relative), allowed is 1e-10
        largest difference 0.1: actual 1.4, expected 1.5
        1 of 2 compared values differ
    """
    if (rtol is None) == (not bitwise):
        raise ValueError(f"expected either rtol or bitwise=True, got rtol={rtol}, bitwise={bitwise}; give one of them")
    num_steps = max(len(expected.losses), len(expected.grad_norms))
    wanted, got = dict(_entries(expected, num_steps)), dict(_entries(actual, num_steps))
    if not wanted:
        raise ValueError("expected a record with values to compare with, got an empty one; collect the reference first")
    _check_names(got, wanted)
    rtol = 0.0 if rtol is None else rtol
    differing = {name: text for name in wanted if (text := _difference(got[name], wanted[name], rtol))}
    for name, text in differing.items():
        raise AssertionError(f"{name} differs {text}\n{len(differing)} of {len(wanted)} compared values differ")


def _number(value: Any) -> float:
    return gather_full(value).item() if isinstance(value, torch.Tensor) else float(value)


def _entries(record: TrainingRecord, num_steps: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield everything in `record` with the name by which an error calls it, in the order of comparison."""
    for step, (loss, norm) in enumerate(zip_longest(record.losses, record.grad_norms), start=1):
        for kind, value in (("loss", loss), ("gradient norm", norm)):
            if value is not None:
                yield f"{kind} of step {step}", torch.tensor(value, dtype=torch.float64)
    after = f" after step {num_steps}" if num_steps else ""
    for name, tensor in record.grads.items():
        yield f"gradient of {name}{after}", _full(name, tensor)
    for name, tensor in record.params.items():
        yield f"parameter {name}{after}", _full(name, tensor)
    for name, values in record.optimizer_state.items():
        for key, tensor in values.items():
            yield f"optimizer state {key} of {name}{after}", _full(name, tensor)


def _full(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        kind = type(tensor).__name__
        raise TypeError(f"{name}: expected a full torch.Tensor, got a {kind}; gather it with gather_named")
    return tensor.detach()


def _check_names(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    missing = [name for name in wanted if name not in got]
    surplus = [name for name in got if name not in wanted]
    for names, text in ((missing, "is missing"), (surplus, "is not expected")):
        if names:
            raise AssertionError(f"{names[0]} {text} ({len(missing)} missing, {len(surplus)} not expected)")


def _difference(actual: torch.Tensor, expected: torch.Tensor, rtol: float) -> str:
    """Return how `actual` differs from `expected` by more than `rtol`, or an empty string."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"in kind\nactual {_kind(actual)}, expected {_kind(expected)}"
    if not expected.numel():
        return ""
    a, b = actual.cpu().double(), expected.cpu().double()
    gap = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    relative = (gap.max() / b.abs().max().clamp(min=1e-30)).item()
    if relative <= rtol:  # false for nan, which comes from values that are not finite
        return ""
    at = torch.unravel_index(gap.argmax(), gap.shape)
    where = f" at {tuple(map(int, at))}" if at else ""
    return (
        f"by {relative:.3g} (relative), allowed is {rtol:g}\nlargest difference {gap.max().item():.3g}{where}: "
        f"actual {actual[at].item()!r}, expected {expected[at].item()!r}"
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _state_by_name(params: Mapping[str, torch.Tensor], optimizer: Any) -> dict[str, Mapping[str, Any]]:
    """Return the optimizer's state under every name of each parameter; torch's optimizers number them instead."""
    names: dict[int, list[str]] = {}
    for name, parameter in params.items():
        names.setdefault(id(parameter), []).append(name)
    numbered = [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group.get("params", ())]
    by_name = {}
    for key, values in optimizer.state_dict()["state"].items():
        found = params.get(key) if isinstance(key, str) else numbered[key]
        if id(found) not in names:
            raise ValueError(
                f"expected optimizer state of the model's parameters, got state of parameter {key!r}; pass the model "
                "that the optimizer updates"
            )
        by_name.update(dict.fromkeys(names[id(found)], values))
    return by_name
