"""Match the ``.input`` entry of a plan with the signature of a module's forward, once, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import PlanError
from .placements import is_placements

__all__ = ["InputPlan", "plan_inputs"]


@dataclass(frozen=True)
class InputPlan:
    """The planned arguments of one module.

    Attributes:
        where: the boundary's name in errors.
        signature: of the module's forward.
        arguments: argument name -> entry. The name of ``*args`` has a list, that of ``**kwargs`` a dict.
    """

    where: str
    signature: inspect.Signature
    arguments: dict[str, object]


def plan_inputs(module: nn.Module, name: str, entry: object) -> InputPlan:
    """Match an ``.input`` entry, a list by position or a dict by name, with the signature of a module's forward.

    Raises:
        PlanError: more positions than the forward has, or an argument that it does not take.
    """
    where = f"{name}.input" if name else "input"
    signature = inspect.signature(module.forward)
    if is_placements(entry):
        entry = [entry]
    match = _by_name if isinstance(entry, Mapping) else _by_position
    return InputPlan(where, signature, match(where, signature, entry or {}))


def _names(signature: inspect.Signature, *kinds: object) -> list[str]:
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds]


def _by_position(where: str, signature: inspect.Signature, entries: Sequence) -> dict[str, object]:
    positional = _names(signature, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variable = _names(signature, inspect.Parameter.VAR_POSITIONAL)
    rest = list(entries)[len(positional) :]
    if rest and not variable:
        raise PlanError(
            f"{where}: expected at most {len(positional)} entries, for the positional arguments {positional} of "
            f"forward, got {len(entries)}; plan other arguments by name"
        )
    return dict(zip(positional, entries, strict=False)) | ({variable[0]: rest} if rest else {})


def _by_name(where: str, signature: inspect.Signature, entries: Mapping[str, object]) -> dict[str, object]:
    variable = _names(signature, inspect.Parameter.VAR_KEYWORD)
    named = [name for name in signature.parameters if name not in variable]
    extra = {argument: entry for argument, entry in entries.items() if argument not in named}
    if extra and not variable:
        raise PlanError(f"{where}: forward has no argument {next(iter(extra))!r}; use one of {named}")
    known = {argument: entry for argument, entry in entries.items() if argument in named}
    return known | ({variable[0]: extra} if extra else {})
