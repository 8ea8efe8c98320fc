"""`Layout`: the part of a plan that determines memory."""

from __future__ import annotations

from dataclasses import dataclass

from ._checks import (
    ALL_SCHEDULES,
    LOOPED,
    ZERO_STAGES,
    check_bool,
    check_choice,
    check_int,
)
from ._schedules import stages_per_rank

_COUNTS = ("dp", "tp", "pp", "ep", "etp", "dp_replicate", "num_microbatches")
_DTYPES = ("param_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype")
_NAMES = (None, "float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees and choices of a plan that determine memory; the fields are those of `Plan`.

    The memory model knows ``recompute`` as a number: k for every k-th block.

    Raises:
        ValueError: a value is invalid; the text has the field, the value and the valid values.
    """

    dp: int
    tp: int
    pp: int
    ep: int = 1
    etp: int = 1
    zero: int = 0
    dp_replicate: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    sequence_parallel: bool = False
    recompute: int | tuple[str, ...] | None = None
    param_dtype: str | None = None
    grad_dtype: str | None = None
    reduce_dtype: str | None = None
    master_dtype: str | None = None
    state_dtype: str | None = None
    reshard_after_forward: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_int("Layout", name, getattr(self, name), at_least=1)
        for name in ("stages_per_rank", "recompute"):
            if getattr(self, name) is not None and not (name == "recompute" and _is_names(self.recompute)):
                check_int("Layout", name, getattr(self, name), at_least=1)
        check_choice("Layout", "zero", self.zero, ZERO_STAGES)
        check_choice("Layout", "schedule", self.schedule, ALL_SCHEDULES)
        for name in _DTYPES:
            check_choice("Layout", name, getattr(self, name), _NAMES)
        for name in ("sequence_parallel", "reshard_after_forward", "offload"):
            check_bool("Layout", name, getattr(self, name))
        if self.dp % (self.dp_replicate * self.ep):
            raise ValueError(
                f"Layout: expected dp that dp_replicate * ep = {self.dp_replicate} * {self.ep} divides, got dp = "
                f"{self.dp}; choose other degrees"
            )
        if self.etp not in (1, self.tp):
            raise ValueError(f"Layout: expected etp = 1 or etp = tp = {self.tp}, got {self.etp}; choose one of them")
        if self.stages_per_rank is not None and self.schedule not in LOOPED:
            raise ValueError(
                f"Layout: expected stages_per_rank=None for schedule {self.schedule!r}, got {self.stages_per_rank}"
            )

    def __str__(self) -> str:
        parts = [f"dp={self.dp} tp={self.tp} pp={self.pp}"]
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        parts += [f"zero={self.zero} micro-batches={self.num_microbatches}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"recompute={self.recompute}"] if self.recompute else []
        return " ".join(parts)

    @property
    def stages(self) -> int:
        """Stages of each rank."""
        return stages_per_rank(self.schedule, self.stages_per_rank)

    @property
    def bubble(self) -> float:
        """Idle fraction of a pipeline rank with equal stages: (pp - 1) / (v m + pp - 1) with v stages per rank.

        It is that of GPipe and 1F1B, looped and interleaved; schedules with split backwards have less.
        """
        return (self.pp - 1) / (self.stages * self.num_microbatches + self.pp - 1)


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) and name for name in value)
