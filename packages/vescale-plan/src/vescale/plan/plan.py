"""A `Plan`: the configuration of a parallel training run, as data.

A plan comes from `generate_plan` or is written by hand. It prints, and it is saved as JSON, so that a run can be
repeated. It holds no process group and starts no process; `vescale.parallelize` executes it, each field or none.

The ranks form a mesh of three axes. With the default order ``("pp", "dp", "tp")``, tp varies fastest, so that a
tensor-parallel group has neighboring devices of one host:

    rank = (pp_coord * dp + dp_coord) * tp + tp_coord

The data-parallel ranks may themselves be a grid: replicas of the shards, shards, and ranks that spread experts, the
last of which varies fastest:

    dp_coord = (replicate_coord * (dp / dp_replicate / ep) + shard_coord) * ep + ep_coord
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ._checked import Count, FilePath, checked, checked_names
from ._checks import DEFAULT_BUCKET_BYTES, TWO_STAGES, check_batch
from ._explain.page import page
from ._explain.text import explain_text
from ._memory import Layout, StageMemory
from ._plan_checks import AXES, check_plan, check_rows
from ._plan_text import describe, differences
from ._table import Candidate
from ._typed_json import JsonReader

#: Number of the format that `Plan.to_json` writes. Texts of the first one, which has fewer fields, are read, too.
FORMAT = 2
FIRST_FORMAT = 1
ADDED_IN_SECOND = {
    *("ep", "etp", "cp", "dp_replicate", "recompute", "reduction", "autocast", "clip_grad_norm", "units", "offload"),
    *("param_dtype", "grad_dtype", "reduce_dtype", "master_dtype", "state_dtype"),
    *("granularity", "reshard_after_forward", "random_stream", "exact"),
}


@checked_names
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees and choices of a parallel training run.

    Args:
        dp: data-parallel degree: ranks with the same parameters and different batches.
        tp: tensor-parallel degree: ranks that shard each layer.
        pp: pipeline-parallel degree: number of stages.
        ep: expert-parallel degree: groups of so many data-parallel ranks spread the experts of a mixture over them, and
            exchange tokens. It divides ``dp``.
        etp: 1: each expert is whole on a rank, and experts are spread over tp, too; or ``tp``: the matrices of each
            expert are sharded over tp.
        cp: context-parallel degree; it must be 1, since context parallelism does not exist yet.
        zero: 0 = gradients all-reduced, 1 = optimizer state sharded over dp, 2 = gradients sharded too, 3 = parameters
            sharded too, and all-gathered block by block for their use.
        dp_replicate: hybrid sharding: number of groups of data-parallel ranks, each of which holds all shards. It
            divides ``dp``, and needs ``zero`` 1 to 3.
        sequence_parallel: shard activations between tensor-parallel regions along the sequence over tp.
        schedule: pipeline schedule, such as ``"1f1b"`` or ``"zb_v"``.
        num_microbatches: micro-batches of each rank's batch; with ``pp=1`` their gradients are accumulated in sequence.
        stages_per_rank: pipeline stages of each rank, for the interleaved, looped and searched schedules; by default
            the schedule decides.
        split: ``"uniform"``, the FQNs of the first module of each stage after the first, or one list of FQNs per stage.
        module_plan: name of a ready plan of ``vescale.dmodule``, such as ``"mixtral"``; ``None`` or ``"auto"`` selects
            it by the model.
        mode: execution mode of the parallel modules: ``"eager"``, ``"static"`` or ``"compile"``, see
            ``vescale.dmodule``. In a pipeline every module that a stage runs is a program of its own.
        recompute: modules whose activations are not kept for backward, but computed again in it: ``None``, a number k
            for every k-th block (1: every block), or names and regular expressions for full names of modules.
        reduction: order in which gradients of ranks are added: ``"backend"``, or ``"ordered"``, with the same bits for
            every bucket size and ZeRO stage.
        param_dtype: dtype of parameters in forward and backward, such as ``"bfloat16"``; those with more bits are cast,
            and keep masters of their own dtype. By default, as in the model; the same holds of the next four.
        grad_dtype: dtype in which gradients are kept and accumulated.
        reduce_dtype: dtype of gradients on the wire and of their sum over ranks.
        master_dtype: dtype of masters for parameters with fewer bits.
        state_dtype: dtype of optimizer state between steps, of fewer bits than parameters or masters.
        autocast: run forward, and what is recomputed of it, under ``torch.autocast`` with this dtype.
        clip_grad_norm: clip gradients by this global norm in each step.
        bucket_bytes: size of a gradient bucket of data parallelism.
        units: with ``zero=3``: names of modules, or regular expressions for full names, whose parameters are gathered
            and freed together; by default the blocks.
        granularity: with ``zero`` 1 to 3: where parameters may be cut into shards, by name or regular expression:
            ``"tensor"``, ``"rows"``, ``"expert"``, ``("dim0", rows)`` or a number of elements.
        reshard_after_forward: with ``zero=3``: free gathered parameters after forward and gather them for backward.
        offload: with ``zero=3``: keep shards of parameters, gradients and optimizer state in host memory.
        random_stream: ``"torch"``: random numbers of one device's generator; ``"philox"``: counter-based ones, which
            any process can reproduce, see ``vescale.dtensor.random``.
        exact: run everything in exact mode with this number of blocks: losses, gradients, parameters and optimizer
            state have the same bits under every plan with the same number, see ``vescale.dtensor.exact``. It is a
            multiple of ``dp`` and ``tp``. Modes run as eager mode, and micro-batches all at once.
        device: ``"cpu"`` or ``"cuda"``.
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
    ep: int = 1
    etp: int = 1
    cp: int = 1
    zero: int = 0
    dp_replicate: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    num_microbatches: int = 1
    stages_per_rank: int | None = None
    split: str | Sequence[str] | Sequence[Sequence[str]] = "uniform"
    module_plan: str | None = None
    mode: str = "eager"
    recompute: int | Sequence[str] | None = None
    reduction: str = "backend"
    param_dtype: str | None = None
    grad_dtype: str | None = None
    reduce_dtype: str | None = None
    master_dtype: str | None = None
    state_dtype: str | None = None
    autocast: str | None = None
    clip_grad_norm: float | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    units: Sequence[str] | None = None
    granularity: Mapping[str, str | int | Sequence[str | int]] | None = field(default=None, hash=False)
    reshard_after_forward: bool = True
    offload: bool = False
    random_stream: str = "torch"
    exact: int | None = None
    device: str = "cpu"
    axis_order: tuple[str, ...] = AXES
    memory: tuple[StageMemory, ...] = field(default=(), repr=False)
    limit_bytes: int | None = field(default=None, repr=False)
    table: tuple[Candidate, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_plan(self)
        check_rows(self, "memory", StageMemory)
        check_rows(self, "table", Candidate)
        for name in ("axis_order", "split", "units", "recompute"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                parts = tuple(part if isinstance(part, str) else tuple(part) for part in value)
                object.__setattr__(self, name, parts)
        if self.clip_grad_norm is not None:
            object.__setattr__(self, "clip_grad_norm", float(self.clip_grad_norm))
        if self.granularity is not None:
            found = {k: tuple(v) if isinstance(v, list) else v for k, v in self.granularity.items()}
            object.__setattr__(self, "granularity", found)

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
        return Layout(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Layout)})

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
        return describe(self)

    @checked
    def diff(self, other: "Plan") -> str:
        """Return one line for each field in which this plan and another one differ; an empty text if they are equal.

        Example:
            >>> print(Plan(dp=4, zero=1).diff(Plan(dp=4, zero=2, mode="static")))
            zero: 1 -> 2
            mode: 'eager' -> 'static'
        """
        return "\n".join(differences(self, other))

    @checked
    def explain(self, *, max_rows: Count = 40, devices_per_host: Count | None = None) -> str:
        """Return the plan as text: memory per rank as bars, ranks on the mesh, and the table of its search.

        Args:
            max_rows: maximum rows of the table; the chosen one is always shown.
            devices_per_host: shows on which host each group of ranks is.
        """
        return explain_text(self, max_rows=max_rows, devices_per_host=devices_per_host)

    @checked
    def to_html(self, *, devices_per_host: Count | None = None) -> str:
        """Return one page of HTML that needs no other file: what `explain` shows, as figures and a sortable table.

        Args:
            devices_per_host: groups the ranks of the mesh by host.
        """
        return page(self, devices_per_host=devices_per_host)

    @checked
    def explain_html(self, path: FilePath, *, devices_per_host: Count | None = None) -> None:
        """Write the page of `to_html` to ``path``.

        Example:
            >>> Plan(dp=4, tp=2).explain_html("plan.html", devices_per_host=8)                      # doctest: +SKIP
        """
        Path(path).write_text(page(self, devices_per_host=devices_per_host), encoding="utf-8")

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
        if isinstance(tree, dict) and type(number := tree.get("format")) is int and number == FIRST_FORMAT:
            if added := sorted(ADDED_IN_SECOND.intersection(tree)):
                raise ValueError(
                    f"Plan.from_json: expected the keys of format {FIRST_FORMAT}, got {added[0]!r}, which format "
                    f"{FORMAT} has; pass the text of to_json()"
                )
            tree["format"] = FORMAT
        reader.expect(tree, "format", FORMAT, fix="pass the text of to_json() of this version or an earlier one")
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
