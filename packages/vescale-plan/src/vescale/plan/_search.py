"""Choose a plan: enumerate the layouts, refuse invalid ones, and return the first that fits memory.

The order of preference puts the least communication first; it is the sort key of `_preference`:

1. tensor parallelism inside one host before tensor parallelism across hosts (it communicates in every layer);
2. a pipeline with a bubble of at most a quarter before one with a larger bubble;
3. few model-parallel ranks (tp * pp): data parallelism overlaps its communication with backward;
4. among equals a small tp, then a low ZeRO stage, then few micro-batches.

A layout is refused if

* tp does not divide heads, key/value heads, experts or the feed-forward size;
* there are fewer blocks than stages;
* the batch does not divide;
* the fullest rank exceeds the memory limit.

The table has the reason. With pp > 1 only the largest allowed number of micro-batches is considered: it has the
smallest bubble and the smallest activations. With pp = 1 the numbers are considered from 1 upwards (gradient
accumulation).

The search is deterministic and exhaustive; it takes milliseconds for 8 and about a second for 1,024 devices. It models
memory, not time.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from torch import nn

from ._checked import Count, checked
from ._memory import Layout, StageMemory, estimate_memory, stage_blocks, stage_of
from ._profile import ModelProfile, profile
from ._table import CHOSEN, FITS, REFUSED, Candidate, render
from ._units import format_bytes
from .cluster import Cluster, Constraints
from .plan import Plan

_MAX_BUBBLE = 0.25


class NoPlanFitsError(ValueError):
    """Raised if no layout satisfies cluster and constraints.

    Attributes:
        table: every considered layout, with the reason of its refusal.
    """

    def __init__(self, message: str, table: Sequence[Candidate]) -> None:
        super().__init__(message)
        self.table = tuple(table)

    @checked
    def explain(self, *, max_rows: Count = 40) -> str:
        """Return the message and the table of refused layouts."""
        return f"{self}\n{render(self.table, max_rows=max_rows)}"


@checked
def generate_plan(model: nn.Module | ModelProfile, cluster: Cluster, constraints: Constraints) -> Plan:
    """Choose degrees, ZeRO stage and micro-batches for a model on a cluster.

    Args:
        model: an ``nn.Module`` (real, meta or deferred) or its `ModelProfile`.
        cluster: the devices; all of them are used.
        constraints: batch, sequence length, and fixed choices.

    Returns:
        The first plan in the order of preference with a fullest rank within ``cluster.memory_bytes *
        constraints.memory_fraction``. ``print(plan)`` shows it, ``print(plan.explain())`` the table.

    Raises:
        NoPlanFitsError: (a `ValueError`) no plan fits; the text has the nearest miss, ``error.explain()`` the table.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, batch_first=True), 12)
        >>> run = Constraints(global_batch_size=16, sequence_length=512)
        >>> plan = generate_plan(model, Cluster(8, memory_bytes=4 * 2**30), run)
        >>> (plan.dp, plan.tp, plan.pp)
        (8, 1, 1)
    """
    found = model if isinstance(model, ModelProfile) else profile(model)
    limit = int(cluster.memory_bytes * constraints.memory_fraction)
    table: list[Candidate] = []
    chosen: tuple[Layout, tuple[StageMemory, ...]] | None = None
    for layout, reason in _enumerate(found, cluster, constraints):
        if reason:
            table.append(Candidate(layout, REFUSED, reason))
            continue
        stages = _estimate(found, layout, constraints)
        worst = max(stage.total for stage in stages)
        if worst > limit:
            table.append(Candidate(layout, REFUSED, f"{format_bytes(worst - limit)} over the limit", worst))
        elif chosen is None:
            chosen = layout, stages
            table.append(Candidate(layout, CHOSEN, bytes_per_rank=worst))
        else:
            table.append(Candidate(layout, FITS, bytes_per_rank=worst))
    if chosen is None:
        raise NoPlanFitsError(_nearest_miss(table, cluster, constraints, limit), table)
    layout, stages = chosen
    return Plan(
        **dataclasses.asdict(layout),
        device=cluster.device,
        memory=stages,
        limit_bytes=limit,
        table=tuple(table),
    )


def _estimate(found: ModelProfile, layout: Layout, constraints: Constraints) -> tuple[StageMemory, ...]:
    return estimate_memory(
        found,
        layout,
        global_batch_size=constraints.global_batch_size,
        sequence_length=constraints.sequence_length,
        state=constraints.state_bytes,
    )


def _enumerate(found: ModelProfile, cluster: Cluster, constraints: Constraints) -> list[tuple[Layout, str]]:
    """Return every layout with the reason of its refusal ("" = none so far), in the order of preference."""
    rows: list[tuple[Layout, str]] = []
    for dp, tp, pp in degrees(cluster.num_devices):
        base = Layout(dp=dp, tp=tp, pp=pp, schedule=constraints.schedule)
        fixed = {"dp": constraints.dp, "tp": constraints.tp, "pp": constraints.pp}
        if any(value not in (None, getattr(base, name)) for name, value in fixed.items()):
            continue
        reason = _refuse(found, base, constraints)
        if reason:
            rows.append((base, reason))
        else:
            rows.extend((layout, "") for layout in _choices(base, constraints))
    return sorted(rows, key=lambda row: _preference(row[0], cluster))


def degrees(num_devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield every (dp, tp, pp) with ``dp * tp * pp == num_devices``, in ascending order of tp, then pp."""
    for tp in divisors(num_devices):
        for pp in divisors(num_devices // tp):
            yield num_devices // tp // pp, tp, pp


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def _refuse(found: ModelProfile, layout: Layout, constraints: Constraints) -> str:
    """Return the reason to refuse these degrees for every ZeRO stage and number of micro-batches, or ""."""
    if layout.pp > max(found.num_blocks, 1):
        return f"{found.num_blocks} blocks cannot fill {layout.pp} stages"
    if constraints.zero == 3 and (tied := _tied_across_stages(found, layout.pp)):
        return f"{tied} is tied to a parameter of another stage, which stages cannot share with zero = 3"
    if layout.tp > 1 and found.tp_refusal:
        return found.tp_refusal
    if layout.tp > 1 and not found.heads:
        return "no attention heads found: give them with dataclasses.replace(profile(model), heads=..., kv_heads=...)"
    divided = {
        "attention heads": found.heads,
        "key/value heads": found.kv_heads,
        "experts": found.experts,  # tp distributes full experts, so their size does not need to divide
        "feed-forward size": 0 if found.experts else found.ffn,
    }
    for name, count in divided.items():
        if count % layout.tp:
            return f"{count} {name} are not divisible by tp = {layout.tp}"
    pieces = constraints.num_microbatches or 1
    if constraints.global_batch_size % (layout.dp * pieces):
        times = f" * micro-batches = {layout.dp * pieces}" if pieces > 1 else f" = {layout.dp}"
        return f"global batch {constraints.global_batch_size} is not divisible by dp{times}"
    if constraints.sequence_parallel and layout.tp > 1 and constraints.sequence_length % layout.tp:
        return f"sequence length {constraints.sequence_length} is not divisible by tp = {layout.tp}"
    return ""


def _tied_across_stages(found: ModelProfile, pp: int) -> str:
    """Return the name of a parameter used by several stages, or ""."""
    blocks = stage_blocks(found.num_blocks, pp)
    used_by = ((info.fqn, {stage_of(position, blocks) for position in info.positions}) for info in found.parameters)
    return next((fqn for fqn, stages in used_by if len(stages) > 1), "")


def _choices(base: Layout, constraints: Constraints) -> Iterator[Layout]:
    """Yield the layouts of given degrees: ZeRO stages with an effect, and useful numbers of micro-batches."""
    stages = (0, 1, 2) if base.dp > 1 else (0,)
    if constraints.zero is not None:
        stages = (constraints.zero,)
    divides = constraints.sequence_length % base.tp == 0
    sequence_parallel = base.tp > 1 and (
        divides if constraints.sequence_parallel is None else constraints.sequence_parallel
    )
    for zero in stages:
        for pieces in _microbatch_choices(base, constraints):
            yield dataclasses.replace(base, zero=zero, num_microbatches=pieces, sequence_parallel=sequence_parallel)


def _microbatch_choices(base: Layout, constraints: Constraints) -> list[int]:
    if constraints.num_microbatches is not None:
        return [constraints.num_microbatches]
    per_rank = constraints.global_batch_size // base.dp
    allowed = [pieces for pieces in divisors(per_rank) if pieces <= constraints.max_microbatches]
    return allowed if base.pp == 1 else allowed[-1:]


def _preference(layout: Layout, cluster: Cluster) -> tuple:
    return (
        layout.tp > cluster.devices_per_host,
        layout.bubble > _MAX_BUBBLE,
        layout.tp * layout.pp,
        layout.tp,
        layout.zero,
        layout.num_microbatches,
    )


def _nearest_miss(table: Sequence[Candidate], cluster: Cluster, constraints: Constraints, limit: int) -> str:
    """Return the text of the layout nearest to the limit, or the refusals if none reached the estimate."""
    counted = [(each.bytes_per_rank, each) for each in table if each.bytes_per_rank is not None]
    if counted:
        num_bytes, nearest = min(counted, key=lambda pair: pair[0])
        share = f"{constraints.memory_fraction:g} of {format_bytes(cluster.memory_bytes)}"
        return (
            f"expected a plan for {cluster.num_devices} {cluster.device} devices with at most {format_bytes(limit)} "
            f"per rank ({share}), got {format_bytes(num_bytes)} for the nearest, {nearest.layout}: {nearest.reason}; "
            "use more devices, a smaller batch or sequence, or fewer fixed choices"
        )
    if not table:
        fixed = ", ".join(f"{name}={value}" for name in ("dp", "tp", "pp") if (value := getattr(constraints, name)))
        return (
            f"expected degrees with the product {cluster.num_devices}, the number of devices, got {fixed}; leave one "
            "of them to the search, or change the number of devices"
        )
    reasons = "; ".join(f"dp={row.layout.dp} tp={row.layout.tp} pp={row.layout.pp}: {row.reason}" for row in table[:8])
    more = f"; and {len(table) - 8} more" if len(table) > 8 else ""
    return (
        f"expected a plan for {cluster.num_devices} devices, got only refused layouts: {reasons}{more}; change the "
        "batch, the number of devices or the fixed choices"
    )
