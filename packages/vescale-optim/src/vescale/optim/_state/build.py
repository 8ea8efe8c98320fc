"""Construction of a distributed optimizer: from a model, a class or an instance, and groups to an optimizer of pieces.

    take_apart        an optimizer instance -> its class, constructor arguments, groups and state
    check_class       reject classes whose update of an element needs other elements
    cut_pieces        one `Piece` per trainable parameter: the elements that this rank updates
    group_pieces      the user's groups of parameters -> groups of pieces
    build_optimizer   the torch optimizer of the pieces

An instance is rebuilt and not changed, because the tensors that ranks update are not its parameters, and a
constructor may use its tensors. The arguments of the constructor come from ``defaults`` or from attributes of the same
names. An argument found in neither is an error. Hooks and learning-rate schedulers would be lost, so they are errors,
too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .._muon.matrices import PieceMatrices
from .._param_groups import as_group, check_settings
from .._parameters.home import Home
from ..ddp import DDP
from ..muon import Muon
from .pieces import Piece

__all__ = ["Instance", "build_optimizer", "check_class", "cut_pieces", "group_pieces", "take_apart"]

#: Optimizers of torch whose update of an element needs others (rows, matrices, the full model).
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
            f"{optimizer_class.__name__} derives from Muon, whose step needs full matrices, which ranks hold in "
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
    """Return the optimizer of the pieces, and a function that makes another one with the same settings."""
    if optimizer_class not in (torch.optim.Muon, Muon):
        make = functools.partial(optimizer_class, **kwargs)
        tensors = [{**h, "params": [piece.tensor for piece in pieces]} for h, pieces in groups]
        for settings in (kwargs, *(h for h, _ in groups)):
            check_settings(optimizer_class, settings)
        try:
            base = make(tensors)
        except (TypeError, AttributeError, ValueError, RuntimeError, LookupError) as error:
            given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(
                f"DistributedOptimizer: expected arguments that {optimizer_class.__name__} takes, got {given or 'none'}"
                f" ({error}); pass those of its constructor"
            ) from error
        return base, make
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
    """Raise ValueError if Muon would treat the weight of a convolution as a stack of matrices."""
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
        group = as_group(group)
        params = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
        params = [p for p in params if p.requires_grad]
        foreign = [tuple(p.shape) for p in params if p not in by_param]
        if foreign:
            raise ValueError(
                f"param_groups: expected parameters of the model, got others: param group {index} has parameters that "
                f"are not the model's, of shapes {foreign}; take them from the module given as model="
            )
        twice = [by_param[p].fqn for p in params if p in seen] + _duplicates([by_param[p].fqn for p in params])
        if twice:
            raise ValueError(
                f"param_groups: expected each parameter once, got some twice: parameters are in param groups more "
                f"than once: {twice}; list each of them once"
            )
        seen.update(params)
        groups.append(({k: v for k, v in group.items() if k != "params"}, [by_param[p] for p in params]))
    left = [piece.fqn for piece in pieces if piece.param not in seen]
    if left:
        raise ValueError(
            f"param_groups: trainable parameters are in no param group: {left}; list them, or freeze them before "
            "wrapping"
        )
    return groups


def _duplicates(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def cut_pieces(model: nn.Module, *, master_dtype: torch.dtype | None = None, detached: bool = False) -> list[Piece]:
    """Return one piece per trainable parameter of a module; for a ``DDP``, this rank's part of each.

    Args:
        model: The module.
        master_dtype: Dtype of the copies of parameters of fewer bits; None: no copies.
        detached: Never use the parameter itself as a piece's tensor.

    Raises:
        ValueError: If a ``DDP`` is hidden inside the module, or its parameters are no longer those that it wrapped.
    """
    if not isinstance(model, DDP):
        hidden = next((fqn for fqn, part in model.named_modules() if isinstance(part, DDP)), None)
        if hidden is not None:
            raise ValueError(f"the module holds a DDP at {hidden!r}; pass the DDP itself as model=")
        named = [(fqn, p) for fqn, p in model.named_parameters() if p.requires_grad]
        return [_full(fqn, p, master_dtype, detached) for fqn, p in named]
    slots = model.slots()
    for fqn, param in model.named_parameters():
        if param.requires_grad and (fqn not in slots or slots[fqn].param is not param):
            raise ValueError(
                f"{fqn!r} is not the parameter that DDP wrapped: it was replaced or unfrozen since. Change the module "
                "first, then wrap it in DDP"
            )
    pieces = []
    for fqn, slot in slots.items():
        dtype = model.originals.master_dtype(slot.param, master_dtype)
        if model.zero:
            piece = _cut(fqn, slot.param, slot.value_part, *slot.part, dtype)
        else:
            piece = _full(fqn, slot.param, dtype, detached)
        piece.spread = model.spreads[piece.param]
        pieces.append(piece)
    return pieces


def _full(fqn: str, param: nn.Parameter, master_dtype: torch.dtype | None, detached: bool) -> Piece:
    """Return a piece of all of a parameter; a DTensor is updated through its local tensor, which is much faster."""
    local = _torch.local_tensor(param.detach())
    itself = not (detached or isinstance(param, DTensor) or _is_narrow(param, master_dtype))
    if itself and _torch.grad_dtype(param) == param.dtype:
        return Piece(fqn, param, param, 0, local.numel())
    piece = _cut(fqn, param, local, 0, local.numel(), master_dtype)
    piece.home = Home(fqn, param, local)
    return piece


def _cut(
    fqn: str, param: nn.Parameter, value: Tensor, start: int, stop: int, master_dtype: torch.dtype | None
) -> Piece:
    if not _is_narrow(param, master_dtype):
        return Piece(fqn, param, nn.Parameter(value), start, stop)
    return Piece(fqn, param, nn.Parameter(value.to(master_dtype)), start, stop, value=value)


def _is_narrow(param: Tensor, master_dtype: torch.dtype | None) -> bool:
    return master_dtype is not None and param.dtype.itemsize < master_dtype.itemsize


@dataclass(frozen=True)
class Instance:
    """The class, arguments, groups and state of an optimizer.

    Attributes:
        optimizer_class: Its class.
        arguments: The arguments of its constructor, without the parameters.
        param_groups: Its groups: hyperparameters and ``"params"``.
        state: Its state by parameter.
    """

    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: Mapping[Tensor, dict[str, Any]]


def take_apart(optimizer: torch.optim.Optimizer) -> Instance:
    """Return the class, arguments, groups and state of ``optimizer``.

    Raises:
        ValueError: If an argument of its constructor cannot be found, or if it has hooks or a scheduler.
    """
    kind = type(optimizer)
    hooks = _torch.optimizer_hooks(optimizer)
    if hooks:
        raise ValueError(
            f"this {kind.__name__} has hooks ({hooks}), which would be lost; register them with the "
            "DistributedOptimizer"
        )
    if "step" in vars(optimizer):  # torch's schedulers replace it on the instance
        raise ValueError(
            f"this {kind.__name__} has a learning-rate scheduler (or another step()), which would still change it; "
            "construct the scheduler for the DistributedOptimizer"
        )
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in optimizer.param_groups]
    return Instance(kind, _arguments(optimizer), groups, optimizer.state)


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    kind, known = type(optimizer), dict(optimizer.defaults)
    arguments, unknown = {}, []
    _, *parameters = inspect.signature(kind).parameters.values()
    if isinstance(optimizer, Muon):  # its groups hold the settings of AdamW
        return {p.name: known[p.name] for p in parameters if p.name in known}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= known
        elif parameter.name in known:
            arguments[parameter.name] = known[parameter.name]
        elif parameter.name in vars(optimizer):
            arguments[parameter.name] = vars(optimizer)[parameter.name]
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            unknown.append(parameter.name)
    if unknown:
        raise ValueError(
            f"the arguments {unknown} of {kind.__name__} cannot be known from an instance: they are neither in its "
            "defaults nor attributes of it; pass the class and its arguments to DistributedOptimizer instead"
        )
    return arguments
