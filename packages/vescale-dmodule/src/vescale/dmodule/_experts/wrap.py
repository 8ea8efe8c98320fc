"""Between DTensors and the local tensors of an experts' region, differentiably."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .._boundary.convert import as_dtensor
from .._boundary.edges import unwrapped, wrapped
from .axes import is_cut

__all__ = ["from_local", "layout_of_tokens", "to_local"]

Placements = tuple[Placement, ...]


def layout_of_tokens(hidden: Tensor, mesh: DeviceMesh) -> Placements:
    """Return how the tokens of ``hidden``, (..., hidden), lie: as they are, but replicated where only that makes sense.

    That is, where the hidden dim is sharded or values are partial sums; there :func:`to_local` communicates. A plain
    tensor is equal on all ranks.
    """
    if not isinstance(hidden, DTensor):
        return (Replicate(),) * mesh.ndim
    last = hidden.ndim - 1
    return tuple(p if is_cut(p) and getattr(p, "dim", last) < last else Replicate() for p in hidden.placements)


def to_local(value: Tensor, tokens: Placements, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of ``value`` in the layout ``tokens``. Its gradient comes in that layout."""
    tensor = value if isinstance(value, DTensor) else as_dtensor(value, mesh)
    if tuple(tensor.placements) != tokens:
        tensor = tensor.redistribute(placements=tokens)
    return unwrapped(tensor, tokens)


def from_local(
    hidden: Tensor, placements: Placements, grad_placements: Placements, mesh: DeviceMesh
) -> Callable[[Tensor], DTensor]:
    """Return a function that makes a DTensor of an output, whose tokens are those of ``hidden``."""

    def whole(output: Tensor) -> DTensor:
        shape = (*hidden.shape[:-1], output.shape[-1])
        return wrapped(output, mesh, placements, shape=shape, gradient=grad_placements)

    return whole
