"""Watch boundaries: a named profiler range around each conversion, forward and backward, and a meter for reports.

Watching costs nothing while no profiler runs and no report is open: a boundary calls :func:`is_watched` and converts
directly. When watched, the conversion gets an alias of the tensor, so the autograd nodes between the alias and the
result are those of the conversion; hooks of the last and of the first open and close the range of its
backward::

    forward    tensor -- alias -- [ conversion ] -- result
    backward                  end               start
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Placement
from torch.profiler import record_function

from .. import _torch

__all__ = ["PREFIX", "Meter", "Span", "is_watched", "profiler_range", "watched"]

PREFIX = "vescale.dmodule/"
MAX_NODES = 16  # of one conversion; a boundary makes one or two

Convert = Callable[[Tensor, tuple[Placement, ...], str], Tensor]


class Meter(Protocol):
    """Measures every conversion and every reduction of gradients."""

    def begin(self) -> object:
        """Note the time and the traffic so far."""

    def forward(self, begun: object, where: str, tensor: Tensor, result: Tensor) -> object:
        """Note a conversion that has ended; return its row, for :meth:`backward`."""

    def backward(self, begun: object, row: object, gradient: Tensor | None) -> None:
        """Note the backward of a conversion, which has ended; ``gradient`` came to it."""

    def gradients(self, begun: object) -> None:
        """Note a reduction of gradients of parameters, which has ended."""


def is_watched(meter: Meter | None) -> bool:
    """Return whether a conversion must go through :func:`watched`; never while a compiler traces."""
    return not torch.compiler.is_compiling() and (meter is not None or _torch.is_profiling())


@contextlib.contextmanager
def profiler_range(name: str, meter: Meter | None) -> Iterator[None]:
    """Name the operators inside for a profiler, and measure them as a reduction of gradients."""
    if not is_watched(meter):
        yield
        return
    begun = meter.begin() if meter is not None else None
    with record_function(PREFIX + name):
        yield
    if meter is not None:
        meter.gradients(begun)


def watched(
    convert: Convert,
    tensor: Tensor,
    placements: tuple[Placement, ...],
    where: str,
    meter: Meter | None = None,
    *,
    is_result: bool = False,
) -> Tensor:
    """Return ``convert(tensor, placements, where)``, named for a running profiler and measured by ``meter``.

    The result of a module must stay the same object if it does not move, see ``_boundary.convert.bring``.
    """
    records = torch.is_grad_enabled() and tensor.requires_grad
    stays = records and is_result and not tensor.is_leaf
    alias = tensor.view_as(tensor) if records and not stays else tensor
    span = Span(where, meter)
    if stays:
        _torch.hook_first(tensor, lambda gradient: span.end((gradient,), ()))  # after a hook of `convert`
        num_hooks = len(_torch.gradient_hooks(tensor))
    begun = meter.begin() if meter is not None else None
    with record_function(PREFIX + where):
        result = convert(alias, placements, where)
    span.row = meter.forward(begun, where, tensor, result) if meter is not None else None
    if result is alias:
        if stays and len(_torch.gradient_hooks(tensor)) > num_hooks:
            _torch.hook_first(tensor, lambda gradient: span.start((gradient,)))
        return tensor  # otherwise nothing happens in either direction
    if records and result.requires_grad:
        nodes = _nodes(result, alias)
        if nodes:
            nodes[0].register_prehook(span.start)
            nodes[-1].register_hook(span.end)
    return result


def _nodes(result: Tensor, alias: Tensor) -> list[Node]:
    """Return the nodes from ``result`` back to ``alias``, without that of ``alias``; nothing if they are no chain."""
    nodes, node = [], result.grad_fn
    while node is not None and node is not alias.grad_fn and len(nodes) < MAX_NODES:
        nodes.append(node)
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return nodes if node is alias.grad_fn else []


class Span:
    """The backward of one conversion, from the hook before its first node to that after its last."""

    def __init__(self, where: str, meter: Meter | None):
        self.where, self.meter = where, meter
        self.row: object = None
        self.range: record_function | None = None
        self.begun: object = None
        self.gradient: Tensor | None = None

    def start(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Open the range, in the hook before the first node."""
        self.gradient = gradients[0]
        self.begun = self.meter.begin() if self.meter is not None else None
        self.range = record_function(f"{PREFIX}{self.where} backward")
        self.range.__enter__()

    def end(self, _inputs: tuple[Tensor | None, ...], _outputs: tuple[Tensor | None, ...]) -> None:
        """Close the range, in the hook after the last node."""
        if self.range is None:
            return
        self.range.__exit__(None, None, None)
        if self.meter is not None:
            self.meter.backward(self.begun, self.row, self.gradient)
        self.range = self.begun = self.gradient = None


def clock(device_type: str) -> float:
    """Return the time in seconds, after all work submitted to the device is done."""
    if device_type != "cpu":
        torch.get_device_module(device_type).synchronize()
    return time.perf_counter()


def placements_of(tensor: Tensor | None) -> tuple[Placement, ...] | None:
    """Return the placements of a DTensor, None for anything else."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else None
