"""Modules of ready families that are known to treat every row alone, although their code sorts or selects rows."""

from __future__ import annotations

import re

from torch import nn

from ..plans import FAMILIES

__all__ = ["known_row_wise"]


def known_row_wise(module: nn.Module) -> frozenset[str]:
    """Return the names of the experts of a Hugging Face model with a ready plan; they have no capacity.

    Example:
        >>> known_row_wise(nn.Linear(2, 2))
        frozenset()
    """
    config = getattr(module, "config", None)
    make = FAMILIES.get(getattr(config, "model_type", None))
    patterns = () if make is None else make(config).get("expert", ())
    names = [name for name, _ in module.named_modules()]
    return frozenset(name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns))
