"""State dicts and DTensors of a module's parameters without a gather: the part that each rank owns.

    state_of_pieces      ZeRO 3: the module's state dict, with a `StatePiece` for each sharded parameter
    load_pieces          the way back: pieces or full tensors into this rank's shards
    full_values          ZeRO 0 to 2: a state dict with DTensors over the data-parallel axis, as a plain module loads it
    sharded_parameters   every parameter as a DTensor over the data-parallel axis

A `StatePiece` is a live view of this rank's part, with the boxes of the global tensor that it holds. Checkpoints store
and reshard these boxes. Names, buffers and extra state are those of the module's own ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .pieces import Piece, StatePiece
from .spread import Spread

__all__ = ["full_values", "load_pieces", "sharded_parameters", "state_of_pieces"]

Parts = dict[nn.Parameter, tuple[tuple[int, int], Tensor]]
"""By parameter: the range of its flat local tensor that this rank keeps, and the tensor of that range."""

Spreads = dict[nn.Parameter, Spread]
"""By parameter: how it is distributed over the ranks."""


def state_of_pieces(module: nn.Module, parts: Parts, spreads: Spreads, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the module's state dict with a `StatePiece` for each sharded parameter."""
    state = module.state_dict(*args, **{**kwargs, "keep_vars": True})
    for key, value in state.items():
        if isinstance(value, nn.Parameter) and value in parts:
            state[key] = _piece(key, value, parts, spreads)
        elif isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def load_pieces(
    module: nn.Module, parts: Parts, spreads: Spreads, state_dict: dict[str, Any], *, strict: bool
) -> _torch.IncompatibleKeys:
    """Load a state dict whose values of parameters are pieces, as above, or full tensors.

    Raises:
        ValueError: If a value has another shape or, for a piece, other rectangles.
        RuntimeError: If ``strict``, for missing and unexpected names.
    """
    ours = {
        key: value
        for key, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, nn.Parameter) and value in parts
    }
    with torch.no_grad():
        for key, param in ours.items():
            if key in state_dict:
                _load(_piece(key, param, parts, spreads), state_dict[key])
    rest = {key: value for key, value in state_dict.items() if key not in ours}
    found = module.load_state_dict(_torch.with_metadata(rest, state_dict), strict=False)
    missing = [key for key in found.missing_keys if key not in state_dict]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"the state dict is not that of {type(module).__name__}: missing {missing}, unexpected "
            f"{found.unexpected_keys}; pass strict=False to load what fits"
        )
    return _torch.IncompatibleKeys(missing, found.unexpected_keys)


def _piece(fqn: str, param: nn.Parameter, parts: Parts, spreads: Spreads) -> StatePiece:
    (start, stop), part = parts[param]
    return StatePiece(Piece(fqn, param, part, start, stop, spread=spreads[param]), part)


def _load(piece: StatePiece, value: object) -> None:
    if isinstance(value, StatePiece) and value.tensor.data_ptr() == piece.tensor.data_ptr():
        return  # this rank's own piece, filled in place
    piece.load(value)


def full_values(
    state_dict: Mapping[str, object], params: Mapping[str, Tensor], spreads: Mapping[Tensor, Spread]
) -> dict[str, object]:
    """Return a state dict in which full tensors replace DTensors over the data-parallel mesh; ranks gather.

    Args:
        state_dict: Names and values.
        params: The module's parameters, by all of their names.
        spreads: The result of `spreads_of`.
    """
    values = dict(state_dict)
    for name, value in state_dict.items():
        param = params.get(name)
        spread = spreads.get(param) if param is not None else None
        if spread is not None and isinstance(value, DTensor):
            values[name] = _full(value, param, spread)
    return values


def _full(value: DTensor, param: Tensor, spread: Spread) -> Tensor:
    if not isinstance(param, DTensor):
        return value.full_tensor()
    if value.device_mesh == param.device_mesh or value.shape != param.shape:
        return value
    mesh, placements = spread.joined(param, {})
    if value.device_mesh != mesh:
        return value
    return _torch.wrap_like(_torch.local_tensor(value.redistribute(placements=placements)), param)


def sharded_parameters(
    params: Mapping[str, nn.Parameter],
    parts: Mapping[nn.Parameter, Tensor],
    spreads: Mapping[nn.Parameter, Spread],
    *,
    full: bool,
) -> dict[str, DTensor]:
    """Return this rank's part of each parameter as a DTensor, by name.

    Args:
        params: All parameters, by name.
        parts: Their flat parts; parameters without one are full on every rank.
        spreads: The result of `spreads_of`.
        full: Whether the parameters themselves are full on every rank, too: one without dims keeps its shape.
    """
    found = {}
    for fqn, param in params.items():
        part, spread = parts.get(param), spreads[param]
        if part is None or (full and param.ndim == 0):
            part, spread = _torch.local_tensor(param), replace(spread, place=None)
        found[fqn] = spread.to_dtensor(part, param)
    return found
