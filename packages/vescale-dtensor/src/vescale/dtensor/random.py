"""Random numbers as on one device.

Random operators on DTensors draw what stock torch draws on one device, as soon as ``vescale.dtensor`` is imported; seed
with :func:`torch.manual_seed`, the same seed on every rank. This module adds what a DTensor cannot know by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch
from ._place import BatchWindow
from ._random_rules import WINDOWS, handlers
from ._register import is_enabled
from .errors import UnsupportedRandomOperator

__all__ = ["forbidden", "local_batch"]


class _RandomMode(_torch.TorchDispatchMode):
    """Route random operators on plain tensors to the rules of DTensors; leave everything else alone."""

    def __init__(self, table: dict):
        super().__init__()
        self.table = table

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = self.table.get(func)
        if handler is None or any(isinstance(a, DTensor) for a in _torch.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)  # DTensors reach the same rules by their own dispatch
        return handler(func, args, kwargs)


@contextlib.contextmanager
def local_batch(mesh_axis: DeviceMesh) -> Iterator[None]:
    """Declare that dim 0 of every tensor drawn in this context is this rank's part of a global batch.

    Plain data parallelism runs each rank on its local batch. Inside this context a random operator on a tensor of shape
    ``(b, ...)`` (plain, or a DTensor over other axes) returns rows ``[coord * b, (coord + 1) * b)`` of what one device
    draws for shape ``(n * b, ...)``, where ``n`` is the size of the axis; the generator ends as on one device.

    Args:
        mesh_axis: 1-D mesh of the data-parallel ranks. All of them must hold local batches of equal size.

    Raises:
        ValueError: the mesh has more than one axis.
        UnsupportedRandomOperator: inside, for a random operator that cannot be sliced, or on a tensor without dims.

    Example:
        >>> with random.local_batch(mesh["dp"]):            # doctest: +SKIP
        ...     loss = model(local_input_ids)               # dropout masks are slices of the global batch's
    """
    if mesh_axis.ndim != 1:
        raise ValueError(f"local_batch expects a 1-D mesh axis such as mesh['dp'], got axes {mesh_axis.mesh_dim_names}")
    if mesh_axis.size() == 1 or not is_enabled():
        yield
        return
    token = WINDOWS.set((BatchWindow(mesh_axis.get_local_rank(), mesh_axis.size()), *WINDOWS.get()))
    try:
        with _RandomMode(handlers()):
            yield
    finally:
        WINDOWS.reset(token)


@contextlib.contextmanager
def forbidden(reason: str) -> Iterator[None]:
    """Refuse every random operator on plain tensors in this context.

    For code that runs on local shards whose place in the global tensor is unknown.

    Raises:
        UnsupportedRandomOperator: inside, naming the operator and ``reason``.
    """

    def refuse(op: object, args: tuple, _kwargs: dict) -> object:
        tensor = next((a for a in args if isinstance(a, Tensor)), None)
        raise UnsupportedRandomOperator.for_tensor(op, tensor, reason)

    with _RandomMode(dict.fromkeys(handlers(), refuse)):
        yield
