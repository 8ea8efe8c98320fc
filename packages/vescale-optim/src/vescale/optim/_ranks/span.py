"""The ranks over which a norm is taken, as one group: one collective in place of one per mesh axis.

Axes that are slices of one mesh span a part of it, whose ranks differ along some of its dims only:

    mesh (pp, dp, tp)        parameters over tp, DDP over dp         span {dp, tp}        the ranks of this stage
                             and norm_axes=[mesh["pp"]]              span {pp, dp, tp}    all ranks

All ranks of a span must compute the same one. Ranks that share parameters have the same meshes. So without
``norm_axes`` each rank can compute the span, and the ranks compare it only the first time. Pipeline stages may have
other meshes, and at other times (a stage of plain tensors, parameters frozen later). They agree on the union of their
axes when the same ``norm_axes`` are first given, and keep it. An axis outside the span (of a separate mesh, or one that
came later) is reduced by itself, see `_norm/counting.py`.

An axis of another mesh of the same ranks belongs to the span if its ranks are also a part of the first mesh, along the
same dims on every rank. An example is a separate mesh of experts that unites dp and tp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import group_of_ranks

from .. import _torch
from .axis import Axis

__all__ = ["KnownAxis", "Ranks", "Span", "span_of"]

Ranks = tuple[int, ...]
Dims = frozenset[int]

#: The spans that ranks have agreed on, for the life of the default process group. Process-wide, because
#: `clip_grad_norm_` is a function and may get parameters without a DDP: no object outlives its calls.
_spans: dict[tuple[object, ...], Span] = {}

_WHAT = "the set of mesh axes of the parameters given to clip_grad_norm_"


@dataclass(frozen=True)
class KnownAxis:
    """An axis and the full mesh of which it is a slice, which gives the position of the axis on other ranks."""

    axis: Axis
    home: DeviceMesh

    @classmethod
    def of(cls, axis: Axis, mesh: DeviceMesh) -> KnownAxis:
        """Return an axis of ``mesh``, which may be a slice itself."""
        return cls(axis, _torch.root_mesh(mesh))


@dataclass(frozen=True)
class Span:
    """Ranks that differ from this one along some dims of a mesh.

    Attributes:
        mesh: The mesh; None if there is only this rank.
        dims: The dims.
        axis: The ranks as one axis.
    """

    mesh: DeviceMesh | None = None
    dims: Dims = frozenset()
    axis: Axis | None = None

    def dims_of(self, known: KnownAxis | None) -> Dims | None:
        """Return the dims along which an axis lies; None if it is not part of the span."""
        if self.mesh is None or known is None:
            return None
        dims = _dims(self.mesh, known.home, known.axis.ranks)
        return dims if dims is not None and dims <= self.dims else None

    def is_first_along(self, dims: Iterable[int]) -> bool:
        """Return whether this rank is the first of those that differ from it along ``dims``."""
        coord = self.mesh.get_coordinate() if self.mesh is not None else ()
        return all(coord[dim] == 0 for dim in dims)


def span_of(known: Mapping[Ranks, KnownAxis], norm_axes: Sequence[KnownAxis], *, is_sharded: bool) -> Span:
    """Return the ranks of all ``known`` axes and of ``norm_axes``, as far as they lie in one mesh.

    In the first call the ranks compare their axes, and the host waits.

    Args:
        known: Axes of the meshes of this rank's parameters.
        norm_axes: Axes whose ranks have other parameters, and perhaps other axes.
        is_sharded: Whether any parameter is distributed; otherwise only ``norm_axes`` require a reduction.

    Raises:
        ValueError: If ranks that share parameters have different axes.
    """
    if norm_axes:
        mesh = norm_axes[0].home
        key = (dist.group.WORLD, mesh, tuple(each.axis.ranks for each in norm_axes))
        if key not in _spans:
            dims = _union([*known.values(), *norm_axes], mesh)
            _spans[key] = _agreed(mesh, _any_of(dims, mesh, norm_axes), [each.axis for each in norm_axes])
        return _spans[key]
    meshes = dict.fromkeys(each.home for each in known.values())
    if not is_sharded or not meshes:
        return Span()
    mesh = max(meshes, key=lambda mesh: sum(_within(mesh, each) is not None for each in known.values()))
    dims = _union(known.values(), mesh)
    key = (dist.group.WORLD, mesh, dims)
    if key not in _spans:
        _spans[key] = _agreed(mesh, dims, [each.axis for each in known.values()])
    return _spans[key]


def _within(mesh: DeviceMesh, known: KnownAxis) -> Dims | None:
    return _dims(mesh, known.home, known.axis.ranks)


def _union(axes: Iterable[KnownAxis], mesh: DeviceMesh) -> Dims:
    return frozenset().union(*(_within(mesh, each) or () for each in axes))


def _any_of(dims: Dims, mesh: DeviceMesh, norm_axes: Sequence[KnownAxis]) -> Dims:
    """Return the union of the dims of all ranks of ``norm_axes``."""
    flags = torch.tensor([dim in dims for dim in range(mesh.ndim)], dtype=torch.int32, device=mesh.device_type)
    for each in norm_axes:
        pending = each.axis.all_reduce(flags, dist.ReduceOp.MAX, what=_WHAT)
        if pending is not None:
            pending.wait()
    return frozenset(dim for dim, flag in enumerate(flags.tolist()) if flag)


def _agreed(mesh: DeviceMesh, dims: Dims, axes: Sequence[Axis]) -> Span:
    """Return the span along ``dims`` after checking that all of its ranks have the same."""
    text = f"mesh {mesh.mesh_dim_names or ''} of shape {tuple(mesh.shape)}, axes {_name(mesh, dims)}"
    for dim in sorted(dims):
        Axis.of_dim(mesh, dim).check_same(text, what=_WHAT)
    ranks = _ranks_along(mesh, dims)
    if len(ranks) == 1:
        return Span()
    same = next((axis for axis in axes if set(axis.ranks) == set(ranks)), None)
    if same is None:
        group = group_of_ranks(ranks)
        coord = dist.get_process_group_ranks(group).index(dist.get_rank())
        same = Axis(_name(mesh, dims), len(ranks), coord, group, mesh.device_type)
    return Span(mesh, dims, same)


def _name(mesh: DeviceMesh, dims: Dims) -> str:
    names = mesh.mesh_dim_names or [f"mesh axis {dim}" for dim in range(mesh.ndim)]
    return " x ".join(names[dim] for dim in sorted(dims))


def _ranks_along(mesh: DeviceMesh, dims: Dims) -> list[int]:
    index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(mesh.get_coordinate()))
    return mesh.mesh[index].flatten().tolist()


@functools.lru_cache(maxsize=256)
def _dims(mesh: DeviceMesh, home: DeviceMesh, ranks: Ranks) -> Dims | None:
    """Return the dims of ``mesh`` along which an axis of ``home`` lies, the same on every rank; None if there are none.

    Args:
        mesh: A full mesh.
        home: A full mesh, the same or another one.
        ranks: This rank's part of the axis: the ranks that differ along some dims of ``home``.
    """
    if len(ranks) == 1:
        return frozenset()
    if set(home.mesh.flatten().tolist()) != set(mesh.mesh.flatten().tolist()):
        return None  # the position of the axis on other ranks cannot be computed here
    own = _alike(home, torch.tensor([ranks]))
    if own is None:
        return None
    rest = [dim for dim in range(home.ndim) if dim not in own]
    every = home.mesh.permute(*rest, *sorted(own)).reshape(-1, len(ranks))
    return _alike(mesh, every)


def _alike(mesh: DeviceMesh, every: Tensor) -> Dims | None:
    """Return the dims along which each of several lists of ranks (lists, ranks) is all of ``mesh``; None if there are
    none.
    """
    table = torch.zeros(int(mesh.mesh.max()) + 1, mesh.ndim, dtype=torch.int64)
    table[mesh.mesh.flatten().long()] = torch.cartesian_prod(*map(torch.arange, mesh.shape)).view(-1, mesh.ndim)
    coords = table[every.long()]
    varies = (coords != coords[:, :1]).any(dim=1)
    dims = frozenset(varies[0].nonzero().flatten().tolist())
    complete = math.prod(mesh.shape[dim] for dim in dims) == every.shape[1]
    return dims if complete and bool((varies == varies[0]).all()) else None
