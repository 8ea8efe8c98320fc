"""Modules that are known to treat every row alone, although their code sorts or selects rows: experts."""

from __future__ import annotations

import re

from torch import nn

from ..plans import FAMILIES
from ..plans._derive.experts import find_experts

__all__ = ["known_row_wise"]


def known_row_wise(module: nn.Module) -> frozenset[str]:
    """Return the names of the experts of a module: of a ready family, or stacked ones, which plans can spread.

    Each token gets the sum of its experts' outputs, whatever other tokens there are: none is dropped. Their router is
    not among them, nor is a loss of it.

    Example:
        >>> known_row_wise(nn.Linear(2, 2))
        frozenset()
    """
    config = getattr(module, "config", None)
    make = FAMILIES.get(getattr(config, "model_type", None))
    patterns = () if make is None else make(config).get("expert", ())
    names = [name for name, _ in module.named_modules()]
    ready = (name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns))
    return frozenset((*ready, *find_experts(module, "ranks", 1).spread))
