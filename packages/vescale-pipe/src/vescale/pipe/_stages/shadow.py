"""Copies of a model that run beside it: without data (of fake tensors), or with the model's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._run.values import from_local_part, meta_of
from .._torch import FakeTensorMode, without_data


def shadow_of(model: nn.Module, mode: FakeTensorMode | None) -> nn.Module:
    """Return a copy of a model without data, or, with None, with parameters that share theirs."""
    memo: dict[int, Any] = {id(p): emptied(p, mode) if mode else _sharing(p) for p in model.parameters()}
    if mode is not None:
        memo |= {id(buffer): emptied(buffer, mode) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def emptied(leaf: Any, mode: FakeTensorMode) -> Any:
    """Return a tensor of the same form without data, on the CPU, and any other object as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    meta = meta_of(leaf)
    shape, stride = meta.local_layout
    with without_data(mode):
        local = torch.empty_strided(shape, stride, dtype=leaf.dtype, device="cpu")
        empty = from_local_part(local, meta, leaf.device_mesh if isinstance(leaf, DTensor) else None)
        return nn.Parameter(empty, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else empty


def _sharing(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach(), parameter.requires_grad)
