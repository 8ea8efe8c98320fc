"""Optimizer state in the form of one process: full tensors, numbered by group as ``torch.optim`` does.

pieces of this rank --all-gather per bucket (ZeRO)--> local tensors --all-gather (DTensor)--> full tensors
full tensors        --each rank takes its rectangles-->                                      pieces of this rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch
from .._gradients.bucket import FlatBucket
from ..ddp import DDP
from .entries import is_scalar
from .pieces import Piece

__all__ = ["NOT_SAVED", "gather_full", "named_state", "numbered_state"]

#: Keys of a group that are not hyperparameters.
NOT_SAVED = ("params", "param_names")


def gather_full(state: Mapping[str, Mapping[str, Any]], pieces: Sequence[Piece], model: object) -> dict[str, dict]:
    """Return, by name of the parameter, the entries of ``state``, with pieces gathered to tensors of the global shape.

    All ranks of the model's axes call it with the same names. Tensors are new; other entries are copies.
    """
    full: dict[str, dict[str, Any]] = {fqn: {} for fqn in state}
    flat = {
        (piece.fqn, name): value.detach()
        for piece in pieces
        for name, value in state.get(piece.fqn, {}).items()
        if isinstance(value, Tensor) and not is_scalar(name, value) and value.shape == piece.tensor.shape
    }
    sharded = isinstance(model, DDP) and model.zero > 0
    local = _gather_pieces(flat, pieces, model) if sharded else flat
    by_fqn = {piece.fqn: piece for piece in pieces}
    for fqn, entries in state.items():
        for name, value in entries.items():
            if (fqn, name) in local:
                full[fqn][name] = _gather_shards(local[fqn, name], by_fqn[fqn].param)
            else:
                full[fqn][name] = value.clone() if isinstance(value, Tensor) else value
    return full


def _gather_pieces(flat: dict[tuple[str, str], Tensor], pieces: Sequence[Piece], model: DDP) -> dict:
    """Return each entry for the full local tensor of its parameter: an all-gather per bucket, name and dtype."""
    slots = model.slots()
    buckets = {slot.bucket.plan.index: slot.bucket for slot in slots.values()}
    by_fqn = {piece.fqn: piece for piece in pieces}
    local = {}
    for _, bucket in sorted(buckets.items()):
        members = {slot.fqn for slot in bucket.plan.slots}
        kinds = sorted({(name, str(value.dtype)) for (fqn, name), value in flat.items() if fqn in members})
        for name, dtype in kinds:
            same = {key: value for key, value in flat.items() if (key[1], str(value.dtype)) == (name, dtype)}
            chosen = {fqn: value for (fqn, _), value in same.items() if fqn in members}
            local |= {(fqn, name): value for fqn, value in _gather_bucket(bucket, chosen, by_fqn).items()}
    return local


def _gather_bucket(bucket: FlatBucket, chosen: dict[str, Tensor], by_fqn: dict[str, Piece]) -> dict[str, Tensor]:
    plan, axis = bucket.plan, bucket.axis
    like = next(iter(chosen.values()))
    first, last = plan.shard(axis.coord)
    shard = torch.zeros(plan.shard_numel, dtype=like.dtype, device=like.device)
    wanted = [slot for slot in plan.slots if slot.fqn in chosen]
    for slot in wanted:
        start = min(max(slot.start + by_fqn[slot.fqn].start - first, 0), last - first)
        shard[start : start + chosen[slot.fqn].numel()] = chosen[slot.fqn].view(-1)
    buffer = shard
    if axis.size > 1:
        buffer = torch.empty(plan.numel, dtype=like.dtype, device=like.device)
        axis.all_gather(buffer, shard, what="optimizer state").wait()
    shapes = {slot.fqn: _torch.local_tensor(by_fqn[slot.fqn].param).shape for slot in wanted}
    return {slot.fqn: buffer[slot.start : slot.start + slot.numel].view(shapes[slot.fqn]) for slot in wanted}


def _gather_shards(local: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return local.clone()
    there = local.contiguous().to(_torch.local_tensor(param).device)  # to the device, for the collective
    return _torch.wrap_like(there, param).full_tensor().to(local.device, copy=True)


def numbered_state(
    state: Mapping[str, Mapping[str, Any]], names: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the state dict of a ``torch.optim`` optimizer: parameters are numbered through all groups.

    Args:
        state: Entries by name.
        names: Names of the parameters of each group.
        groups: The groups, for their hyperparameters.
    """
    numbers: dict[str, int] = {}
    param_groups = []
    for members, group in zip(names, groups, strict=True):
        for fqn in members:
            numbers[fqn] = len(numbers)
        hyperparameters = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k not in NOT_SAVED}
        param_groups.append({**hyperparameters, "params": [numbers[fqn] for fqn in members]})
    return {"state": {numbers[fqn]: entries for fqn, entries in state.items()}, "param_groups": param_groups}


def named_state(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]], every: Sequence[str]) -> dict[str, dict]:
    """Return the entries of a ``torch.optim`` state dict by name.

    Args:
        state_dict: A state dict. Its groups may have ``"param_names"``. Otherwise parameters are in the order of
            ``names``; with one group they may include the frozen ones in their positions.
        names: Names of the trainable parameters of each group, in order.
        every: Names of all parameters, with the frozen ones, in order.

    Raises:
        ValueError: If the numbers of groups or of parameters differ, or names do.
    """
    groups = state_dict["param_groups"]
    if len(groups) != len(names):
        raise ValueError(
            f"the state dict has {len(groups)} param groups, this optimizer has {len(names)}; build it with the same "
            "param_groups"
        )
    found = {}
    for index, (group, expected) in enumerate(zip(groups, names, strict=True)):
        here = group.get("param_names")
        if here is None:
            with_frozen = len(groups) == 1 and len(group["params"]) == len(every) > len(expected)
            here = every if with_frozen else expected
        missing = sorted(set(expected) - set(here))
        if len(here) != len(group["params"]) or missing:
            raise ValueError(
                f"param group {index} of the state dict has {len(group['params'])} parameters, expected "
                f"{len(expected)}{f'; missing {missing}' if missing else ''}: it is of another model or grouping"
            )
        numbered = zip(here, group["params"], strict=True)
        found |= {fqn: state_dict["state"][n] for fqn, n in numbered if n in state_dict["state"] and fqn in expected}
    return found
