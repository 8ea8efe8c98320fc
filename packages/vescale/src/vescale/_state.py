"""The state dict of one process from the parts that ranks hold, and back.

    state_dict        names in the order of one process; full, plain tensors in host memory, equal on every rank
    load_state_dict   such a dict, or parts as `sharded_state_dict` returns them; of either each rank takes its part

Stages first tell each other what they have: names, shapes and dtypes, and values that are no tensors, as JSON. Then one
value at a time is brought together where the stage that has it runs, over data-parallel ranks (ZeRO 3) and
tensor-parallel ones, goes to the other stages by a broadcast, and to host memory. So a device holds one full value.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor import distribute_tensor
from vescale.dtensor.extension import gather_texts, waits_of
from vescale.optim import DDP


def full_state(model: DDP, stages: DeviceMesh, names: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of one process; every rank calls it.

    Args:
        model: this rank's stages, under data parallelism.
        stages: the pipeline's axis.
        names: the names of the full model's state dict, in order.
    """
    own = model.state_dict()
    found: dict[str, Any] = copy.copy(own)  # keeps the versions of modules that torch attaches to it
    found.clear()
    if stages.size() == 1:
        for name in _in_order(own, names):
            found[name] = _whole(own[name])
        return found
    every = _descriptions(own, stages)
    homes = {name: coord for coord in reversed(every) for name in every[coord]}  # the first stage that has it
    for name, home in _in_order(homes, names).items():
        value = _whole(own[name]) if stages.get_local_rank() == home else None
        found[name] = _from_stage(value, every[home][name], stages, home)
    return found


def _in_order(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: found[name] for name in [*names, *found] if name in found}


def _whole(value: Any) -> Any:
    """Return a value in host memory, brought together over the ranks of its stage."""
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().to("cpu", copy=True) if isinstance(full, Tensor) else full


def _descriptions(own: Mapping[str, Any], stages: DeviceMesh) -> dict[int, dict[str, Any]]:
    """Return what each stage has, by its coord and by name: shape and dtype of a tensor, or another value itself.

    Raises:
        TypeError: on every stage, if one has a value that is neither a tensor nor JSON.
    """
    text = json.dumps({name: _described(value) for name, value in own.items()})
    texts = gather_texts(text, stages, what="all-gather of names")
    ranks = enumerate(dist.get_process_group_ranks(stages.get_group()))
    every = {coord: json.loads(texts[rank]) for coord, rank in ranks if rank in texts}  # a dry run has its own alone
    for found in every.values():
        for name, described in found.items():
            if "refused" in described:
                raise TypeError(
                    f"state_dict: expected a tensor or a JSON value for {name!r}, which stages exchange, got "
                    f"{described['refused']}; return one from get_extra_state(), or call sharded_state_dict()"
                )
    return every


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": _name_of(value.dtype)}
    if hasattr(value, "__global_shape__"):  # this rank's part of a parameter
        return {"shape": list(value.__global_shape__), "dtype": _name_of(value.tensor.dtype)}
    try:
        is_same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        is_same = False
    return {"value": value} if is_same else {"refused": type(value).__name__}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _from_stage(value: Any, described: Mapping[str, Any], stages: DeviceMesh, home: int) -> Any:
    """Return the value that one stage has, on all of them."""
    if "value" in described:
        return described["value"]
    group, device = stages.get_group(), stages.device_type
    dtype = getattr(torch, described["dtype"])
    here = (
        torch.empty(described["shape"], dtype=dtype, device=device) if value is None else value.contiguous().to(device)
    )
    waits_of(group).run("broadcast", dist.broadcast, here, dist.get_global_rank(group, home))
    return here.cpu()


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
