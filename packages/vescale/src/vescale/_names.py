"""Names of modules and parameters in a plan, compared with the model before anything is built.

An entry is a name or a regular expression that matches full names. One that matches nothing is an error with the
nearest names. In a pipeline a rank keeps the names that it has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn


def matching_modules(model: nn.Module, patterns: Iterable[str], *, field: str) -> list[str]:
    """Return the names of the modules that a field of the plan lists, in registration order.

    Raises:
        ValueError: an entry matches no module.
    """
    return _matching([name for name, _ in model.named_modules(remove_duplicate=False) if name], patterns, field)


def check_parameters(model: nn.Module, patterns: Iterable[str], *, field: str) -> None:
    """Raise `ValueError` if an entry of a field matches no parameter."""
    _matching([name for name, _ in model.named_parameters(remove_duplicate=False)], patterns, field, "parameter")


def _matching(names: Sequence[str], patterns: Iterable[str], field: str, what: str = "module") -> list[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if name == pattern or re.fullmatch(pattern, name)]
        if not matched:
            near = difflib.get_close_matches(pattern.replace("\\", ""), names, n=3, cutoff=0.3)
            raise ValueError(
                f"parallelize: expected names of {what}s, or regular expressions for full names, in Plan({field}=...), "
                f"got {pattern!r}, which matches no {what}; the nearest names are {near}"
            )
        found.update(matched)
    return [name for name in names if name in found]


def of_this_rank(names: Iterable[str], model: nn.Module, whole: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of modules that this rank has.

    Args:
        names: of modules of the full model.
        model: the model, in which an engine may have replaced modules of other stages.
        whole: the modules of the full model, by all of their names.
    """
    here = {name for name, module in model.named_modules(remove_duplicate=False) if whole.get(name) is module}
    return [name for name in names if name in here]
