"""A `Plan`: the configuration of a parallel training run, as data.

A plan comes from `generate_plan` or is written by hand. It prints, and it is saved as JSON, so that a run can be
repeated. It holds no process group and starts no process; `vescale.parallelize` executes it.

The ranks form a mesh of three axes. With the default order ``("pp", "dp", "tp")``, tp varies fastest, so that a
tensor-parallel group has neighboring devices of one host:

    rank = (pp_coord * dp + dp_coord) * tp + tp_coord
"""

import dataclasses
import json
import os
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ._checked import Count, FilePath, checked
from ._checks import (
    ALL_SCHEDULES,
    DEFAULT_BUCKET_BYTES,
    DEVICES,
    LOOPED,
    SCHEDULES,
    TWO_STAGES,
    ZERO_STAGES,
    check_batch,
    check_bool,
    check_choice,
    check_int,
)
from ._memory import ACTIVATIONS_COVER, Layout, StageMemory, describe_stages
from ._table import Candidate, render
from ._typed_json import JsonReader
from ._units import format_bytes, format_percent

FORMAT = 1
MODES = ("eager", "static", "compile")
AXES = ("pp", "dp", "tp")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees and choices of a parallel training run.

    Args:
        dp: data-parallel degree: ranks with the same parameters and different batches.
        tp: tensor-parallel degree: ranks that shard each layer.
        pp: pipeline-parallel degree: number of stages.
        zero: 0 = gradients all-reduced, 1 = optimizer state sharded over dp, 2 = gradients sharded too, 3 = parameters
            sharded too, and all-gathered block by block for their use.
        sequence_parallel: shard activations between tensor-parallel regions along the sequence over tp.
        schedule: pipeline schedule, a name of ``vescale.pipe.PipelinePlan``, such as ``"1f1b"`` or ``"zb_v"``.
        num_microbatches: micro-batches of each rank's batch; with ``pp=1`` their gradients are accumulated in sequence.
        stages_per_rank: pipeline stages of each rank, for the interleaved, looped and searched schedules; by default
            the schedule decides.
        split: ``"uniform"``, the FQNs of the first module of each stage after the first, or one list of FQNs per stage.
        module_plan: name of a ready plan of ``vescale.dmodule``, such as ``"mixtral"``; ``None`` or ``"auto"`` selects
            it by the model.
        mode: execution mode of the parallel modules: ``"eager"``, ``"static"`` or ``"compile"``, see
            ``vescale.dmodule``. In a pipeline every module that a stage runs is a program of its own.
        device: ``"cpu"`` or ``"cuda"``.
        bucket_bytes: size of a gradient bucket of data parallelism.
        axis_order: the mesh's axes, slowest first.
        memory: estimated bytes per rank of every stage, for a generated plan.
        limit_bytes: memory limit per rank of the search.
        table: the layouts of the search.

    Raises:
        ValueError: a value is invalid; the text has the field, the value and the valid values.

    Example:
        >>> plan = Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=4)
        >>> plan.world_size
        8
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    num_microbatches: int = 1
    stages_per_rank: int | None = None
    split: str | Sequence[str] | Sequence[Sequence[str]] = "uniform"
    module_plan: str | None = None
    mode: str = "eager"
    device: str = "cpu"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    axis_order: tuple[str, ...] = AXES
    memory: tuple[StageMemory, ...] = field(default=(), repr=False)
    limit_bytes: int | None = field(default=None, repr=False)
    table: tuple[Candidate, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "num_microbatches", "bucket_bytes"):
            check_int("Plan", name, getattr(self, name), at_least=1)
        check_choice("Plan", "zero", self.zero, ZERO_STAGES)
        check_choice("Plan", "schedule", self.schedule, ALL_SCHEDULES)
        if self.stages_per_rank is not None:
            check_int("Plan", "stages_per_rank", self.stages_per_rank, at_least=1)
            if self.schedule not in LOOPED:
                raise ValueError(
                    f"Plan: expected stages_per_rank=None for schedule {self.schedule!r}, which says it itself, got "
                    f"{self.stages_per_rank}; choose one of {', '.join(map(repr, LOOPED))} for other numbers"
                )
        check_choice("Plan", "device", self.device, DEVICES)
        check_choice("Plan", "mode", self.mode, MODES)
        check_bool("Plan", "sequence_parallel", self.sequence_parallel)
        if self.limit_bytes is not None:
            check_int("Plan", "limit_bytes", self.limit_bytes, at_least=1)
        for name, kind in (("memory", StageMemory), ("table", Candidate)):
            rows = getattr(self, name)
            if not isinstance(rows, tuple) or not all(isinstance(row, kind) for row in rows):
                raise ValueError(
                    f"Plan: expected a tuple of {kind.__name__} for {name}, got {reprlib.repr(rows)}; leave it to "
                    "generate_plan"
                )
        self._check_axis_order()
        self._check_split()
        if self.module_plan is not None and (not isinstance(self.module_plan, str) or not self.module_plan):
            raise ValueError(
                f"Plan: expected the name of a ready plan or None for module_plan, got {self.module_plan!r}; pass a "
                "plan of your own to parallelize(module_plan=...)"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "Plan: expected tp > 1 for sequence_parallel, got tp = 1; set tp > 1 or sequence_parallel=False"
            )

    def _check_axis_order(self) -> None:
        if not isinstance(self.axis_order, tuple | list) or sorted(map(str, self.axis_order)) != sorted(AXES):
            raise ValueError(f"Plan: expected 'pp', 'dp' and 'tp' once each in axis_order, got {self.axis_order!r}")
        object.__setattr__(self, "axis_order", tuple(self.axis_order))

    def _check_split(self) -> None:
        if self.split == "uniform":
            return
        each = self.num_stages // self.pp
        stages = f"pp = {self.pp}" + (f" and {each} stages per rank" if each > 1 else "")
        if _is_fqns(self.split):
            if len(self.split) != self.num_stages - 1 or len(set(self.split)) != len(self.split):
                raise ValueError(
                    f"Plan: expected {self.num_stages - 1} different FQNs in split for {stages}, got "
                    f"{list(self.split)}; name the first module of each stage after the first"
                )
            object.__setattr__(self, "split", tuple(self.split))
        elif isinstance(self.split, list | tuple) and all(map(_is_fqns, self.split)):
            if len(self.split) != self.num_stages:
                raise ValueError(
                    f"Plan: expected {self.num_stages} lists in split for {stages}, got {len(self.split)}; write one "
                    "list of modules per stage"
                )
            object.__setattr__(self, "split", tuple(map(tuple, self.split)))
        else:
            raise ValueError(
                f"Plan: expected 'uniform', a list of FQNs or one list of FQNs per stage for split, got {self.split!r}"
            )

    @property
    def world_size(self) -> int:
        """Number of processes: dp * tp * pp."""
        return self.dp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: pp times the stages of each rank."""
        per_rank = 2 if self.schedule in TWO_STAGES else 1
        return self.pp * (self.stages_per_rank or per_rank)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Degrees in the order of ``axis_order``."""
        return tuple(getattr(self, axis) for axis in self.axis_order)

    @property
    def layout(self) -> Layout:
        """The part of the plan that determines memory.

        Raises:
            ValueError: the schedule is another than ``"1f1b"`` and ``"gpipe"``, for which there is no memory model.
        """
        return Layout(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            zero=self.zero,
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            sequence_parallel=self.sequence_parallel,
        )

    @checked
    def check_world(self, world_size: Count) -> None:
        """Raise `ValueError` unless the plan needs ``world_size`` processes."""
        if world_size != self.world_size:
            raise ValueError(
                f"Plan: expected dp * tp * pp = {self.dp} * {self.tp} * {self.pp} = {self.world_size} processes, got "
                f"{world_size}; start {self.world_size} (torchrun --nproc-per-node {self.world_size}), or choose "
                f"degrees with the product {world_size}"
            )

    def check_batch(self, global_batch_size: int) -> None:
        """Raise `ValueError` unless the batch divides into ``dp * num_microbatches`` equal parts."""
        check_batch(global_batch_size, dp=self.dp, num_microbatches=self.num_microbatches)

    def __str__(self) -> str:
        parts = self.split if isinstance(self.split, tuple) else ()
        split = " | ".join(part if isinstance(part, str) else " ".join(part) for part in parts) or self.split
        sp = "sequence parallel" if self.sequence_parallel else "full activations"
        degrees = " x ".join(f"{axis} {getattr(self, axis)}" for axis in self.axis_order)
        stages = f", {self.num_stages // self.pp} stages per rank" if self.num_stages > self.pp else ""
        bubble = f", bubble {format_percent(self.layout.bubble)}" if self.schedule in SCHEDULES else ""
        cut = f"{self.schedule}{stages}, {self.num_microbatches} micro-batches, split {split}{bubble}"
        processes = "process" if self.world_size == 1 else "processes"
        lines = [
            f"Plan: {self.world_size} {processes} on {self.device} = {degrees}",
            f"  dp {self.dp:<4} ZeRO-{self.zero}, buckets of {format_bytes(self.bucket_bytes)}",
            f"  tp {self.tp:<4} module plan {self.module_plan or 'auto'}, {self.mode} mode, {sp}",
            f"  pp {self.pp:<4} {cut}",
        ]
        if self.memory:
            lines.append("  estimated bytes per rank")
            lines += [f"    {line}" for line in describe_stages(self.memory, limit=self.limit_bytes)]
        return "\n".join(lines)

    @checked
    def explain(self, *, max_rows: Count = 40) -> str:
        """Return the plan, the table of its search and the scope of the estimates.

        Args:
            max_rows: maximum rows of the table; the chosen one is always shown.
        """
        if not self.table:
            return f"{self}\nThis plan was written by hand and has no table; plans of generate_plan() have one."
        limit = f", limit {format_bytes(self.limit_bytes)} per rank" if self.limit_bytes is not None else ""
        header = f"Layouts in the order of preference{limit}:"
        return "\n".join([str(self), "", header, render(self.table, max_rows=max_rows), "", ACTIVATIONS_COVER])

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` returns an equal plan."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Build a plan from `to_json`'s text.

        Raises:
            ValueError: the text is not JSON, has another format number, an unknown key or a value of another type, or
                `Plan` refuses a value; the text has the place, such as ``table[2].layout.dp``.
        """
        reader = JsonReader(where="Plan.from_json", fix="pass the text of to_json()")
        tree = reader.parse(text)
        reader.expect(tree, "format", FORMAT)
        del tree["format"]
        return reader.read(tree, cls)

    @checked
    def save(self, path: FilePath) -> None:
        """Write the plan as JSON to ``path``."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    @checked
    def load(cls, path: FilePath) -> "Plan":
        """Read a plan from a file of `save`.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: as for `from_json`; the text begins with the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def _is_fqns(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(fqn, str) and fqn for fqn in value)
