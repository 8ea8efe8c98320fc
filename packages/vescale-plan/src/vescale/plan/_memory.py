"""Estimate the bytes of one rank: pure functions of a profile and a layout.

Model states (P parameters held by a rank, N = dp; bytes per parameter p, g, o for parameters, gradients, optimizer):

    ZeRO-0   (p + g + o) P
    ZeRO-1   (p + g) P + o P/N
    ZeRO-2   p P + (g + o) P/N
    ZeRO-3   (p + g + o) P/N      plus the full parameters in use: those outside of blocks, and two blocks

With p, g, o = 2, 2, 12 these are the formulas of the ZeRO paper (arXiv 1910.02054, figure 1); with 2, 4, 12 and 4, 4, 8
those of Megatron's distributed optimizer. P is the rank's share: its stage's parameters, the tp-sharded ones over tp.

Activations of one block for one token, in bytes (Korthikanti et al., arXiv 2205.05198, section 4, written for any dtype
of e bytes; h hidden, q and k widths of queries and keys, f feed-forward, a heads, s sequence; d = 1 with dropout):

    between the linear layers   2 e h + 2 d h                inputs of the two norms; dropout masks
    inputs of linear layers     2 e h                        of attention and of the feed-forward
    inside, split over tp       2 e (q + k) + 2 e f          queries, output, keys, values; feed-forward in and out
                                + 2 e f if gated             act(gate) and up
                                + a s (e + d (e + 1))        scores, if they are kept: softmax, dropped, mask

For e = 2, d = 1, q = k = h the sum is 18 h + 4 f, or 10 h + 24 h / tp for f = 4 h. Sequence parallelism splits the
first row over tp. The second row is not split, because the gathered inputs are kept for the weight gradients. (Megatron
gathers them again in backward.) With experts, f counts once per chosen expert, and each choice keeps the token before
and after. All of it is split over tp: the load of experts is assumed to be even.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from ._checked import Condition, Count, checked
from ._checked import Size as Number
from ._checks import (
    DEFAULT_BUCKET_BYTES,
    SCHEDULES,
    ZERO_STAGES,
    check_batch,
    check_bool,
    check_choice,
    check_int,
)
from ._profile import ModelProfile, dtype_bytes
from ._typed_json import Size
from ._units import format_bytes, format_percent

ACTIVATIONS_COVER = (
    "Activations are counted by the formula of arXiv 2205.05198 for tensors saved by autograd in a transformer block, "
    "the embedding, the last norm and one float32 copy of the logits. Not counted: recomputation (which saves less), "
    "casts to float32 inside the model, further copies of the logits in an unfused loss, temporary tensors, workspaces "
    "and allocator fragmentation: memory_fraction leaves room for them."
)


Stage = Annotated[int, Condition("0, 1, 2 or 3", lambda zero: zero in ZERO_STAGES)]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of the three model states.

    Attributes:
        params: the parameter itself.
        grads: its gradient.
        optimizer: optimizer state: two moments for AdamW, plus a master copy, if any.

    Example:
        >>> StateBytes(params=2, grads=2, optimizer=12)      # mixed precision Adam of the ZeRO paper: 16 bytes
        StateBytes(params=2, grads=2, optimizer=12)
    """

    params: int
    grads: int
    optimizer: int

    def __post_init__(self) -> None:
        for name in ("params", "grads", "optimizer"):
            check_int("StateBytes", name, getattr(self, name), at_least=0)

    @staticmethod
    @checked
    def for_dtype(dtype: str) -> "StateBytes":
        """Return AdamW's bytes if parameters, gradients and both moments have the same dtype."""
        size = dtype_bytes(dtype)
        return StateBytes(params=size, grads=size, optimizer=2 * size)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees and choices of a plan that determine memory.

    Raises:
        ValueError: a value is invalid; the text has the field, the value and the valid values.
    """

    dp: int
    tp: int
    pp: int
    zero: int = 0
    num_microbatches: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "num_microbatches"):
            check_int("Layout", name, getattr(self, name), at_least=1)
        check_choice("Layout", "zero", self.zero, ZERO_STAGES)
        check_choice("Layout", "schedule", self.schedule, SCHEDULES)
        check_bool("Layout", "sequence_parallel", self.sequence_parallel)

    def __str__(self) -> str:
        sp = " sp" if self.sequence_parallel else ""
        degrees = f"dp={self.dp} tp={self.tp} pp={self.pp}"
        return f"{degrees} zero={self.zero} micro-batches={self.num_microbatches}{sp}"

    @property
    def bubble(self) -> float:
        """Idle fraction of a pipeline rank with equal stages: (pp - 1) / (m + pp - 1), for GPipe and 1F1B."""
        return (self.pp - 1) / (self.num_microbatches + self.pp - 1)


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline stage, by purpose.

    Attributes:
        parameters, gradients, optimizer: the model states.
        activations: saved for backward by the largest number of micro-batches in flight.
        buffers: gradient and parameter buffers, see `buffer_bytes`.
    """

    parameters: Size
    gradients: Size
    optimizer: Size
    activations: Size
    buffers: Size

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
        listed = " + ".join(f"{name} {format_bytes(getattr(self, name))}" for name in parts)
        return f"{format_bytes(self.total)} = {listed}"


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``, rounded up."""
    return -(-numerator // denominator)


def stage_blocks(num_blocks: int, pp: int) -> tuple[range, ...]:
    """Return the blocks of each stage under the uniform split.

    The remainder goes one each to stages 1, 2, ..., pp-2, then 0, because the ends also run embedding and head. This is
    the rule of ``vescale.pipe``.

    >>> stage_blocks(7, 4)
    (range(0, 2), range(2, 4), range(4, 6), range(6, 7))
    """
    size, rest = divmod(num_blocks, pp)
    counts = [size] * pp
    for stage in [*range(1, pp - 1), 0][:rest]:
        counts[stage] += 1
    ends = list(itertools.accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def microbatches_in_flight(schedule: str, pp: int, num_microbatches: int, stage: int) -> int:
    """Return the number of micro-batches with live activations: all for GPipe, at most ``pp - stage`` for 1F1B."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, pp - stage)


@checked
def model_state_bytes(num_params: Number, *, state: StateBytes, dp: Count = 1, zero: Stage = 0) -> tuple[int, int, int]:
    """Return bytes of parameters, gradients and optimizer state on one rank.

    Args:
        num_params: trainable elements of the rank after tensor and pipeline parallelism.
        state: bytes per element.
        dp: data-parallel degree.
        zero: ZeRO stage 0 to 3.

    Example:
        >>> sum(model_state_bytes(1000, state=StateBytes(2, 2, 12), dp=4, zero=1)) == 4 * 1000 + 12 * 1000 // 4
        True
    """
    shard = ceil_div(num_params, dp)
    params, grads, optimizer = (shard if zero >= first else num_params for first in (3, 2, 1))
    return params * state.params, grads * state.grads, optimizer * state.optimizer


def block_activation_bytes(
    profile: ModelProfile,
    *,
    tokens: int,
    sequence_length: int,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Return the bytes saved by one block for backward on one rank, for ``tokens`` tokens (see the module's table)."""
    e, h, dropout = dtype_bytes(profile.dtype), profile.hidden, int(profile.dropout)
    queries, keys = profile.heads * profile.head_dim or h, profile.kv_heads * profile.head_dim or h
    choices = max(profile.experts_per_token, 1)
    between = 2 * e * h + 2 * dropout * h
    inputs = 2 * e * h + 4 * profile.experts
    split = 2 * e * (queries + keys) + choices * (4 if profile.gated else 2) * e * profile.ffn
    split += 2 * e * h * profile.experts_per_token
    if not profile.fused_attention:
        split += profile.heads * sequence_length * (e + dropout * (e + 1))
    parts = (between, tp if sequence_parallel else 1), (inputs, 1), (split, tp)
    return sum(ceil_div(tokens * part, ranks) for part, ranks in parts)


def edge_activation_bytes(
    profile: ModelProfile, *, tokens: int, tp: int = 1, sequence_parallel: bool = False
) -> tuple[int, int]:
    """Return the bytes saved by the embedding and by norm + head + loss, for ``tokens`` tokens.

    The embedding saves 8-byte indices and a dropout mask. The end saves the inputs of norm and head, and the logits in
    float32, which are full on every tp rank.
    """
    e, h = dtype_bytes(profile.dtype), profile.hidden
    split = tp if sequence_parallel else 1
    embedding = tokens * 8 + ceil_div(tokens * h * int(profile.dropout), split)
    head = ceil_div(tokens * e * h, split) + tokens * (e * h + 4 * profile.vocab)
    return embedding, head


@dataclass(frozen=True)
class StageParams:
    """Parameter elements on one rank of a stage.

    Attributes:
        trainable, frozen: elements of all parameters.
        largest: elements of the largest trainable parameter.
        block: elements of the largest block.
        edges: elements of parameters in no block, or in several.
    """

    trainable: int
    frozen: int
    largest: int
    block: int
    edges: int


def stage_params(profile: ModelProfile, *, tp: int, pp: int) -> tuple[StageParams, ...]:
    """Count parameter elements on one rank of every stage; a tied one counts on each stage that uses it."""
    blocks = stage_blocks(profile.num_blocks, pp)
    local: list[list[int]] = [[] for _ in range(pp)]
    frozen = [0] * pp
    owners: list[dict[int, int]] = [{} for _ in range(pp)]  # elements by block; -1 for the edges
    for info in profile.parameters:
        numel = ceil_div(info.numel, tp) if info.sharded else info.numel
        used_by = {position if 0 <= position < profile.num_blocks else -1 for position in info.positions}
        for stage in {stage_of(position, blocks) for position in info.positions}:
            owner = next(iter(used_by)) if len(used_by) == 1 else -1
            owners[stage][owner] = owners[stage].get(owner, 0) + numel
            if info.trainable:
                local[stage].append(numel)
            else:
                frozen[stage] += numel
    return tuple(
        StageParams(
            trainable=sum(local[stage]),
            frozen=frozen[stage],
            largest=max(local[stage], default=0),
            edges=owners[stage].pop(-1, 0),
            block=max(owners[stage].values(), default=0),
        )
        for stage in range(pp)
    )


def buffer_bytes(params: StageParams, layout: Layout, *, state: StateBytes, bucket_bytes: int) -> int:
    """Return the bytes of buffers in addition to the model states.

    ZeRO-1 keeps the reduced shard in addition to the full gradients. ZeRO-2 holds two full buckets during backward: one
    being filled and one being reduced (a parameter larger than ``bucket_bytes`` has its own bucket). ZeRO-3 holds full
    parameters and gradients outside of blocks and of two blocks: one running, one in a collective. A pipeline sums the
    gradients of micro-batches in a copy.
    """
    full = params.trainable * state.grads
    total = 0
    if layout.zero == 1:
        total += ceil_div(params.trainable, layout.dp) * state.grads
    elif layout.zero == 2:
        total += min(2 * max(bucket_bytes, params.largest * state.grads), full)
    elif layout.zero == 3 and layout.dp > 1:
        in_use = params.edges + 2 * params.block
        total += min(in_use, params.trainable + params.frozen) * state.params
        total += min(in_use * state.grads, full)
    if layout.pp > 1 or layout.num_microbatches > 1:
        total += full
    return total


def stage_of(position: int, blocks: Sequence[range]) -> int:
    """Return the stage of a position in the chain of blocks; -1 is on the first, ``num_blocks`` on the last."""
    for stage, covered in enumerate(blocks):
        if position < covered.stop:
            return stage
    return len(blocks) - 1


@checked
def estimate_memory(
    profile: ModelProfile,
    layout: Layout,
    *,
    global_batch_size: Count,
    sequence_length: Count,
    state: StateBytes | None = None,
    bucket_bytes: Count = DEFAULT_BUCKET_BYTES,
) -> tuple[StageMemory, ...]:
    """Estimate the bytes per rank of every pipeline stage.

    Args:
        profile: the model.
        layout: degrees, ZeRO stage, micro-batches.
        global_batch_size: sequences per step over all ranks; a multiple of ``dp * num_microbatches``.
        sequence_length: tokens per sequence.
        state: bytes per parameter; ``None`` = AdamW in the model's dtype.
        bucket_bytes: size of a gradient bucket.

    Returns:
        One `StageMemory` per stage.

    Raises:
        ValueError: ``dp * num_microbatches`` does not divide the batch.
    """
    check_batch(global_batch_size, dp=layout.dp, num_microbatches=layout.num_microbatches)
    state = state or StateBytes.for_dtype(profile.dtype)
    tokens = global_batch_size // (layout.dp * layout.num_microbatches) * sequence_length
    split: dict[str, Any] = {"tokens": tokens, "tp": layout.tp, "sequence_parallel": layout.sequence_parallel}
    per_block = block_activation_bytes(profile, sequence_length=sequence_length, **split)
    embedding, head = edge_activation_bytes(profile, **split)
    blocks = stage_blocks(profile.num_blocks, layout.pp)
    stages = []
    for stage, params in enumerate(stage_params(profile, tp=layout.tp, pp=layout.pp)):
        model_states = model_state_bytes(params.trainable, state=state, dp=layout.dp, zero=layout.zero)
        parameters, gradients, optimizer = model_states
        frozen = ceil_div(params.frozen, layout.dp) if layout.zero == 3 else params.frozen
        kept = len(blocks[stage]) * per_block
        kept += embedding * (stage == 0) + head * (stage == layout.pp - 1)
        in_flight = microbatches_in_flight(layout.schedule, layout.pp, layout.num_microbatches, stage)
        stages.append(
            StageMemory(
                parameters=parameters + frozen * state.params,
                gradients=gradients,
                optimizer=optimizer,
                activations=kept * in_flight,
                buffers=buffer_bytes(params, layout, state=state, bucket_bytes=bucket_bytes),
            )
        )
    return tuple(stages)


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
