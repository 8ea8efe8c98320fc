"""The state dict of one process from the parts that ranks hold, and back.

    state_dict        names in the order of one process; full, plain tensors in host memory, equal on every rank
    load_state_dict   such a dict, or parts as `sharded_state_dict` returns them; of either each rank takes its part

A value is brought together where the stage that has it runs, over data-parallel ranks (ZeRO 3) and tensor-parallel
ones, and goes to the other stages by a broadcast, one value at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import distribute_tensor
from vescale.dtensor.extension import waits_of
from vescale.optim import DDP


def full_state(model: DDP, stages: DeviceMesh, names: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of one process; every rank calls it.

    Args:
        model: this rank's stages, under data parallelism.
        stages: the pipeline's axis.
        names: the names of the full model's state dict, in order.
    """
    with model.unsharded() if model.zero == 3 else contextlib.nullcontext():
        own = model.state_dict()
        found: dict[str, Any] = copy.copy(own)  # keeps the versions of modules that torch attaches to it
        found.clear()
        for name, home in _homes(own, stages, names).items():
            value = _whole(own[name]) if stages.get_local_rank() == home else None
            found[name] = _from_stage(value, stages, home)
    return found


def _in_order(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: found[name] for name in [*names, *found] if name in found}


def _whole(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().to("cpu", copy=True)


def _homes(own: Mapping[str, Any], stages: DeviceMesh, names: Sequence[str]) -> dict[str, int]:
    """Return the coord of the first stage that has each name, in the order of one process."""
    every: list[Any] = [list(own)] * stages.size()
    if stages.size() > 1:
        group = stages.get_group()
        gather = functools.partial(dist.all_gather_object, every, list(own), group)
        waits_of(group).call("all-gather of names", gather)
    homes: dict[str, int] = {}
    for coord, theirs in enumerate(every):
        for name in theirs:
            homes.setdefault(name, coord)
    return _in_order(homes, names)


def _from_stage(value: Any, stages: DeviceMesh, home: int) -> Any:
    """Return the value that one stage has, on all of them."""
    if stages.size() == 1:
        return value
    group, is_here = stages.get_group(), stages.get_local_rank() == home
    source = dist.get_global_rank(group, home)
    is_tensor = isinstance(value, Tensor)
    message: list[Any] = [(value.shape, value.dtype) if is_tensor else value, is_tensor]
    waits_of(group).call("broadcast", functools.partial(dist.broadcast_object_list, message, source, group))
    described, is_tensor = message
    if not is_tensor:
        return described
    shape, dtype = described
    on_device = value.to(stages.device_type) if is_here else torch.empty(shape, dtype=dtype, device=stages.device_type)
    waits_of(group).run("broadcast", dist.broadcast, on_device, source)
    return on_device.cpu()


def load_state(model: DDP, state: Mapping[str, Any], names: Sequence[str], *, strict: bool) -> Any:
    """Load a state dict of one process, or parts of it, and return the names that are missing and unexpected.

    Raises:
        RuntimeError: ``strict``, and the names are not those of the full model.
    """
    own = model.module.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own and name not in names]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"expected the names of {type(model.module).__name__} in the state dict, got others: missing {missing}, "
            f"unexpected {unexpected}; pass strict=False to load what fits"
        )
    here: Any = copy.copy(state)  # keeps the versions of modules that torch attaches to it
    for name in [*state]:
        if name in own:
            here[name] = _like(own[name], state[name], is_piece=model.zero == 3)
        else:
            del here[name]
    found = model.load_state_dict(here, strict=False)
    return type(found)(missing, unexpected)


def _like(own: Any, value: Any, *, is_piece: bool) -> Any:
    """Return a full tensor as this rank's part where the module has a DTensor, which takes no plain tensor."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_plain or not isinstance(own, DTensor) or value.shape != own.shape:
        return value  # of another shape: the module refuses it, by name
    if is_piece and isinstance(own, nn.Parameter):
        return value  # of which each rank takes its boxes
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def state_names(model: nn.Module) -> list[str]:
    """Return the names in the state dict of a model."""
    return list(model.state_dict(keep_vars=True))
