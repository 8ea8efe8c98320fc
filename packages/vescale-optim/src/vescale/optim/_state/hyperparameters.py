"""What the ranks of an optimizer must have in common, as facts: groups, hyperparameters, the norm of clipping."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale.dtensor.extension import Fact

from .full_state import NOT_SAVED

__all__ = ["Hyperparameters", "group_facts"]

_FIX = "give all ranks the same hyperparameters, and step learning-rate schedulers alike"
_SAME_GROUPS = "make the same groups, of the same parameters in the same order, on all ranks"
_SIMPLE = (type(None), bool, int, float, complex, str, torch.dtype)


def group_facts(names_by_group: Sequence[Sequence[str]]) -> list[Fact]:
    """Return which parameters each group has."""
    facts = [Fact("the number of param groups", str(len(names_by_group)), _SAME_GROUPS)]
    for number, names in enumerate(names_by_group):
        text = f"{len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
        if len(names) > 4:
            text += f" with checksum {zlib.crc32(' '.join(names).encode()):08x}"
        facts.append(Fact(f"the parameters of param group {number}", text, _SAME_GROUPS))
    return facts


class Hyperparameters:
    """Hyperparameters of live param groups as facts, made again only where a value has changed."""

    def __init__(self) -> None:
        self._values: list[object] = []
        self._facts: list[Fact] = []

    def facts(self, groups: Iterable[dict[str, Any]], clip_grad_norm: object) -> list[Fact]:
        """Return the facts. Tensors on accelerators, for which the host would wait, do not count."""
        values = [_text(clip_grad_norm)]
        for group in groups:
            values += [(key, _text(value)) for key, value in group.items() if key not in NOT_SAVED]
            values.append(None)  # the end of a group
        if values != self._values:
            self._values, self._facts = values, _facts(values)
        return self._facts


def _facts(values: Sequence[Any]) -> list[Fact]:
    clip, *others = values
    facts, number = [Fact("clip_grad_norm", str(clip), _FIX)], 0
    for each in others:
        if each is None:
            number += 1
        else:
            facts.append(Fact(f"{each[0]!r} of param group {number}", str(each[1]), _FIX))
    return facts


def _text(value: object) -> object:
    """Return a value that can be compared and shown; the type of one that differs from process to process."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() < 16 else tuple(value.shape)
    if isinstance(value, list | tuple):
        return [_text(item) for item in value]
    return value if isinstance(value, _SIMPLE) else type(value).__name__
