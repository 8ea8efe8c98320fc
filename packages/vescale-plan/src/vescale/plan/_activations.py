"""Activations of a rank, in bytes: measured, or by a formula.

**Measured** (`ModelProfile.activations`): what each part of the model keeps for backward, its output, and what is
allocated while it runs, by kinds that say which ranks share it (`_measure/result.py`). Experts are assumed to have an
even load: a rank gets as many tokens from other ranks of its group as it sends, so expert parallelism over
data-parallel ranks leaves their number alone, while ranks of tp share them.

**By a formula**, for a model that cannot run without data. One block keeps for one token, in bytes (Korthikanti et
al., arXiv 2205.05198, section 4, written for any dtype of e bytes; h hidden, q and k widths of queries and keys, f
feed-forward, a heads, s sequence; d = 1 with dropout):

    between the linear layers   2 e h + 2 d h                inputs of the two norms; dropout masks
    inputs of linear layers     2 e h                        of attention and of the feed-forward
    inside, split over tp       2 e (q + k) + 2 e f          queries, output, keys, values; feed-forward in and out
                                + 2 e f if gated             act(gate) and up
                                + a s (e + d (e + 1))        scores, if they are kept: softmax, dropped, mask

For e = 2, d = 1, q = k = h the sum is 18 h + 4 f, or 10 h + 24 h / tp for f = 4 h. Sequence parallelism splits the
first row over tp. The second row is not split, because the gathered inputs are kept for the weight gradients.
(Megatron gathers them again in backward.) With experts, f counts once per chosen expert, and each choice keeps the
token before and after.

With recomputation every k-th block (`recomputed`) keeps its output alone, and its backward has all of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._layout import Layout
from ._measure.result import KINDS, Activations, Linear
from ._profile import ModelProfile, dtype_bytes
from ._schedules import recomputed


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``, rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class PartBytes:
    """Activations of one part on one rank, for one micro-batch, in bytes.

    Attributes:
        kept: what forward leaves for backward.
        output: what recomputation keeps.
        peak: the most that is allocated while the part runs, on top of what parts before it keep.
    """

    kept: int
    output: int
    peak: int


@dataclass(frozen=True)
class StageActivations:
    """Activations of the blocks of a rank.

    Attributes:
        kept: for one micro-batch.
        temporary: the most that the last micro-batch allocates beyond that.
    """

    kept: int
    temporary: int


def part_bytes(
    profile: ModelProfile, layout: Layout, *, rows: int, sequence_length: int, loss_parallel: bool = False
) -> list[PartBytes]:
    """Return the activations of what is before the blocks, of each block, and of what is after them."""
    if profile.activations is None:
        return _by_formula(profile, layout, tokens=rows * sequence_length, sequence_length=sequence_length)
    found = profile.activations
    if found.sequence_length != sequence_length:
        raise ValueError(
            f"estimate_memory: expected sequences of {found.sequence_length} tokens, as the profile was measured for, "
            f"got {sequence_length}; measure it again: profile(model, sequence_length={sequence_length})"
        )
    parts = _on_rank(
        found,
        layout,
        rows,
        _width_ratio(profile, layout),
        loss_parallel=loss_parallel,
        expert_ranks=layout.tp if profile.spreads_experts else 1,
    )
    return [parts[index] for index in found.order]


def _width_ratio(profile: ModelProfile, layout: Layout) -> float:
    """Return the bytes of an activation in the layout's dtype, as a part of those in the measured dtype."""
    return dtype_bytes(layout.param_dtype or profile.dtype) / dtype_bytes(profile.dtype)


def _on_rank(
    found: Activations, layout: Layout, rows: int, ratio: float, *, loss_parallel: bool, expert_ranks: int
) -> list[PartBytes]:
    tp = layout.tp
    ranks = {
        "whole": 1,
        "sequence": tp if layout.sequence_parallel else 1,
        "sharded": tp,
        "vocabulary": tp if loss_parallel else 1,
        "tokens": expert_ranks if layout.etp == 1 else 1,
        "expert": expert_ranks,
    }

    def count(line: Linear) -> int:
        parts = (max(getattr(line.fixed, kind) + rows * getattr(line.per_row, kind), 0) / ranks[kind] for kind in KINDS)
        return int(sum(parts) * ratio)

    return [
        PartBytes(
            kept=count(part.kept),
            output=min(count(part.output), count(part.kept)),
            peak=max(map(count, part.peaks), default=0),
        )
        for part in found.parts
    ]


def rank_activations(
    parts: Sequence[PartBytes], positions: Sequence[int], *, recompute: int | None, num_blocks: int
) -> StageActivations:
    """Return what the parts at some positions keep, and the most that is allocated while one of them runs.

    Args:
        parts: of all positions, from -1 (before the blocks) on.
        positions: those of a rank, in the order in which they run.
        recompute: every k-th block keeps its output alone.
        num_blocks: number of blocks.
    """
    kept = peak = 0
    for position in positions:
        part = parts[position + 1]
        peak = max(peak, kept + part.peak)
        kept += part.output if position in recomputed(num_blocks, recompute) else part.kept
    return StageActivations(kept, max(peak - kept, 0))


# ------------------------------------------------------------------------------------------------------- the formula


def _by_formula(profile: ModelProfile, layout: Layout, *, tokens: int, sequence_length: int) -> list[PartBytes]:
    tp, sequence_parallel = layout.tp, layout.sequence_parallel
    block = block_activation_bytes(
        profile, tokens=tokens, sequence_length=sequence_length, tp=tp, sequence_parallel=sequence_parallel
    )
    before, after = edge_activation_bytes(profile, tokens=tokens, tp=tp, sequence_parallel=sequence_parallel)
    output = ceil_div(tokens * dtype_bytes(profile.dtype) * profile.hidden, tp if sequence_parallel else 1)
    blocks = [PartBytes(block, min(output, block), block)] * profile.num_blocks
    return [PartBytes(before, before, before), *blocks, PartBytes(after, after, after)]


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
