"""Run an operator on whole operands, on every rank.

This is right for every deterministic operator, whatever it computes and whatever its gradient is: all ranks run what
one device runs, on equal data, so they also fail alike. It costs the gathering and the memory of whole operands; it is
an implicit redistribution, which :func:`vescale.dtensor.strict` refuses and :func:`vescale.dtensor.debug.comm_log`
shows.

    operands   any placement -> Replicate
    results    Replicate
    written    the whole tensor is written to, then every rank keeps its part in the placements that the tensor has

A view of a gathered tensor is a copy: writing to it does not reach the sharded tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .. import _torch
from ..errors import UnsupportedOperator
from ._operands import check_operands, dtensors, mesh_of, written_arguments

__all__ = ["gather", "gather_axes"]


def gather(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run ``op`` on whole operands; results are replicated, and what it writes keeps its placements.

    Raises:
        UnsupportedOperator: operands on several meshes, a partial tensor that is written to, an operator that changes a
            tensor's shape in place, a result that is not a dense tensor.
    """
    mesh = mesh_of(op, args, kwargs)
    check_operands(op, args, kwargs)
    whole: dict[int, Tensor] = {}

    def bring(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in whole:
            whole[id(tensor)] = _torch.redistributed(tensor, [Replicate()] * mesh.ndim, for_op=op)
        return whole[id(tensor)]

    results = op(*map_tensors(bring, args), **map_tensors(bring, kwargs))
    returned: dict[int, DTensor] = {}
    for tensor in written_arguments(op, args, kwargs):
        if isinstance(tensor, DTensor):
            _write_back(op, tensor, whole[id(tensor)])
            returned[id(whole[id(tensor)])] = tensor

    def give(result: Tensor) -> DTensor:
        same = returned.get(id(result))
        return _wrap(op, result, mesh, args, kwargs) if same is None else same

    return map_tensors(give, results)


def gather_axes(op: _torch.Op, tensor: DTensor, axes: tuple[int, ...]) -> DTensor:
    """Return ``tensor`` replicated along some mesh axes, for use by ``op``; outside autograd."""
    placements = tuple(Replicate() if axis in axes else p for axis, p in enumerate(tensor.placements))
    return _torch.wrap(_torch.redistributed(tensor, placements, for_op=op), tensor.device_mesh, placements, tensor)


def map_tensors(function: Callable[[Tensor], object], tree: object) -> object:
    """Apply ``function`` to every tensor in a tree."""
    return _torch.tree_map_only(Tensor, function, tree)


def _write_back(op: _torch.Op, tensor: DTensor, whole: Tensor) -> None:
    local = _torch.local_tensor(tensor)
    if whole is local:
        return
    if whole.shape != tensor.shape:
        raise UnsupportedOperator.for_operands(
            op, (tensor,), f"it changes the shape to {tuple(whole.shape)} in place: use the form that returns a result"
        )
    local.copy_(_torch.part_of(whole, tensor))


def _wrap(op: _torch.Op, result: Tensor, mesh: DeviceMesh, args: tuple, kwargs: dict) -> DTensor:
    if result.layout is not torch.strided:
        raise UnsupportedOperator.for_operands(
            op, tuple(dtensors(args, kwargs)), f"its result is {result.layout}: call it on full_tensor()"
        )
    return _torch.wrap(result, mesh, [Replicate()] * mesh.ndim, result)
