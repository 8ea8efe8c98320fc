"""The settings of a ``DDP``, checked in one place before anything is done to the module.

Checks that depend on the module are elsewhere: shapes in `resolve_blocks`, devices in `check_offload`, dtypes of
parameters in `check_param_dtype`, everything else about parameters in `check_module`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._buckets.granularity import check_granularity
from ._gradients.rules import ReduceRules

__all__ = ["Options", "as_tuple"]


@dataclass(frozen=True)
class Options:
    """Keyword arguments of ``DDP``, with the same meanings.

    Raises:
        ValueError: If a value is invalid, or needs another ZeRO stage.
        TypeError: If ``granularity`` is not a mapping from names and regular expressions.
    """

    zero: int
    bucket_bytes: int
    overlap: bool
    reduction: str
    grad_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    param_dtype: torch.dtype | None
    find_unused_parameters: bool
    units: tuple[str | re.Pattern, ...] | None
    reshard_after_forward: bool
    prefetch: bool
    granularity: Mapping[str | re.Pattern, Any] | None
    offload: bool
    watch_draws: bool
    per_rank: bool
    row_wise: tuple[str | re.Pattern, ...]

    def __post_init__(self):
        if not isinstance(self.zero, int) or isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        self._check_units()
        _check_patterns("row_wise", self.row_wise)
        check_granularity(self.zero, self.granularity)
        _ = self.rules

    def _check_units(self) -> None:
        if self.units is None:
            return
        if self.zero != 3:
            raise ValueError(
                f"units= says which parameters are gathered together, which needs zero=3, got zero={self.zero}"
            )
        _check_patterns("units", self.units)

    @property
    def rules(self) -> ReduceRules:
        """How gradients are reduced."""
        return ReduceRules(self.reduction, self.grad_dtype, self.reduce_dtype)

    def __str__(self) -> str:
        """Return the settings that must be the same on all ranks, as lines."""
        lines = [f"zero={self.zero} find_unused_parameters={self.find_unused_parameters}", str(self.rules)]
        lines.append(f"per_rank={self.per_rank} row_wise={self.row_wise}")
        if self.zero == 3:
            lines.append(f"{self.reshard_after_forward} {self.prefetch} offload={self.offload}")
        return "\n".join(lines)


def as_tuple(patterns: Any) -> Any:
    """Return a collection as a tuple; anything else, a string included, as it is, to be refused."""
    return tuple(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, str) else patterns


def _check_patterns(setting: str, patterns: Any) -> None:
    listed = isinstance(patterns, tuple)
    if not listed or not all(isinstance(pattern, (str, re.Pattern)) for pattern in patterns):
        came = list(patterns) if listed else patterns
        raise ValueError(f"{setting} must be a list of module names or regular expressions, got {came!r}")
