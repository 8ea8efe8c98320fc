"""Record every collective that is issued while a context is open.

A dispatch mode intercepts all of them: functional collectives (DTensor) and those of ``torch.distributed`` (DDP and
FSDP included), forward and backward. It passes operators on DTensors through, and records the collectives that they
issue. The rest comes from the call stack: the line of the user's program, the mesh, and the operator that redistributes
its operands, if the collective is implicit.

Nothing is installed outside the context. Collectives inside a graph of ``torch.compile`` are not recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._checked import checked
from .._torch import debugging
from .._torch.patches import Op
from ._module_path import ModulePath
from ._records import CommLog, CommRecord
from ._source import call_site
from ._text import axis_names

__all__ = ["comm_log"]

# torch's name without leading and trailing underscores -> our name; other names are unchanged
OPERATORS = {
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "batch_p2p_ops": "send/recv",
    "irecv": "recv",
    "isend": "send",
    "monitored_barrier": "barrier",
    "recv_any_source": "recv",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
}


@checked
@contextlib.contextmanager
def comm_log(model: nn.Module | None = None, *, mesh: DeviceMesh | None = None) -> Iterator[CommLog]:
    """Record every collective of this rank inside the context, in the forward and in the backward pass.

    It does not communicate and changes no result. The log stays readable after the context.

    Args:
        model: the module whose submodules are named in the records; it must be called inside the context.
        mesh: a mesh whose axes are named in the records, in addition to the meshes of DTensors.

    Returns:
        A context that gives a :class:`CommLog`: a sequence of records with tables over them.

    Example:
        >>> with debug.comm_log(model) as log:                                      # doctest: +SKIP
        ...     model(x).sum().backward()
        >>> print(log)                          # by operator, axis and module      # doctest: +SKIP
        >>> print(log.only(implicit=True).summary(by=("cause", "line")))            # doctest: +SKIP
    """
    log, axes = CommLog(), _Axes()
    parameters = model.parameters() if model is not None else ()
    for known in (mesh, *(p.device_mesh for p in parameters if isinstance(p, DTensor))):
        axes.learn(known)
    with ModulePath(model) as path, _Recorder(log, axes, path):
        yield log


class _Axes:
    """The names of process groups, from the meshes used so far."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._met: set[int] = set()

    def learn(self, mesh: DeviceMesh | None) -> None:
        """Remember the groups of a mesh."""
        if mesh is None or id(mesh) in self._met or mesh.get_coordinate() is None:
            return
        self._met.add(id(mesh))
        for position, name in enumerate(axis_names(mesh)):
            self._names.setdefault(mesh.get_group(position).group_name, name)

    def name(self, group: dist.ProcessGroup | None) -> str:
        """Return the axis of a group, ``"world"``, or its ranks."""
        if group is None:
            return ""
        if (known := self._names.get(group.group_name)) is not None:
            return known
        if group.group_desc.startswith("mesh_"):  # as init_device_mesh describes the groups that it makes
            return group.group_desc.removeprefix("mesh_")
        if group.group_name == dist.group.WORLD.group_name:
            return "world"
        return "ranks " + " ".join(map(str, dist.get_process_group_ranks(group)))


class _Recorder(debugging.TorchDispatchMode):
    """Add a record to ``log`` for every collective that is dispatched."""

    def __init__(self, log: CommLog, axes: _Axes, path: ModulePath):
        super().__init__()
        self.log, self.axes, self.path = log, axes, path

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            for leaf in args:
                if isinstance(leaf, DTensor):
                    self.axes.learn(leaf.device_mesh)
            return NotImplemented  # DTensor runs the operator, and this mode gets its collectives
        result = op(*args, **kwargs)
        if debugging.is_visible_collective(op):
            self._record(op, args, kwargs, result)
        return result

    def _record(self, op: Op, args: tuple, kwargs: dict, result: object) -> None:
        inside, outside = debugging.tensors_in(op, args, kwargs, result)
        site = call_site()
        self.axes.learn(site.mesh)
        group = debugging.group_of(op, args, kwargs)
        module, phase = self.path.now()
        name = operator_name(op)
        if name == "barrier":  # its tensor is only there to be dispatched
            inside, outside = [], []
        first = next(iter((*inside, *outside)), None)
        record = CommRecord(
            operator=name,
            num_bytes=max(map(_num_bytes, (inside, outside))),
            dtype=None if first is None else first.dtype,
            shape=() if first is None else tuple(first.shape),
            num_tensors=len(inside),
            axis=self.axes.name(group),
            group_size=group.size() if group is not None else 0,
            module=module,
            phase=phase,
            source=site.line,
            implicit=bool(site.cause),
            cause=site.cause,
        )
        self.log.add(record)


def operator_name(op: Op) -> str:
    """Return the name of a collective, the same for every form in which torch has it."""
    name = debugging.base_name(op).strip("_")
    return OPERATORS.get(name, name)


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
