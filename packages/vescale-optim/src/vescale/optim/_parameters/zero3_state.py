"""State dicts of a module whose parameters are sharded (ZeRO 3), without gathering them.

Each parameter is shown as a `StatePiece`: a live view of this rank's part, with the rectangles of the global tensor
that it holds, which is what checkpoints store and reshard. Names, buffers and extra state are those of the module's own
``state_dict``. Inside ``unsharded`` a state dict is that of the plain module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch
from .._state.pieces import Piece, StatePiece
from .._state.ragged import Spread

__all__ = ["load_pieces", "state_of_pieces", "with_metadata"]

Parts = dict[nn.Parameter, tuple[tuple[int, int], Tensor]]
"""By parameter: the range of its flat local tensor that this rank keeps, and that part."""

Spreads = dict[nn.Parameter, Spread]
"""By parameter: how the ranks share it."""


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
    """Load a state dict whose values of parameters are pieces, as above, or whole.

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
    found = module.load_state_dict(with_metadata(rest, state_dict), strict=False)
    missing = [key for key in found.missing_keys if key not in state_dict]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"the state dict is not that of {type(module).__name__}: missing {missing}, unexpected "
            f"{found.unexpected_keys}; pass strict=False to load what fits"
        )
    return _torch.IncompatibleKeys(missing, found.unexpected_keys)


def with_metadata(values: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the versions of modules that ``like`` has, if it is a state dict that has them."""
    if not hasattr(like, "_metadata"):
        return values

    class _State(dict):
        _metadata = like._metadata

    return _State(values)


def _piece(fqn: str, param: nn.Parameter, parts: Parts, spreads: Spreads) -> StatePiece:
    (start, stop), part = parts[param]
    return StatePiece(Piece(fqn, param, part, start, stop, spread=spreads[param]), part)


def _load(piece: StatePiece, value: object) -> None:
    if isinstance(value, StatePiece) and value.tensor.data_ptr() == piece.tensor.data_ptr():
        return  # our own, filled in place
    piece.load(value)
