"""Estimate the bytes of one rank: pure functions of a profile and a layout.

    parameters, gradients, optimizer, buffers    `_states.py`
    activations                                  `_activations.py`: kept for backward by the micro-batches in flight
    temporary                                    allocated while the part that needs most of it runs: a block in
                                                 backward with all that it has recomputed, or the loss

Sums of all are compared with a device's memory. They assume that an allocator wastes nothing; a search leaves room
for that (`Constraints.memory_fraction`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ._activations import StageActivations, part_bytes, rank_activations
from ._checked import Count, checked
from ._checks import DEFAULT_BUCKET_BYTES, check_batch
from ._layout import Layout
from ._profile import ModelProfile
from ._schedules import microbatches_in_flight
from ._states import RankParams, StateBytes, buffer_bytes, positions_of_ranks, rank_params, state_of_rank
from ._typed_json import Size
from ._units import format_bytes, format_percent

T = TypeVar("T")

__all__ = ["ACTIVATIONS_COVER", "Estimator", "Layout", "StageMemory", "describe_stages", "estimate_memory"]

ACTIVATIONS_COVER = (
    "Activations are those that one forward and backward on tensors without data keep and allocate, with fused "
    "attention; for a model that cannot run so, they are estimated by the formula of arXiv 2205.05198. Not counted: "
    "workspaces of kernels and of collectives, and memory that the allocator cannot use again: memory_fraction leaves "
    "room for them."
)


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline coordinate, by purpose.

    Attributes:
        parameters, gradients, optimizer: the model states.
        activations: kept for backward by the largest number of micro-batches in flight.
        buffers: gradient and parameter buffers, see `_states.py`.
        temporary: allocated while the part that needs most of it runs.
    """

    parameters: Size
    gradients: Size
    optimizer: Size
    activations: Size
    buffers: Size
    temporary: Size = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.buffers + self.temporary

    def __str__(self) -> str:
        parts = ["parameters", "gradients", "optimizer", "activations", "buffers"]
        parts += ["temporary"] if self.temporary else []
        listed = " + ".join(f"{name} {format_bytes(getattr(self, name))}" for name in parts)
        return f"{format_bytes(self.total)} = {listed}"


@checked
def estimate_memory(
    profile: ModelProfile,
    layout: Layout,
    *,
    global_batch_size: Count,
    sequence_length: Count,
    state: StateBytes | None = None,
    bucket_bytes: Count = DEFAULT_BUCKET_BYTES,
    loss_parallel: bool = False,
) -> tuple[StageMemory, ...]:
    """Estimate the bytes per rank of every pipeline coordinate.

    Args:
        profile: the model; measured for this sequence length, or not at all.
        layout: degrees, ZeRO stage, micro-batches.
        global_batch_size: sequences per step over all ranks; a multiple of ``dp * num_microbatches``.
        sequence_length: tokens per sequence.
        state: bytes per parameter; ``None`` = AdamW with the dtypes of model and layout.
        bucket_bytes: size of a gradient bucket.
        loss_parallel: whether logits stay sharded over tp in the loss.

    Returns:
        One `StageMemory` per rank of a pipeline; with one stage per rank, per stage.

    Raises:
        ValueError: ``dp * num_microbatches`` does not divide the batch, the profile was measured for another sequence
            length, or ``recompute`` has names of modules, whose memory is not known.
    """
    estimator = Estimator(
        profile,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        state=state,
        bucket_bytes=bucket_bytes,
        loss_parallel=loss_parallel,
    )
    return estimator.stages(layout)


class Estimator:
    """Estimates many layouts of one model; keeps what they have in common.

    Args are those of `estimate_memory`.
    """

    def __init__(
        self,
        profile: ModelProfile,
        *,
        global_batch_size: int,
        sequence_length: int,
        state: StateBytes | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        loss_parallel: bool = False,
    ) -> None:
        self.profile, self.state, self.bucket_bytes = profile, state, bucket_bytes
        self.global_batch_size, self.sequence_length = global_batch_size, sequence_length
        self.loss_parallel = loss_parallel
        self._kept: dict[tuple[Any, ...], Any] = {}

    def stages(self, layout: Layout) -> tuple[StageMemory, ...]:
        """Return the bytes of each pipeline coordinate."""
        return tuple(StageMemory(*counts) for counts in self._counts(layout))

    def fullest(self, layout: Layout) -> int:
        """Return the bytes of the rank that has most."""
        return max(map(sum, self._counts(layout)))

    def _counts(self, layout: Layout) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield the fields of `StageMemory` of each pipeline coordinate."""
        if isinstance(layout.recompute, tuple):
            raise ValueError(
                f"estimate_memory: expected None or k for every k-th block as recompute, got names {layout.recompute}; "
                "memory of single modules is not estimated"
            )
        check_batch(self.global_batch_size, dp=layout.dp, num_microbatches=layout.num_microbatches)
        state = self.state or StateBytes.for_layout(self.profile.dtype, layout)
        states: dict[RankParams, tuple[int, int, int, int]] = {}  # few ranks have other parameters than their neighbors
        activations = self._activations(layout)
        for rank, params in enumerate(self._params(layout)):
            if params not in states:
                model = (0, 0, 0) if layout.offload else state_of_rank(params, layout, state)
                states[params] = *model, buffer_bytes(params, layout, state=state, bucket_bytes=self.bucket_bytes)
            own = activations[rank]
            in_flight = microbatches_in_flight(layout.schedule, layout.pp, layout.num_microbatches, rank, layout.stages)
            parameters, gradients, optimizer, buffers = states[params]
            yield parameters, gradients, optimizer, int(own.kept * in_flight), buffers, own.temporary

    def _params(self, layout: Layout) -> tuple[RankParams, ...]:
        key = layout.tp, layout.pp, layout.ep, layout.schedule, layout.stages
        return self._once(("params", *key), lambda: rank_params(self.profile, layout))

    def _activations(self, layout: Layout) -> tuple[StageActivations, ...]:
        recompute = layout.recompute if isinstance(layout.recompute, int) else None
        rows = self.global_batch_size // (layout.dp * layout.num_microbatches)
        split = rows, layout.tp, layout.sequence_parallel, layout.etp, layout.param_dtype
        parts = self._once(
            ("parts", *split),
            lambda: part_bytes(
                self.profile,
                layout,
                rows=rows,
                sequence_length=self.sequence_length,
                loss_parallel=self.loss_parallel,
            ),
        )
        return self._once(
            ("activations", *split, layout.pp, layout.schedule, layout.stages, layout.recompute),
            lambda: tuple(
                rank_activations(parts, positions, recompute=recompute, num_blocks=self.profile.num_blocks)
                for positions in positions_of_ranks(self.profile, layout)
            ),
        )

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found


def describe_stages(stages: Sequence[StageMemory], *, limit: int | None = None) -> list[str]:
    """Return one line per run of equal stages, and the fullest stage's fraction of ``limit``."""
    lines, first = [], 0
    for stage in range(1, len(stages) + 1):
        if stage == len(stages) or stages[stage] != stages[first]:
            name = f"stage {first}" if stage - first == 1 else f"stages {first}-{stage - 1}"
            lines.append(f"{name}: {stages[first]}")
            first = stage
    if limit is not None and stages:
        lines.append(f"fullest rank uses {format_percent(max(part.total for part in stages) / limit)} of the limit")
    return lines
