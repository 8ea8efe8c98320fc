"""Which functions mix rows, while rows are sharded over an axis that has this process alone.

A function that communicates over that axis mixes rows. Some only seem to, because DTensors do not know better::

    cross_entropy(x, target)        divides by a number of targets: its mean over own rows is one, if numbers are equal
    mask[arange(rows)[:, None], i]  selects all rows in order
    loss + constant                 a mean over rows plus a constant is the mean of the sums
    mask.all()                      a truth value of integers or truth values steers code, and own rows have their own
    zeros(rows, 4)[:, i] = x        a constant tensor that holds rows (tried if nothing else helps)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.overrides import TorchFunctionMode

from .. import _torch
from .._boundary.convert import as_dtensor
from .._boundary.rows_axis import lift, lower
from .._boundary.values import map_tensors
from .._static.parts import describe
from .._static.recording.names import Names
from .._static.recording.search import SUMS

__all__ = ["COUNTED_MEANS", "MixingNotes"]

COUNTED_MEANS = (F.cross_entropy, F.nll_loss)
OUT_OF_PLACE = {getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in ("add", "sub", "mul", "div")}
OUT_OF_PLACE |= {getattr(Tensor, f"__i{n}__"): getattr(Tensor, f"__{n}__") for n in ("add", "sub", "mul", "truediv")}
CONSTANTS = {torch.zeros, torch.ones, torch.empty, torch.full}
CONSTANTS |= {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full}


class MixingNotes(TorchFunctionMode):
    """Notes the functions that mix rows.

    Args:
        names: the running modules.
        log: of collectives over the axis of rows.
        mesh: that axis, of two ranks, ahead of those of a plan.
        num_rows: of both ranks.
        splits_constants: whether constant tensors with as many rows are sharded like rows.

    Attributes:
        mixing: a text about each function that mixes rows, in order.
        counted: a text about each mean over targets.
    """

    def __init__(self, names: Names, log: Sized, mesh: DeviceMesh, *, num_rows: int, splits_constants: bool):
        super().__init__()
        self._names, self._log, self._mesh, self._num_rows = names, log, mesh, num_rows
        self._splits_constants = splits_constants
        self._plan = None if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[1:]]
        self.mixing: dict[str, None] = {}
        self.counted: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        wide = [t for t in _torch.tree_leaves((args, kwargs)) if self._is_wide(t)]
        if not wide:
            result = func(*args, **kwargs)
            return self._as_rows(result) if self._splits_constants and func in CONSTANTS else result
        if (own := self._own_rows(func, args, kwargs, wide)) is not None:
            return own
        if func in OUT_OF_PLACE and not self._is_wide(args[0]):
            func = OUT_OF_PLACE[func]  # a plain tensor cannot become one of all rows; `+=` takes the result
        before = len(self._log)
        result = func(*args, **kwargs)
        if len(self._log) > before and not _steers(wide, result):
            self.mixing[self._text(func)] = None
        return self._as_rows(result) if self._splits_constants and func in CONSTANTS else result

    def _text(self, func: Callable) -> str:
        return f"{getattr(func, '__name__', func)} in {describe(self._names.running)}"

    def _is_wide(self, leaf: object) -> bool:
        return isinstance(leaf, DTensor) and leaf.device_mesh.ndim == self._mesh.ndim and leaf.device_mesh == self._mesh

    def _own_rows(self, func: Callable, args: tuple, kwargs: dict, wide: list[DTensor]) -> DTensor | None:
        """Return what a function that only seems to mix rows gives for own rows; None if it is no such function."""
        own: Placement | None = None
        if func in COUNTED_MEANS and self._is_mean_of_rows(func, args, kwargs):
            self.counted.append(self._text(func))
            own = Partial("avg")
        elif func in SUMS and self._is_mean_and_constants(args, wide):
            func, own = OUT_OF_PLACE.get(func, func), Partial("avg")
        elif func is Tensor.__getitem__ and (selection := self._selection(*args)) is not None:
            args, own = selection
        if own is None:
            return None
        if self._plan is None:
            result = func(*map_tensors(_local, args), **map_tensors(_local, kwargs))
            return DTensor.from_local(result, self._mesh, [own], run_check=False)
        result = func(*map_tensors(self._lowered, args), **map_tensors(self._lowered, kwargs))
        return lift(result if isinstance(result, DTensor) else as_dtensor(result, self._plan), self._mesh, own)

    def _lowered(self, tensor: Tensor) -> Tensor:
        return lower(tensor, self._plan) if self._is_wide(tensor) else tensor

    def _as_rows(self, tensor: DTensor) -> DTensor:
        """Return a constant tensor sharded like rows, if it has as many in dim 0."""
        if not tensor.ndim or tensor.shape[0] != self._num_rows:
            return tensor
        if self._plan is None:
            part = (
                (_local(tensor) if tensor.placements[0].is_replicate() else None) if self._is_wide(tensor) else tensor
            )
            return (
                tensor
                if part is None
                else DTensor.from_local(_own_half(part, 0), self._mesh, [Shard(0)], run_check=False)
            )
        if self._is_wide(tensor):
            return tensor
        part = _own_half(tensor, 0)
        return lift(part if isinstance(part, DTensor) else as_dtensor(part, self._plan), self._mesh, Shard(0))

    @staticmethod
    def _is_mean_of_rows(func: Callable, args: tuple, kwargs: dict) -> bool:
        """Return whether it is a mean over targets that are sharded on the axis of rows as the input is."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        x, target = given["input"], given["target"]
        if given.get("reduction", "mean") != "mean" or not (isinstance(x, DTensor) and isinstance(target, DTensor)):
            return False
        classes = min(1, x.ndim - 1) if x.ndim > target.ndim else None
        sizes = [size for dim, size in enumerate(_local(x).shape) if dim != classes]
        is_sharded = x.placements[0].is_shard() and target.placements[0].is_shard()
        return is_sharded and x.placements[0].dim != classes and sizes == list(_local(target).shape)

    @staticmethod
    def _is_mean_and_constants(args: tuple, wide: list[DTensor]) -> bool:
        """Return whether means over rows are added to values that all rows have in common."""
        own = [t.placements[0] for t in wide]
        means = [p for p in own if p.is_partial("avg")]
        return 0 < len(means) < len(args) and all(p.is_replicate() or p in means for p in own)

    def _selection(self, x: object, index: object) -> tuple[tuple, Shard] | None:
        """Return the arguments for own rows of an indexing that selects all rows in order, and where rows are then."""
        indices = list(index) if isinstance(index, tuple) else [index]
        if not self._is_wide(x) or not x.placements[0].is_shard() or not all(map(_is_integers, indices)):
            return None
        dim = x.placements[0].dim
        if dim >= len(indices):
            return None
        rows = _local(indices[dim])
        dims = [d for d, size in enumerate(rows.shape) if size != 1]
        if len(dims) != 1 or rows.numel() != x.shape[dim] or not all(_is_common(i) for i in indices):
            return None
        if not torch.equal(rows.flatten(), torch.arange(rows.numel(), device=rows.device)):
            return None
        position = dims[0] - rows.ndim + max(i.ndim for i in indices)  # all indices come first in the result
        indices[dim] = _own_half(rows, dims[0]) - rows.numel() // 2
        return (x, tuple(indices)), Shard(position)


def _local(leaf: Tensor) -> Tensor:
    return _torch.local_of(leaf) if isinstance(leaf, DTensor) else leaf


def _own_half(tensor: Tensor, dim: int) -> Tensor:
    half = tensor.shape[dim] // 2
    return tensor.narrow(dim, half, half)


def _is_integers(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.ndim > 0


def _is_common(index: Tensor) -> bool:
    """Return whether all rows have an index in common, which then does not depend on them."""
    return not isinstance(index, DTensor) or all(p.is_replicate() for p in index.placements)


def _steers(operands: list[DTensor], result: object) -> bool:
    """Return whether a function makes one truth value of integers or truth values."""
    is_truth = isinstance(result, bool) or (
        isinstance(result, Tensor) and not result.ndim and result.dtype == torch.bool
    )
    return is_truth and not any(t.is_floating_point() or t.is_complex() for t in operands)
