"""Which part of which global tensor this rank holds of a value.

value                                  parts
DTensor                                the boxes of its placements; none if they are partial sums
value with boxes                       these boxes: parameters under ZeRO 3, gradients under ZeRO 1 to 3
plain tensor with recorded placements  as the DTensor that it was when the program was recorded (static mode)
other plain tensor                     all of it; on a mesh that shards tensors this is an assumption, which holds
                                       only if the ranks turn out to have the same values
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from vescale.dtensor.errors import UnsupportedPlacement
from vescale.dtensor.extension import flat_range_boxes, local_shape, local_views, pieces

Part = tuple[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Layout:
    """How a value lies on a mesh.

    Attributes:
        shape: of the global tensor.
        mesh: on which it lies.
        placements: one per axis of the mesh.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, value: DTensor) -> Layout:
        """Return the layout of a DTensor."""
        return cls(tuple(value.shape), value.device_mesh, tuple(value.placements))

    def __str__(self) -> str:
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        return ", ".join(f"{name}: {placed}" for name, placed in zip(names, self.placements, strict=True))


@dataclass(frozen=True)
class Holding:
    """What this rank holds of a global tensor.

    Attributes:
        shape: of the global tensor; of one micro-batch on one data-parallel rank, if rows are spread.
        parts: offsets and values of disjoint rectangles.
        placements: as text.
        is_assumed: whether nothing says that a plain tensor is the whole tensor.
        missing: why there are no values, or "".
        mesh: on which it lies as a DTensor, if it does.
    """

    shape: tuple[int, ...]
    parts: list[Part]
    placements: str = ""
    is_assumed: bool = False
    missing: str = ""
    mesh: DeviceMesh | None = None


def holding(value: Any, layout: Layout | None = None, *, is_assumed: bool = False) -> Holding:
    """Return what this rank holds of a value.

    Args:
        value: a tensor, a DTensor, or a value with ``__boxes__``.
        layout: of the DTensor that a plain tensor stands for.
        is_assumed: whether a plain tensor may be a part of a tensor.
    """
    if isinstance(value, DTensor):
        return _laid(value.to_local(), Layout.of(value))
    if hasattr(value, "__boxes__"):
        return Holding(tuple(value.__global_shape__), list(value.__boxes__()), "boxes of ranks")
    if layout is not None and isinstance(value, Tensor):
        found = _laid(value, layout)
        if found.missing or sum(math.prod(part.shape) for _, part in found.parts) == value.numel():
            return found
        is_assumed = True
    return Holding(tuple(value.shape), [((0,) * value.dim(), value)], is_assumed=is_assumed)


def _laid(local: Tensor, layout: Layout) -> Holding:
    if any(isinstance(placed, Partial) or placed.is_partial() for placed in layout.placements):
        return Holding(layout.shape, [], str(layout), missing="is a partial sum on each rank")
    try:
        found = local_views(local, layout.shape, layout.mesh, layout.placements)
    except (RuntimeError, UnsupportedPlacement, ValueError) as error:
        return Holding(layout.shape, [], str(layout), missing=f"has an unknown layout ({error})")
    return Holding(layout.shape, [(tuple(box[0]), view) for box, view in found], str(layout), mesh=layout.mesh)


def gradient_of(parameter: nn.Parameter) -> Holding | None:
    """Return what this rank holds of the gradient of a parameter after its reduction; None without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    slot = getattr(gradient, "slot", None)
    if slot is None:
        return holding(gradient)
    start, stop = slot.part
    return Holding(tuple(parameter.shape), list(_flat_parts(parameter, slot.grad_part, start, stop)), "flat over dp")


def _flat_parts(parameter: nn.Parameter, flat: Tensor, start: int, stop: int) -> Iterator[Part]:
    """Yield the rectangles of a flat range of the local tensor of a parameter."""
    local: Sequence[int] = parameter.shape
    held = [((0,) * len(local), (0,) * len(local), tuple(local))]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        coord = mesh.get_coordinate()
        found = pieces(tuple(parameter.shape), tuple(mesh.shape), tuple(coord or ()), tuple(parameter.placements))
        held = [(piece.box[0], piece.origin, piece.box[1]) for piece in found]
        local = local_shape(tuple(parameter.shape), tuple(mesh.shape), tuple(coord or ()), tuple(parameter.placements))
    position = 0
    for offsets, sizes in flat_range_boxes(tuple(local), start, stop):
        numel = math.prod(sizes)
        view = flat[position : position + numel].view(tuple(sizes))
        position += numel
        for there, here, extent in held:
            yield from _overlap(offsets, sizes, view, there, here, extent)


def _overlap(
    offsets: Sequence[int],
    sizes: Sequence[int],
    view: Tensor,
    there: Sequence[int],
    here: Sequence[int],
    extent: Sequence[int],
) -> Iterator[Part]:
    """Yield what a rectangle of the local tensor has in common with one that lies ``there`` in the global tensor."""
    first = [max(offset, at) for offset, at in zip(offsets, here, strict=True)]
    last = [
        min(offset + size, at + length) for offset, size, at, length in zip(offsets, sizes, here, extent, strict=True)
    ]
    if all(begin < end for begin, end in zip(first, last, strict=True)):
        inside = tuple(slice(b - o, e - o) for b, e, o in zip(first, last, offsets, strict=True))
        yield tuple(t + b - h for t, b, h in zip(there, first, here, strict=True)), view[inside]
