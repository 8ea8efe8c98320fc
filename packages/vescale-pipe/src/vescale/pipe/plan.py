"""The plan of a pipeline as data: the schedule, the number of micro-batches, and the split into stages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ._schedule.actions import Schedule
from ._typed_json import JsonReader
from .schedules import gpipe, one_f_one_b

SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}
UNIFORM = "uniform"

Split = str | Sequence[str] | Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """How to run a model as a pipeline. Frozen, comparable, and JSON both ways.

    Args:
        schedule: ``"1f1b"`` or ``"gpipe"``.
        num_microbatches: number of equal chunks of a batch, taken along dim 0.
        split: where stages begin. One of

            - ``"uniform"``: the entries of the model's longest ``ModuleList`` are distributed evenly;
            - names of the modules that begin stages 1, 2, ..., num_stages-1, as in ``["layers.4", "layers.8"]``;
            - one list of module names per stage, as in ``[["embed", "down1"], ["down2", "up2"], ["up1", "head"]]``.

    Raises:
        ValueError: the schedule is unknown, there is less than one micro-batch, or the split has another form.

    Example:
        >>> plan = PipelinePlan(schedule="1f1b", num_microbatches=8)
        >>> PipelinePlan.from_json(plan.to_json()) == plan
        True
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    split: Split = UNIFORM

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, str) or self.schedule not in SCHEDULES:
            raise ValueError(f"expected one of {', '.join(map(repr, SCHEDULES))} for schedule, got {self.schedule!r}")
        count = self.num_microbatches
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 2**63:
            raise ValueError(f"expected an integer >= 1 for num_microbatches, got {count!r}")
        object.__setattr__(self, "split", _normalized_split(self.split))

    def actions(self, num_stages: int) -> Schedule:
        """Return the schedule for ``num_stages`` stages."""
        return SCHEDULES[self.schedule](num_stages, self.num_microbatches)

    def to_json(self) -> str:
        """Return the plan as a JSON object in one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """Read a plan from ``to_json`` text.

        Raises:
            ValueError: the text is not a JSON object, has an unknown key or a value of another type, or the plan
                refuses a value; the text has the place, such as ``split[2][0]``.
        """
        reader = JsonReader(where="PipelinePlan.from_json", fix="pass the text of to_json()")
        return reader.read(reader.parse(text), cls)


def _normalized_split(split: Any) -> Split:
    """Return the split with tuples for lists, so that plans are hashable and compare equal after JSON."""
    if isinstance(split, str):
        if split != UNIFORM:
            raise ValueError(
                "expected split 'uniform', a list of the modules that begin stages 1, 2, ..., or one list of module "
                f"names per stage, got {split!r}; for two stages write split=[{split!r}]"
            )
        return split
    if isinstance(split, Sequence) and all(isinstance(item, str) for item in split):
        return tuple(split)
    if isinstance(split, Sequence) and all(
        isinstance(stage, Sequence) and not isinstance(stage, str) and all(isinstance(name, str) for name in stage)
        for stage in split
    ):
        return tuple(tuple(stage) for stage in split)
    raise ValueError(
        "expected split 'uniform', a list of the modules that begin stages 1, 2, ..., or one list of module names per "
        f"stage, got {split!r}"
    )
