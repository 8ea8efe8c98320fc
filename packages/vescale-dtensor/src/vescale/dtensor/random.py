"""Random numbers as on one device.

Random operators on DTensors draw what stock torch draws on one device, as soon as ``vescale.dtensor`` is imported; seed
with :func:`torch.manual_seed`, the same seed on every rank. This module adds what a DTensor cannot know by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _torch
from ._attention import is_fused_without_dropout
from ._place import BatchWindow
from ._random_rules import WINDOWS, handle, is_enabled
from .errors import UnsupportedRandomOperator

__all__ = ["forbidden", "local_batch"]


class _RandomMode(_torch.TorchDispatchMode):
    """Give random operators on plain tensors to a handler; leave everything else alone."""

    def __init__(self, handler: _torch.Handler):
        super().__init__()
        self.handler = handler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _torch.is_composite(func):
            with self:  # only inference mode shows dropout and the like as one operator: look inside
                return func.decompose(*args, **kwargs)
        if not _torch.is_random(func) or not is_enabled() or is_fused_without_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        if any(isinstance(leaf, DTensor) for leaf in _torch.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)  # they reach the same rules by their own dispatch
        return self.handler(func, args, kwargs)


@contextlib.contextmanager
def local_batch(mesh_axis: DeviceMesh) -> Iterator[None]:
    """Declare that dim 0 of every tensor drawn in this context is this rank's part of a global batch.

    Plain data parallelism runs each rank on its local batch. Inside this context a random operator on a tensor of shape
    ``(b, ...)`` (plain, or a DTensor over other axes) returns rows ``[coord * b, (coord + 1) * b)`` of what one device
    draws for shape ``(n * b, ...)``, where ``n`` is the size of the axis; the generator ends as on one device. Contexts
    nest: the inner axis cuts the parts of the outer one.

    Args:
        mesh_axis: 1-D mesh of the data-parallel ranks. All of them must hold local batches of equal size.

    Raises:
        ValueError: the mesh has more than one axis.
        UnsupportedRandomOperator: inside, for a random operator that cannot be sliced, on a tensor without dims, or on
            a DTensor whose own mesh spans the axis.

    Note:
        Activation checkpointing draws again during backward, when this context has been left. Enter it in a module's
        hooks (as ``vescale.optim.DDP`` does) or inside of the checkpointed function.

    Example:
        >>> with random.local_batch(mesh["dp"]):            # doctest: +SKIP
        ...     loss = model(local_input_ids)               # dropout masks are slices of the global batch's
    """
    if mesh_axis.ndim != 1:
        raise ValueError(f"local_batch expects a 1-D mesh axis such as mesh['dp'], got axes {mesh_axis.mesh_dim_names}")
    if mesh_axis.size() == 1:
        yield
        return
    window = BatchWindow(mesh_axis.get_local_rank(), mesh_axis.size(), tuple(mesh_axis.mesh.tolist()))
    outer = WINDOWS.get()
    token = WINDOWS.set((window, *outer))
    try:
        with contextlib.nullcontext() if outer else _RandomMode(handle):  # two modes would cut each draw twice
            yield
    finally:
        WINDOWS.reset(token)


@contextlib.contextmanager
def forbidden(reason: str) -> Iterator[None]:
    """Refuse every random operator on plain tensors in this context.

    For code that runs on local shards whose place in the global tensor is unknown.

    Raises:
        UnsupportedRandomOperator: inside, naming the operator and ``reason``.

    Example:
        >>> with random.forbidden("this region is local"):  # doctest: +SKIP
        ...     torch.rand(3)                               # UnsupportedRandomOperator: ...; this region is local
    """

    def refuse(op: _torch.Op, args: tuple, _kwargs: dict) -> object:
        tensor = next((a for a in args if isinstance(a, Tensor)), None)
        raise UnsupportedRandomOperator.for_tensor(op, tensor, reason)

    with _RandomMode(refuse):
        yield
