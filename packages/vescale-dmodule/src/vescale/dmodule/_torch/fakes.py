"""Runs without data: fake tensors, modes that record operators on them, meshes of ranks that do not exist."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "READS_VALUES",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "argument_names",
    "fake_only",
    "fake_tensors",
    "ghost_mesh",
    "ghost_world",
    "quiet_fakes",
]

READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operators whose result depends on values that fake tensors do not have."""


def fake_tensors() -> FakeTensorMode:
    """Return a mode of fake tensors; tensors with data may take part as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Let torch log no operator that fails on fake tensors."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was_off, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_off


@contextlib.contextmanager
def fake_only(mode: FakeTensorMode) -> Iterator[None]:
    """Make all new tensors fake ones."""
    with quiet_fakes(), mode:
        yield


_numbers = itertools.count()  # a name of a group is used once


def ghost_mesh(device_type: str, axis: str, *, size: int = 2, coord: int = 1) -> DeviceMesh:
    """Return a mesh of ranks of which this process is one, and the others do not exist.

    Its group has the backend "fake": collectives carry no data. A process makes it alone.

    Args:
        device_type: of the mesh.
        axis: name of its axis.
        size: number of its ranks.
        coord: of this process.
    """
    own, world = dist.get_rank(), dist.get_world_size()
    # each as far from this one as another world, so that the other axes of a mesh are next to it there, too
    ranks = [own if number == coord else own + world * (1 + number) for number in range(size)]
    name = f"vescale.dmodule:ghost:{next(_numbers)}"
    group, _ = distributed_c10d._new_process_group_helper(
        size, coord, ranks, "fake", dist.HashStore(), name, timeout=distributed_c10d.default_pg_timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(axis,))


@contextlib.contextmanager
def ghost_world(size: int) -> Iterator[None]:
    """Have a process group for ghost meshes: the one that exists, or else one of ranks that do not exist."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def argument_names(operator: Any) -> list[str]:
    """Return the names of the arguments of an operator of aten."""
    return [argument.name for argument in operator._schema.arguments]
