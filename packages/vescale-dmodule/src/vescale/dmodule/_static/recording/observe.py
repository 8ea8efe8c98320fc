"""What a rehearsal in eager mode finds, as data: the layouts of every value that crosses a boundary.

A *crossing* is one tensor at one place: an argument or result of a planned boundary, what enters and leaves the module
itself, and what enters and leaves a part that stays in eager mode. The same observer runs in the rehearsal on DTensors
and in the first run on local tensors, so that the two can be compared value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ... import _torch
from ..._boundary.convert import as_dtensor, bring

__all__ = ["Crossing", "Crossings", "Observer", "replicated"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Crossing:
    """One tensor at one place.

    Attributes:
        where: the place, such as ``model.layers.0.mlp.input 'x'``.
        arriving: local shape of the value that arrives.
        shape: global shape.
        source: layout of the value that arrives; None for one that is a plain tensor in eager mode, too.
        target: layout of the value that leaves.
        gradient: layout of the gradient that comes back to it; None where none came.
        dtype: of the value.
    """

    where: str
    arriving: tuple[int, ...]
    shape: tuple[int, ...]
    source: Placements | None
    target: Placements | None
    gradient: Placements | None
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What a value on local tensors is recognised by."""
        return self.where, self.arriving


@dataclass(eq=False)
class _Seen:
    """A crossing that is happening: the local value, and later its local gradient."""

    crossing: Crossing
    value: Tensor
    module: str
    gradient: Tensor | None = None
    gradient_layout: Placements | None = None

    def note_gradient(self, grad: Tensor | None) -> None:
        if self.gradient is None and grad is not None:  # None: nothing on this rank used the value
            whole = isinstance(grad, DTensor)
            self.gradient = (_torch.local_of(grad) if whole else grad).detach().clone()
            self.gradient_layout = tuple(grad.placements) if whole else None

    def finished(self) -> Crossing:
        return Crossing(**{**vars(self.crossing), "gradient": self.gradient_layout})


@dataclass
class Observer:
    """Notes crossings.

    Attributes:
        mesh: of the placements.
        running: gives the name of the module that runs.
        seen: crossings in order.
    """

    mesh: DeviceMesh
    running: Callable[[], str]
    seen: list[_Seen] = field(default_factory=list)

    def convert(self, tensor: Tensor, placements: Placements, where: str) -> DTensor:
        """Bring a value of the eager program to its placements, noted."""
        whole = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, self.mesh)
        out = bring(tensor, placements, self.mesh)
        crossing = _crossing(where, whole, tuple(whole.placements), tuple(out.placements))
        self._note(crossing, _torch.local_of(out), out)
        return out

    def watch(self, tensor: Tensor, where: str) -> Tensor:
        """Note a value of the eager program as it is; returns an alias, whose gradient is this crossing's alone."""
        layout = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
        out = tensor.view_as(tensor) if tensor.requires_grad else tensor
        self._note(_crossing(where, tensor, layout, layout), _local(out), out)
        return out

    def note_local(self, tensor: Tensor, where: str) -> None:
        """Note a value of the program on local tensors, for the comparison."""
        self._note(_crossing(where, tensor, None, None), _local(tensor), tensor)

    def _note(self, crossing: Crossing, value: Tensor, tensor: Tensor) -> None:
        seen = _Seen(crossing, value.detach().clone(), self.running())
        if tensor.requires_grad:
            tensor.register_hook(seen.note_gradient)
        self.seen.append(seen)

    def crossings(self) -> Iterator[Crossing]:
        """Yield what was seen, with the layouts of the gradients that came."""
        return (seen.finished() for seen in self.seen)


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _crossing(where: str, tensor: Tensor, source: Placements | None, target: Placements | None) -> Crossing:
    arriving = tuple(_local(tensor).shape)
    return Crossing(where, arriving, tuple(tensor.shape), source, target, None, tensor.dtype)


@dataclass
class Crossings:
    """Crossings by place and local shape, from all rehearsals of one module."""

    known: dict[tuple[str, tuple[int, ...]], Crossing] = field(default_factory=dict)

    def conflict(self, new: Crossing) -> Crossing | None:
        """Return a crossing that looks like ``new`` on local tensors, but has other layouts."""
        old = self.known.get(new.key)
        return None if old is None or _agree(old, new) else old

    def add(self, new: Crossing) -> None:
        """Add a crossing; of two that agree, the one that says more is kept: a DTensor's, and with a gradient."""
        old = self.known.get(new.key)
        if old is None or old.source is None or (old.gradient is None and new.source is not None):
            self.known[new.key] = new


def _agree(old: Crossing, new: Crossing) -> bool:
    if old.shape == new.shape and None in (old.source, new.source):  # a plain tensor is equal on all ranks
        return all(p.is_replicate() for p in (*(old.source or ()), *(new.source or ())))
    layouts = (old.shape, old.source, old.target) == (new.shape, new.source, new.target)
    return layouts and (old.gradient == new.gradient or None in (old.gradient, new.gradient))


def replicated(mesh: DeviceMesh) -> Placements:
    """Return the placements of a tensor that is equal on all ranks."""
    return (Replicate(),) * mesh.ndim
