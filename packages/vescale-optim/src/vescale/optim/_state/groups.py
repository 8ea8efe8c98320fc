"""From an optimizer's class and the user's groups to an optimizer of pieces, or an error that says what is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._muon.matrices import PieceMatrices
from ..muon import Muon
from .pieces import Piece

__all__ = ["build_optimizer", "check_class", "group_pieces"]

#: Optimizers of torch whose update of an element needs others (rows, matrices, the whole model).
NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "SparseAdam"})

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def check_class(optimizer_class: Any) -> None:
    """Raise TypeError or ValueError if ranks cannot step parts of parameters by an optimizer of this class."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer_class_or_instance must be a class such as torch.optim.AdamW, or an optimizer, "
            f"got {optimizer_class!r}"
        )
    muon = next((base for base in optimizer_class.__mro__ if base in (torch.optim.Muon, Muon)), None)
    if muon not in (None, optimizer_class):
        raise ValueError(
            f"{optimizer_class.__name__} derives from Muon, whose step needs whole matrices, which ranks hold in "
            "parts; pass vescale.optim.Muon itself"
        )
    refused = next((base.__name__ for base in optimizer_class.__mro__ if base.__name__ in NOT_ELEMENTWISE), None)
    if refused is not None:
        raise ValueError(
            f"{refused} is not element-wise: its update of an element depends on other elements, which may be on other "
            f"ranks. Use an element-wise optimizer such as torch.optim.AdamW, or torch.optim.{refused} itself with "
            "DDP(zero=0) and without tensor parallelism"
        )


def build_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[tuple[dict[str, Any], list[Piece]]],
    kwargs: dict[str, Any],
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, Callable[[list[dict]], torch.optim.Optimizer]]:
    """Return the optimizer of the pieces, and what makes another one with the same settings."""
    if optimizer_class not in (torch.optim.Muon, Muon):
        make = functools.partial(optimizer_class, **kwargs)
        return make([{**h, "params": [piece.tensor for piece in pieces]} for h, pieces in groups]), make
    pieces = [piece for _, members in groups for piece in members]
    if optimizer_class is torch.optim.Muon:
        others = {piece.fqn: tuple(piece.param.shape) for piece in pieces if piece.param.ndim != 2}
        if others:
            raise ValueError(
                f"torch.optim.Muon takes matrices only, and the model has {others}; use vescale.optim.Muon, which "
                "steps all other parameters by AdamW"
            )
    named = [{**h, "params": [(piece.fqn, piece.tensor) for piece in members]} for h, members in groups]
    base = Muon(named, **kwargs, matrices=PieceMatrices(pieces, model))
    _refuse_convolutions(base, pieces, model)
    settings = {key: value for key, value in kwargs.items() if key != "adamw"}  # its entries fit no dummy
    return base, functools.partial(Muon, **settings)


def _refuse_convolutions(optimizer: Muon, pieces: Sequence[Piece], model: nn.Module) -> None:
    """Raise ValueError if Muon would take a convolution for a stack of matrices."""
    by_matrix = {t for group in optimizer.param_groups if group["method"] == "muon" for t in group["params"]}
    weights = {p for module in model.modules() if isinstance(module, _CONVOLUTIONS) for p in module.parameters(False)}
    found = [piece.fqn for piece in pieces if piece.tensor in by_matrix and piece.param in weights]
    if found:
        raise ValueError(
            f"the weights of convolutions {found} have three dims and look like stacks of matrices, which they are "
            "not; list their names in adamw=[...]"
        )


def group_pieces(
    pieces: Sequence[Piece], param_groups: Iterable[dict[str, Any]] | None
) -> list[tuple[dict[str, Any], list[Piece]]]:
    """Return each group's hyperparameters and pieces.

    Raises:
        ValueError: If a trainable parameter is in no group or in several, or a group has one that is not the model's.
    """
    if param_groups is None:
        return [({}, list(pieces))]
    by_param = {piece.param: piece for piece in pieces}
    groups, seen = [], set()
    for index, group in enumerate(param_groups):
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        params = [p[1] if isinstance(p, tuple) else p for p in params]
        params = [p for p in params if p.requires_grad]
        foreign = [tuple(p.shape) for p in params if p not in by_param]
        if foreign:
            raise ValueError(f"param group {index} has parameters that are not the model's, of shapes {foreign}")
        twice = [by_param[p].fqn for p in params if p in seen] + _duplicates([by_param[p].fqn for p in params])
        if twice:
            raise ValueError(f"parameters are in param groups more than once: {twice}")
        seen.update(params)
        groups.append(({k: v for k, v in group.items() if k != "params"}, [by_param[p] for p in params]))
    left = [piece.fqn for piece in pieces if piece.param not in seen]
    if left:
        raise ValueError(
            f"trainable parameters are in no param group: {left}; list them, or freeze them before wrapping"
        )
    return groups


def _duplicates(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
