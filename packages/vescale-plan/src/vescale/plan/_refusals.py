"""Why a layout is refused: a plan of the search runs as it is.

| what | reason |
|---|---|
| pipeline | fewer blocks than stages; a parameter that stages share is sharded by ZeRO 3 |
| tensor parallelism | no module plan; query heads or the feed-forward that tp does not divide. Key-value heads that are fewer than ranks are repeated |
| experts | their number is not divided by the ranks that spread them |
| batch | rows that dp and micro-batches do not divide; what mixes rows, with micro-batches; a sequence that tp does not divide |
"""  # noqa: E501 - a table

from __future__ import annotations

from ._layout import Layout
from ._profile import ModelProfile
from ._schedules import rank_of_stage, stage_blocks, stage_of
from .cluster import Constraints


def refuse(found: ModelProfile, layout: Layout, constraints: Constraints) -> str:
    """Return the reason to refuse a layout before its memory is counted, or ""."""
    return (
        _refuse_pipeline(found, layout)
        or _refuse_tensor_parallelism(found, layout)
        or _refuse_experts(found, layout)
        or _refuse_batch(found, layout, constraints)
    )


def _refuse_pipeline(found: ModelProfile, layout: Layout) -> str:
    stages = layout.pp * layout.stages
    if layout.pp > 1 and stages > found.num_blocks:
        return f"{found.num_blocks} blocks cannot fill {stages} stages"
    if layout.zero == 3 and layout.pp > 1 and (tied := tied_across_ranks(found, layout)):
        return f"{tied} is tied to a parameter of another stage, which stages cannot share with zero = 3"
    return ""


def tied_across_ranks(found: ModelProfile, layout: Layout) -> str:
    """Return the name of a parameter used by several ranks of a pipeline, or ""."""
    stages = stage_blocks(found.num_blocks, layout.pp * layout.stages)
    for info in found.parameters:
        ranks = {rank_of_stage(stage_of(each, stages), layout.pp, layout.schedule) for each in info.positions}
        if len(ranks) > 1:
            return info.fqn
    return ""


def _refuse_tensor_parallelism(found: ModelProfile, layout: Layout) -> str:
    if layout.tp == 1:
        return ""
    if found.tp_refusal:
        return found.tp_refusal
    if not found.heads:
        return "no attention heads found: give them with dataclasses.replace(profile(model), heads=..., kv_heads=...)"
    if found.heads % layout.tp:
        return f"{found.heads} attention heads are not divisible by tp = {layout.tp}"
    if found.kv_heads % layout.tp and found.heads % max(found.kv_heads, 1):
        return f"{found.kv_heads} key/value heads do not divide {found.heads} heads, so tp = {layout.tp} has no copies"
    if not found.experts and found.ffn % layout.tp:
        return f"{found.ffn} feed-forward size are not divisible by tp = {layout.tp}"
    return ""


def _refuse_experts(found: ModelProfile, layout: Layout) -> str:
    if not found.experts:
        return f"ep = {layout.ep} for a model without experts" if layout.ep > 1 else ""
    ranks = layout.ep * (layout.tp if layout.etp == 1 else 1)
    if found.experts % ranks:
        over = f"tp = {layout.tp}" if layout.ep == 1 else f"ep = {layout.ep} times tp = {layout.tp}"
        return f"{found.experts} experts are not divisible by {over}"
    return ""


def _refuse_batch(found: ModelProfile, layout: Layout, constraints: Constraints) -> str:
    pieces = layout.num_microbatches
    if constraints.global_batch_size % (layout.dp * pieces):
        times = f" * micro-batches = {layout.dp * pieces}" if pieces > 1 else f" = {layout.dp}"
        return f"global batch {constraints.global_batch_size} is not divisible by dp{times}"
    if pieces > 1 and found.microbatch_refusal:
        return found.microbatch_refusal
    if layout.sequence_parallel and constraints.sequence_length % layout.tp:
        return f"sequence length {constraints.sequence_length} is not divisible by tp = {layout.tp}"
    return ""
