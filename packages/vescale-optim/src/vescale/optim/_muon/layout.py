"""Where the elements of a parameter's matrices are, on every rank that has some: integers only.

A parameter is a matrix (rows, cols) or a stack of matrices. A mesh axis does one of four things to a matrix:

    cuts it      sharded rows or columns, in strips or not           a rank has a **cell**: rectangles of the matrix
    parts it     ragged shards; ZeRO, with its buffer's shards       a rank has a range of the flat cell
    copies it    replicated; replicas of hybrid sharding; ZeRO 0     its ranks have the same
    passes by    shards of the stack, full matrices on one rank      its ranks have different matrices

The axes of the first three kinds are the **home** of the matrix: all ranks that need its update, any of which can
compute it.

    matrix (4, 4), columns cut over tp,        tp 0       tp 1
    flat cells of 8 parted over dp:            a a . .    . . c c       dp 0: elements [0, 5) of the cell
                                               a a . .    . . c c
                                               a b . .    . . c d       dp 1: elements [5, 8)
                                               b b . .    . . d d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale.dtensor import RaggedShard
from vescale.dtensor.extension import group_of_ranks, pieces

from .. import _torch
from .._ranks.axis import Axis
from .._ranks.grid import Coords, Ranks

__all__ = ["Cell", "MatrixLayout", "Part", "layout_of"]

Slices = tuple[slice, slice]


@dataclass(frozen=True)
class Cell:
    """Rectangles of a matrix that together form a smaller one.

    Attributes:
        shape: Its rows and columns.
        boxes: Where each rectangle is in the matrix, and in the cell.
    """

    shape: tuple[int, int]
    boxes: tuple[tuple[Slices, Slices], ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    def take(self, matrix: Tensor) -> Tensor:
        """Return the flat elements of the cell, perhaps a view."""
        if len(self.boxes) == 1:
            return matrix[self.boxes[0][0]].reshape(-1)
        values = matrix.new_empty(self.shape)
        for there, here in self.boxes:
            values[here] = matrix[there]
        return values.view(-1)

    def put(self, matrix: Tensor, flat: Tensor) -> None:
        """Write the flat elements of the cell into the matrix."""
        values = flat.view(self.shape)
        for there, here in self.boxes:
            matrix[there] = values[here]


@dataclass(frozen=True)
class Part:
    """How ZeRO parts a flat local tensor that lies in a buffer of equal shards.

    Attributes:
        axis: The axis of the shards, of two ranks or more.
        start: Where the local tensor begins in the buffer.
        shard_numel: Elements of a shard.
    """

    axis: Axis
    start: int
    shard_numel: int

    def of(self, coord: int) -> tuple[int, int]:
        """Return the range of the flat local tensor that a coord has, not clipped to the tensor's size."""
        first = coord * self.shard_numel - self.start
        return first, first + self.shard_numel


@dataclass(frozen=True)
class MatrixLayout:
    """The matrices of one parameter.

    Attributes:
        fqn: Name of the parameter.
        shape: Rows and columns of a matrix.
        count: Number of its matrices on this rank, which is the number on each rank of their home.
        mesh_shape: Sizes of the axes of the parameter's mesh; none for a plain tensor.
        mesh_axes: The ranks of each of these axes.
        placements: The effect of each axis on a matrix: ``Replicate`` if it copies the matrix or passes by.
        cutting: The axes that cut or part matrices.
        copying: All axes that copy matrices.
        part: How ZeRO parts the local tensor; None if it does not.
        is_alone: Whether the parameter is one matrix and no stack.
    """

    fqn: str
    shape: tuple[int, int]
    count: int = 1
    mesh_shape: tuple[int, ...] = ()
    mesh_axes: tuple[Ranks, ...] = ()
    placements: tuple[Placement, ...] = ()
    cutting: tuple[Axis, ...] = ()
    copying: tuple[Axis, ...] = ()
    part: Part | None = None
    is_alone: bool = True
    _cells: dict[tuple[int, ...], Cell] = field(default_factory=dict, repr=False, compare=False)

    @property
    def home(self) -> tuple[Axis, ...]:
        """The axes whose ranks have parts or copies of a matrix."""
        return (*self.copying, *((self.part.axis,) if self.part else ()), *self.cutting)

    @property
    def is_copied(self) -> bool:
        """Whether every rank of the home has full matrices."""
        return self.part is None and not self.cutting

    def cell(self, coords: Coords) -> Cell:
        """Return the cell at the given coordinates; the same object for the same cell."""
        cuts = [Replicate() if isinstance(each, RaggedShard) else each for each in self.placements]
        axes = zip(self.mesh_axes, cuts, strict=True)
        place = tuple(0 if placement.is_replicate() else coords[axis] for axis, placement in axes)
        if place not in self._cells:
            self._cells[place] = _cell(self.shape, self.mesh_shape, place, cuts)
        return self._cells[place]

    def held(self, index: int, coords: Coords) -> tuple[int, int]:
        """Return the range ``[start, stop)`` of the flat cell of matrix ``index`` at the given coordinates."""
        first, last = self._in_local(coords)
        if self.part is None:
            return first, last
        begin = index * (last - first) - first  # of the flat cell, in the flat local tensor
        start, stop = (limit - begin for limit in self.part.of(coords[self.part.axis.ranks]))
        start = min(max(start, first), last)
        return start, max(min(stop, last), start)

    def position(self, index: int, coords: Coords) -> tuple[int, int]:
        """Return the position of the range `held` in the flat local tensor."""
        first, last = self._in_local(coords)
        begin = index * (last - first) - first
        start, stop = self.held(index, coords)
        return begin + start, begin + stop

    def _in_local(self, coords: Coords) -> tuple[int, int]:
        """Return the range of the flat cell that is in the local tensor: all of it, but for a ragged shard."""
        rows, cols = self.cell(coords).shape
        for axis, placement in zip(self.mesh_axes, self.placements, strict=True):
            if isinstance(placement, RaggedShard):
                num_units, unit = (rows, cols) if placement.dims == (0,) else (rows * cols, 1)
                start, count = placement.rows(num_units, coords[axis])
                return start * unit, (start + count) * unit
        return 0, rows * cols

    def __str__(self) -> str:
        place = f" at {self.part.start} in shards of {self.part.shard_numel}" if self.part else ""
        return f"{self.fqn}: {self.shape} {self.placements} over {self.mesh_shape}{place}"


def _cell(shape: tuple[int, int], mesh_shape: Sequence[int], place: Sequence[int], placements: Sequence) -> Cell:
    found = pieces(shape, tuple(mesh_shape), tuple(place), tuple(placements))
    boxes = [(_slices(*piece.box), _slices(piece.origin, piece.box[1])) for piece in found]
    ends = [(rows.stop, cols.stop) for _, (rows, cols) in boxes]
    return Cell(tuple(map(max, zip(*ends, strict=True))) if ends else (0, 0), tuple(boxes))


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> Slices:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def layout_of(fqn: str, param: Tensor, copying: Sequence[Axis] = (), part: Part | None = None) -> MatrixLayout:
    """Return the layout of a parameter's matrices.

    Args:
        fqn: Its name.
        param: The parameter, a matrix or a stack.
        copying: Axes of data parallelism over which its local tensor is replicated.
        part: How ZeRO parts its local tensor.

    Raises:
        NotImplementedError: If a ragged shard cuts through the matrices of a stack.
    """
    alone, stack_dims = param.ndim == 2, param.ndim - 2
    count = 1 if alone else param.shape[0]
    common = {"part": part, "is_alone": alone}
    if not isinstance(param, DTensor):
        return MatrixLayout(fqn, tuple(param.shape[-2:]), count, copying=tuple(copying), **common)
    axes = [_axis_in_order(param.device_mesh, dim) for dim in range(param.device_mesh.ndim)]
    placements, cutting, more_copying = [], [], []
    for axis, placement in zip(axes, param.placements, strict=True):
        if axis.size > 1 and _passes_by(fqn, placement, param):
            here = _torch.local_tensor(param)
            count = here.shape[0] if not alone else int(here.numel() > 0)
            placement = Replicate()
        elif axis.size == 1 or placement.is_replicate():
            more_copying += [axis] if axis.size > 1 else []
            placement = Replicate()
        else:
            cutting.append(axis)
            placement = _torch.without_dims(placement, stack_dims)
        placements.append(placement)
    return MatrixLayout(
        fqn,
        tuple(param.shape[-2:]),
        count,
        tuple(axis.size for axis in axes),
        tuple(axis.ranks for axis in axes),
        tuple(placements),
        tuple(cutting),
        (*copying, *more_copying),
        **common,
    )


def _axis_in_order(mesh: DeviceMesh, dim: int) -> Axis:
    """Return a mesh axis whose group keeps the rank order of the mesh; torch's own group may not."""
    axis, place = Axis.of_dim(mesh, dim), mesh.get_coordinate()
    line = mesh.mesh[tuple(slice(None) if d == dim else c for d, c in enumerate(place))].tolist()
    if tuple(line) == axis.ranks:
        return axis
    return replace(axis, coord=place[dim], group=group_of_ranks(line, keep_order=True))


def _passes_by(fqn: str, placement: Placement, param: DTensor) -> bool:
    """Return whether an axis only distributes the matrices of a stack and cuts none of them."""
    if isinstance(placement, RaggedShard):
        if param.ndim == 2:
            return sum(units > 0 for units in placement.local_units) == 1
        if placement.dims != (0,):
            raise NotImplementedError(
                f"Muon steps full matrices, and {fqn!r} of shape {tuple(param.shape)} is a stack that {placement} "
                f"cuts through its matrices (mesh {param.device_mesh.mesh_dim_names}); place it as RaggedShard((0,), "
                "...) or Shard, or list it in adamw=[...]"
            )
        return True
    return param.ndim == 3 and getattr(placement, "dim", None) == 0
