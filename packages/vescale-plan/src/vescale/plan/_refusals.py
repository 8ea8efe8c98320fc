"""Why a layout is refused: a plan of the search runs as it is.

| what | reason |
|---|---|
| any field | ``ModelProfile.refusals`` has a reason for it: what mixes rows, with micro-batches; no module plan, with tp |
| pipeline | fewer blocks than stages; a parameter that stages share is sharded by ZeRO 3 |
| tensor parallelism | where only sizes are known: query heads or the feed-forward that tp does not divide. Key-value heads that are fewer than ranks are repeated |
| experts | their number is not divided by the ranks that spread them |
| batch | rows that dp and micro-batches do not divide; a sequence that tp does not divide |
"""  # noqa: E501 - a table

from __future__ import annotations

from ._layout import Layout
from ._profile import ModelProfile
from ._states import ranks_of_positions
from .cluster import Constraints

_NONE = {"sequence_parallel": False, "zero": 0}


def refuse(found: ModelProfile, layout: Layout, constraints: Constraints, *, by_sizes: bool = True) -> str:
    """Return the reason to refuse a layout before its memory is counted, or "".

    Args:
        found: the model, under the layout's degree of tensor parallelism.
        layout: the layout.
        constraints: those of the run.
        by_sizes: whether the model's sizes say which degrees of tensor parallelism it has; else its profile does.
    """
    return (
        _refuse_pipeline(found, layout)
        or _refuse_fields(found, layout)
        or (_refuse_tensor_parallelism(found, layout) if by_sizes else "")
        or _refuse_experts(found, layout, over_tp=by_sizes or found.spreads_experts)
        or _refuse_batch(layout, constraints)
    )


def _refuse_fields(found: ModelProfile, layout: Layout) -> str:
    for name, reason in found.refusals.items():
        if getattr(layout, name) != _NONE.get(name, 1):
            return reason
    return ""


def _refuse_pipeline(found: ModelProfile, layout: Layout) -> str:
    stages = layout.pp * layout.stages
    if layout.pp > 1 and stages > found.num_blocks:
        return f"{found.num_blocks} blocks cannot fill {stages} stages"
    if layout.zero == 3 and layout.pp > 1 and (tied := tied_across_ranks(found, layout)):
        return f"{tied} is tied to a parameter of another stage, which stages cannot share with zero = 3"
    return ""


def tied_across_ranks(found: ModelProfile, layout: Layout) -> str:
    """Return the name of a parameter used by several ranks of a pipeline, or ""."""
    tied = [info for info, _ in found.kinds if len(info.positions) > 1]
    ranks = ranks_of_positions(found.num_blocks, layout) if tied else {}
    return next(
        (info.fqn for info in tied if len({ranks[min(each, found.num_blocks)] for each in info.positions}) > 1), ""
    )


def _refuse_tensor_parallelism(found: ModelProfile, layout: Layout) -> str:
    if layout.tp == 1:
        return ""
    if not found.heads:
        return "no attention heads found: give them with dataclasses.replace(profile(model), heads=..., kv_heads=...)"
    if found.heads % layout.tp:
        return f"{found.heads} attention heads are not divisible by tp = {layout.tp}"
    if found.kv_heads % layout.tp and found.heads % max(found.kv_heads, 1):
        return f"{found.kv_heads} key/value heads do not divide {found.heads} heads, so tp = {layout.tp} has no copies"
    if not found.experts and found.ffn % layout.tp:
        return f"{found.ffn} feed-forward size are not divisible by tp = {layout.tp}"
    return ""


def _refuse_experts(found: ModelProfile, layout: Layout, *, over_tp: bool) -> str:
    if not found.experts:
        return f"ep = {layout.ep} for a model without experts" if layout.ep > 1 else ""
    ranks = layout.ep * (layout.tp if layout.etp == 1 and over_tp else 1)
    if found.experts % ranks:
        over = f"tp = {layout.tp}" if layout.ep == 1 else f"ep = {layout.ep} times tp = {layout.tp}"
        return f"{found.experts} experts are not divisible by {over}"
    return ""


def _refuse_batch(layout: Layout, constraints: Constraints) -> str:
    pieces = layout.num_microbatches
    if constraints.global_batch_size % (layout.dp * pieces):
        times = f" * micro-batches = {layout.dp * pieces}" if pieces > 1 else f" = {layout.dp}"
        return f"global batch {constraints.global_batch_size} is not divisible by dp{times}"
    if layout.sequence_parallel and constraints.sequence_length % layout.tp:
        return f"sequence length {constraints.sequence_length} is not divisible by tp = {layout.tp}"
    return ""
