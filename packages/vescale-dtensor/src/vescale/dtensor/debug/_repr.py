"""Print a DTensor with its layout.

Stock torch prints this rank's shard as if it were the full tensor. This module has two alternatives:

- ``repr`` never communicates, because it may run on one rank only (a debugger, ``if rank == 0: print(x)``). It shows
  the global shape, the placements by axis, this rank, and the box of the printed values.
- :func:`show` gathers the global values and must be called on all ranks.

The first replaces ``DTensor.__repr__`` while this package is imported. It affects DTensors only, and falls back to
torch's text if it fails.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .._checked import CheckedInside, Size, checked
from .._layout.shards import pieces
from .._torch.dispatch import local_tensor
from ._holdings import boxes_text
from ._text import axis_names, mesh_text, placements_text

__all__ = ["repr_with_layout", "show"]


def repr_with_layout(stock: Callable[[DTensor], str]) -> Callable[[DTensor], str]:
    """Return the ``repr`` of this module, with ``stock`` as its fallback."""

    def dtensor_repr(tensor: DTensor) -> str:
        """Return this rank's values and their layout, without communication."""
        try:
            text = f"{_header(tensor)}\n{_whose(tensor)}:\n"
        except Exception:  # an error in repr would hide the bug that the user is debugging
            return stock(tensor)
        return f"{text}{local_tensor(tensor)!r}"

    return dtensor_repr


@checked
def show(tensor: CheckedInside[DTensor], *, max_elements: Size = 100_000) -> str:
    """Return a text with the global values of ``tensor``. **All ranks of its mesh must call it.**

    Args:
        tensor: sharded, partial or replicated.
        max_elements: a larger tensor is not gathered; the text then has no values.

    Raises:
        TypeError: ``tensor`` is not a DTensor.

    Example:
        >>> text = debug.show(x)                # all ranks             # doctest: +SKIP
        >>> if dist.get_rank() == 0:                                    # doctest: +SKIP
        ...     print(text)
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"expected a DTensor, got {type(tensor).__name__}; print a plain tensor as it is")
    if tensor.numel() > max_elements:
        return f"{_header(tensor)}\n{tensor.numel()} elements are more than max_elements={max_elements}: not gathered"
    with torch.no_grad():
        return f"{_header(tensor)}\nglobal values:\n{tensor.detach().full_tensor()!r}"


def _header(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    autograd = f", grad_fn=<{tensor.grad_fn.name()}>" if tensor.grad_fn else ", requires_grad=True"
    return (
        f"DTensor(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, {placements_text(mesh, tensor.placements)}, "
        f"{mesh_text(mesh)}{autograd if tensor.requires_grad else ''})"
    )


def _whose(tensor: DTensor) -> str:
    """Describe which part of the full tensor this rank's values are."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    coord = mesh.get_coordinate()
    rank = f"rank {dist.get_rank()}"
    if coord is None:
        return f"{rank} is not in the mesh and holds nothing"
    here = f"{rank} ({', '.join(f'{name}={i}' for name, i in zip(axis_names(mesh), coord, strict=True))})"
    sizes = tuple(mesh.shape)
    partial = [
        f"{p.reduce_op} over {name}"
        for name, p, size in zip(axis_names(mesh), placements, sizes, strict=True)
        if isinstance(p, Partial) and size > 1
    ]
    note = f", parts of the values whose {', '.join(partial)} is the tensor" if partial else ""
    if all(_is_whole(p, size) for p, size in zip(placements, sizes, strict=True)):
        return f"{here} holds the whole{note}" if note else f"every rank holds the whole, this is {here}"
    cuts = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
    boxes = [piece.box for piece in pieces(tuple(tensor.shape), sizes, tuple(coord), cuts)]
    return f"{here} holds {boxes_text([box for box in boxes if all(box[1])])}{note}"


def _is_whole(placement: Placement, size: int) -> bool:
    return size == 1 or isinstance(placement, Replicate | Partial)
