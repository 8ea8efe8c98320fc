"""The plan of a pipeline as data: the schedule, the number of micro-batches, and the split into stages."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from ._checked import Count, checked
from ._schedule.actions import KINDS, Schedule
from ._schedule.search import Placement
from ._schedule.simulate import Costs
from ._schedule.validate import validate
from ._typed_json import JsonReader
from .schedules import (
    dual_pipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    search_schedule,
    zb_h1,
    zb_h2,
    zb_v,
)

ONE_STAGE = {"1f1b": one_f_one_b, "gpipe": gpipe, "zb_h1": zb_h1, "zb_h2": zb_h2}
LOOPED = {
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "looped_bfs": looped_bfs,
}
V_SHAPED = {"zb_v": zb_v, "dual_pipe_v": dual_pipe_v}
AUTO = "auto"
SCHEDULES = (*ONE_STAGE, *LOOPED, *V_SHAPED, AUTO)
UNIFORM = "uniform"

Split = str | Sequence[str] | Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """How to run a model as a pipeline. Frozen, comparable, and JSON both ways.

    Args:
        schedule: the order of the work. One of

            - ``"1f1b"``, ``"gpipe"``, ``"zb_h1"``, ``"zb_h2"``: one stage per rank, in order;
            - ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"``, ``"looped_bfs"``: ``stages_per_rank`` stages per
              rank, in a loop: stage s on rank s mod p;
            - ``"zb_v"``, ``"dual_pipe_v"``: two stages per rank, in a V: ranks 0, ..., p-1, p-1, ..., 0;
            - ``"auto"``: the best that ``search_schedule`` finds for ``costs``, ``activations``, ``stages_per_rank``
              and ``placement``;
            - a ``Schedule``, made by ``search_schedule`` for instance, or its text. Its own communication is left out.

        num_microbatches: number of chunks of a batch, taken along dim 0. If it does not divide the rows, the first
            chunks have one row more than the others.
        split: where stages begin. One of

            - ``"uniform"``: the entries of the model's longest ``ModuleList``, and of others with entries of a similar
              size, are distributed evenly;
            - names of the modules that begin stages 1, 2, ..., num_stages-1, as in ``["layers.4", "layers.8"]``;
            - one list of module names per stage, as in ``[["embed", "down1"], ["down2", "up2"], ["up1", "head"]]``.

        stages_per_rank: of a looped schedule, 2 if None; of ``"auto"``, 1 if None. Other schedules say it themselves.
        placement: of the stages of ``"auto"``: ``"loop"`` or ``"V"``.
        costs: of the stages of ``"auto"``: times of forward, gradients of inputs and of weights, latency of a hop; in
            any unit, measured for instance. All actions cost the same if None.
        activations: the most live activations of a rank with ``"auto"``, in micro-batches; as many as ranks if None.

    Raises:
        ValueError: the schedule is unknown, there is less than one micro-batch, the split has another form, the
            schedule has other numbers of micro-batches or stages per rank, or takes no costs, limit or placement.

    Example:
        >>> plan = PipelinePlan(schedule="interleaved_1f1b", num_microbatches=8, stages_per_rank=2)
        >>> PipelinePlan.from_json(plan.to_json()) == plan
        True
    """

    schedule: str | Schedule = "1f1b"
    num_microbatches: int = 1
    split: Split = UNIFORM
    stages_per_rank: int | None = None
    placement: Placement | None = None
    costs: Costs | None = None
    activations: float | None = None

    def __post_init__(self) -> None:
        schedule = self.schedule
        if isinstance(schedule, str) and schedule not in SCHEDULES and any(map(str.isspace, schedule)):
            schedule = Schedule.parse(schedule)
            object.__setattr__(self, "schedule", schedule)
        if not isinstance(schedule, Schedule) and (not isinstance(schedule, str) or schedule not in SCHEDULES):
            raise ValueError(
                f"expected one of {', '.join(map(repr, SCHEDULES))} or a Schedule for schedule, got {schedule!r}"
            )
        for name, value in (("num_microbatches", self.num_microbatches), ("stages_per_rank", self.stages_per_rank)):
            is_integer = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63
            if not is_integer and (name, value) != ("stages_per_rank", None):
                raise ValueError(f"expected an integer >= 1 for {name}, got {value!r}")
        object.__setattr__(self, "split", _normalized_split(self.split))
        self._check_numbers(schedule)
        self._check_search()

    def _check_numbers(self, schedule: str | Schedule) -> None:
        if isinstance(schedule, Schedule) and schedule.num_microbatches != self.num_microbatches:
            raise ValueError(
                f"expected num_microbatches={schedule.num_microbatches}, as in the given schedule, got "
                f"{self.num_microbatches}"
            )
        given = self.stages_per_rank
        if given is None or (isinstance(schedule, str) and schedule in (*LOOPED, AUTO)):
            return
        if isinstance(schedule, Schedule) or given != (2 if schedule in V_SHAPED else 1):
            name = repr(schedule) if isinstance(schedule, str) else "a given schedule"
            raise ValueError(
                f"expected stages_per_rank=None for {name}, which says it itself, got {given}; choose one of "
                f"{', '.join(map(repr, (*LOOPED, AUTO)))} for other numbers"
            )

    def _check_search(self) -> None:
        for name in ("placement", "costs", "activations"):
            if self.schedule != AUTO and getattr(self, name) is not None:
                raise ValueError(
                    f"expected {name}=None, since only schedule='auto' takes it, got {getattr(self, name)!r}; leave it "
                    "out"
                )
        if self.placement not in (None, "loop", "V"):
            raise ValueError(f"expected 'loop' or 'V' for placement, got {self.placement!r}")
        limit = self.activations
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool) and 0 <= limit < math.inf
        if limit is not None and not is_number:
            raise ValueError(f"expected a number of 0 or more for activations, got {limit!r}")
        if isinstance(self.costs, Costs):  # hashable
            values: dict[str, Any] = {
                k: tuple(v) if isinstance(v, Sequence) else v for k, v in vars(self.costs).items()
            }
            object.__setattr__(self, "costs", Costs(**values))
        elif self.costs is not None:
            raise ValueError(f"expected Costs for costs, got {self.costs!r}; pass vescale.pipe.Costs(...)")

    @checked
    def actions(self, num_ranks: Count) -> Schedule:
        """Return the schedule for ``num_ranks`` ranks, without communication.

        Raises:
            ScheduleError: a given schedule is invalid, or none was found within the limit of activations.
            ValueError: it is of another number of ranks, or costs have not one number for each stage.
        """
        if isinstance(self.schedule, Schedule):
            return _computations(self.schedule, num_ranks)
        if self.schedule == AUTO:
            return search_schedule(
                num_ranks,
                self.num_microbatches,
                costs=self.costs,
                activations=self.activations,
                stages_per_rank=self.stages_per_rank or 1,
                placement=self.placement or "loop",
            )
        if build := ONE_STAGE.get(self.schedule) or V_SHAPED.get(self.schedule):
            return build(num_ranks, self.num_microbatches)
        return LOOPED[self.schedule](num_ranks, self.num_microbatches, self.stages_per_rank or 2)

    def to_json(self) -> str:
        """Return the plan as a JSON object in one line."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        costs = None if self.costs is None else vars(self.costs)
        return json.dumps(fields | {"schedule": str(self.schedule), "costs": costs})

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """Read a plan from ``to_json`` text.

        Raises:
            ValueError: the text is not a JSON object, has an unknown key or a value of another type, or the plan
                refuses a value; the text has the place, such as ``split[2][0]``.
        """
        reader = JsonReader(where="PipelinePlan.from_json", fix="pass the text of to_json()")
        return reader.read(reader.parse(text), cls)


def _computations(schedule: Schedule, num_ranks: int) -> Schedule:
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"PipelinePlan: expected a schedule of {num_ranks} ranks, as the pipeline axis has, got one of "
            f"{schedule.num_ranks}"
        )
    validate(schedule)
    if not schedule.is_lowered:
        return schedule
    ranks = [[a for a in schedule.actions(rank) if a.kind in KINDS] for rank in range(num_ranks)]
    return Schedule.of(ranks, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)


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
