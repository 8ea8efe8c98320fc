"""Collectives that a step issues, by kind: how many, and how many elements enter them on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Traffic", "num_collectives", "traffic"]

NAMESPACES = ("c10d", "_c10d_functional")
KINDS = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
}


def _kind(operator: str) -> str | None:
    """Return the kind of collective of an operator's name, None for what moves nothing (`wait_tensor`)."""
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), None)


@dataclass(frozen=True)
class Traffic:
    """What a step communicates.

    Attributes:
        count: collectives by kind.
        sent_bytes: of the tensors that enter them on this rank, by kind; None if that is not known.
    """

    count: dict[str, int]
    sent_bytes: dict[str, int] | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count[kind]} {kind}" for kind in KINDS if kind in self.count)
        return counts if self.sent_bytes is None else f"{counts}; {sum(self.sent_bytes.values())} bytes"


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # first to what DTensor makes of it, collectives included
        if func.namespace in NAMESPACES and (kind := _kind(func.name())):
            self.count[kind] += 1
            sent = _sent(func, args)
            self.sent_bytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in sent)
        return func(*args, **(kwargs or {}))


def _sent(func: torch._ops.OpOverload, args: tuple) -> list[Tensor]:
    """Return the tensors that enter: c10d's operators with an output have it first."""
    has_output = func.namespace == "c10d" and "allreduce" not in func.name()
    return [leaf for leaf in tree_leaves(args[1 if has_output else 0]) if isinstance(leaf, Tensor)]


def traffic(step: Callable[[], object]) -> Traffic:
    """Run `step`, which must not be compiled, and return what it communicates."""
    with _Log() as log:
        step()
    return Traffic(dict(log.count), dict(log.sent_bytes))


def num_collectives(step: Callable[[], object]) -> dict[str, int]:
    """Run `step`, compiled or not, and return its number of collectives by kind."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    kinds = []
    for event in profiler.events():
        namespace, _, operator = event.name.partition("::")
        nested = event.cpu_parent is not None and event.cpu_parent.name.partition("::")[0] in NAMESPACES
        if namespace in NAMESPACES and not nested:  # a functional collective calls one of c10d
            kinds.append(_kind(operator))
    return dict(Counter(kind for kind in kinds if kind))
