"""The entries of an optimizer's state: their kinds, their initial values, and their form in state dicts.

    entry                             in the optimizer                   in a state dict
    one value per element (moments)   tensor of the piece's shape        `StatePiece`: rectangles of the global tensor
    one value per parameter (step)    0-dim tensor                       the same tensor
    hyperparameter of a group         number, bool, tuple, 0-dim tensor  JSON value

Note: state before the first step
    Optimizers allocate state in their first step. A checkpoint that loads in place needs names, dtypes and shapes
    earlier. So an optimizer of the same class, with the same hyperparameters, takes one step on a dummy parameter of
    zeros with a gradient of zeros. The state of an element is then its initial value (zeros, or Adagrad's initial
    value), and the step count is reset to 0.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._param_groups import is_alike
from .pieces import Piece, StatePiece

__all__ = [
    "MASTER",
    "StateTemplate",
    "check_loaded",
    "check_names",
    "elementwise_names",
    "expose",
    "from_json",
    "is_elementwise",
    "is_scalar",
    "probe_state",
    "take",
    "to_json",
]

#: Name of master weights in a state dict.
MASTER = "master_weight"

#: State that optimizers of torch keep once per parameter, and its value before the first step.
_SCALARS: dict[str, Callable[[dict], float]] = {
    "step": lambda _group: 0.0,
    "mu_product": lambda _group: 1.0,  # NAdam
    "mu": lambda _group: 1.0,  # ASGD
    "eta": lambda group: float(group["lr"]),  # ASGD
}


def is_scalar(name: str, value: Any) -> bool:
    """Return whether a state entry is one number per parameter."""
    return isinstance(value, Tensor) and value.ndim == 0 and name in _SCALARS


def is_elementwise(name: str, value: Any, tensor: Tensor) -> bool:
    """Return whether a state entry of ``tensor``, which the optimizer updates, has a value per element."""
    return isinstance(value, Tensor) and not is_scalar(name, value) and value.shape == tensor.shape


@dataclass(frozen=True)
class StateTemplate:
    """The initial state of a parameter.

    Attributes:
        elementwise: By name: the initial value of every element, as a 0-dim tensor of the state's dtype and device.
        scalars: By name: per-parameter values, such as ``step``.
    """

    elementwise: dict[str, Tensor]
    scalars: dict[str, Tensor]

    @property
    def names(self) -> set[str]:
        """Names of all entries."""
        return {*self.elementwise, *self.scalars}

    def fresh(self, like: Tensor) -> dict[str, Tensor]:
        """Return new state for a parameter of the shape of ``like``."""
        state = {name: value.clone() for name, value in self.scalars.items()}
        for name, value in self.elementwise.items():
            state[name] = value.expand(like.shape).clone(memory_format=torch.contiguous_format)
        return state


def probe_state(
    make_optimizer: Callable[[list[dict]], torch.optim.Optimizer], group: dict, like: Tensor
) -> StateTemplate:
    """Return the state that the optimizer keeps for a parameter of the dtype and device of ``like`` in ``group``.

    Raises:
        NotImplementedError: If it keeps a per-parameter value with an unknown initial value.
    """
    optimizer, dummy = _step_dummy(make_optimizer, group, like)
    elementwise, scalars = {}, {}
    for name, value in optimizer.state[dummy].items():
        if value is None:
            continue
        if isinstance(value, Tensor) and value.shape == dummy.shape:
            elementwise[name] = value.flatten()[0].clone()
        elif is_scalar(name, value):
            scalars[name] = torch.full_like(value, _SCALARS[name](group))
        else:
            raise NotImplementedError(
                f"{type(optimizer).__name__} keeps {name!r} per parameter, and its initial value is unknown; take the "
                "state dict after the first step, or use AdamW, Adam, SGD, Adagrad or RMSprop"
            )
    return StateTemplate(elementwise, scalars)


def elementwise_names(
    make_optimizer: Callable[[list[dict]], torch.optim.Optimizer], group: dict, like: Tensor
) -> set[str]:
    """Return the names of the state that the optimizer keeps per element of a parameter like ``like`` in ``group``."""
    optimizer, dummy = _step_dummy(make_optimizer, group, like)
    return {name for name, value in optimizer.state[dummy].items() if is_elementwise(name, value, dummy)}


def _step_dummy(
    make_optimizer: Callable[[list[dict]], torch.optim.Optimizer], group: dict, like: Tensor
) -> tuple[torch.optim.Optimizer, Tensor]:
    # Two dims: Muon needs a matrix, and for element-wise state any shape works.
    dummy = nn.Parameter(torch.zeros(1, 2, dtype=like.dtype, device=like.device))
    dummy.grad = torch.zeros_like(dummy)
    hyperparameters = {key: _copy(value) for key, value in group.items() if key != "params"}
    optimizer = make_optimizer([{**hyperparameters, "params": [dummy]}])
    optimizer.step()
    return optimizer, dummy


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------------------------------------- in state dicts


def check_names(came: Iterable[str], expected: set[str], what: str) -> None:
    """Raise ValueError unless the names of a state dict are the expected ones; ``what`` names them."""
    missing, unexpected = sorted(expected - set(came)), sorted(set(came) - expected)
    if missing or unexpected:
        raise ValueError(
            f"the state dict is of another model or optimizer: {what} missing {missing}, unexpected {unexpected}; load "
            "the state of the same optimizer class and of the same parameters"
        )


def expose(piece: Piece, name: str, value: Any) -> Any:
    """Return the state dict's form of a state entry: a tensor as large as the piece becomes a `StatePiece`."""
    return StatePiece(piece, value) if is_elementwise(name, value, piece.tensor) else value


def take(entry: StatePiece | Tensor, value: Any) -> Tensor:
    """Return this rank's state tensor with the loaded value: the one that the state dict exposed, or a copy into it."""
    if isinstance(entry, StatePiece):
        ours = isinstance(value, StatePiece) and value.piece is entry.piece
        if ours and value.tensor.dtype == entry.tensor.dtype:
            return value.tensor
        entry.load(value)
        return entry.tensor
    if value is entry:
        return entry
    try:
        return entry.copy_(torch.as_tensor(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"expected a number or a tensor of shape {tuple(entry.shape)} as state, got {reprlib.repr(value)}; load "
            "what state_dict() returned"
        ) from error


def to_json(key: str, value: Any) -> Any:
    """Return a hyperparameter as a JSON value.

    Raises:
        TypeError: If it is none.
    """
    value = value.item() if isinstance(value, Tensor) else value
    try:
        json.dumps(value)
    except TypeError:
        raise TypeError(
            f"hyperparameter {key!r} is not a JSON value: {value!r}; use a number, a string or a list"
        ) from None
    return value


def check_loaded(key: str, value: Any, *, like: Any) -> None:
    """Check that a loaded hyperparameter can take the place of the current one.

    Raises:
        ValueError: If it is of another type, or NaN.
    """
    if not is_alike(value, like):
        raise ValueError(
            f"expected a hyperparameter {key!r} such as {like!r} in param_groups of state_dict, got {value!r}; pass "
            "what state_dict() returned"
        )


def from_json(value: Any, *, like: Any) -> Any:
    """Return a loaded hyperparameter with the type of the current one."""
    if isinstance(like, Tensor):
        return like.fill_(value)
    return tuple(value) if isinstance(value, list) and isinstance(like, tuple) else value
