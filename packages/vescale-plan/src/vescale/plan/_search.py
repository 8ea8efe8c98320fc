"""Choose a plan: enumerate the layouts, refuse those that cannot run, and return the first that fits memory.

The order of preference puts the least communication first, and recomputation after everything that does without it;
it is the sort key of `_preference`:

1. tensor parallelism inside one host before tensor parallelism across hosts (it communicates in every layer);
2. a pipeline with a bubble of at most a quarter before one with a larger bubble;
3. no recomputation before recomputation of every second block, and that before all blocks;
4. few model-parallel ranks (tp * pp): data parallelism overlaps its communication with backward;
5. among equals a small tp, experts over few ranks, a low ZeRO stage, then few micro-batches.

A layout is refused if it cannot run (`_refusals.py`) or if the fullest rank exceeds the memory limit; the table has
the reason. With pp > 1 only the largest allowed number of micro-batches is considered: it has the smallest bubble and
the smallest activations. With pp = 1 the numbers are considered from 1 upwards (gradient accumulation). Recomputation
is considered where nothing without it has fitted, and experts over data-parallel ranks where no fewer ranks have.

What tensor parallelism makes of a model may have to be found out for each degree (`generate_plan`, argument
``tensor_parallel``). That is asked for a degree when the first of its layouts is considered that would fit if ranks
shared all that they may, unless a layout before it fits: such layouts stay open in the table.

The search is deterministic and exhaustive. It models memory, not time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._checked import CheckedInside, Count, checked
from ._layout import Layout
from ._measure.build import build
from ._memory import Estimator
from ._profile import Model, ModelProfile, profile
from ._refusals import refuse
from ._table import CHOSEN, FITS, OPEN, REFUSED, Candidate, render
from ._units import format_bytes
from .cluster import Cluster, Constraints
from .plan import Plan

_MAX_BUBBLE = 0.25
_RECOMPUTE = (None, 2, 1)
_OPEN = "a layout before it fits, so its tensor parallelism was not examined"

#: The profile of a model under each degree of tensor parallelism but 1.
TensorParallel = Mapping[int, ModelProfile] | Callable[[int], ModelProfile]


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
def generate_plan(
    model: CheckedInside[Model],
    cluster: Cluster,
    constraints: Constraints,
    *,
    tensor_parallel: TensorParallel | None = None,
) -> Plan:
    """Choose degrees, ZeRO stage, recomputation and micro-batches for a model on a cluster.

    Args:
        model: an ``nn.Module`` (real, meta or deferred), a config of Hugging Face, a class with arguments, as
            ``functools.partial(GPT, config)``, or a `ModelProfile`.
        cluster: the devices; all of them are used.
        constraints: batch, sequence length, and fixed choices.
        tensor_parallel: profiles of the model under degrees of tensor parallelism, with the parameters that each
            shards, and ``refusals``; a mapping, or a function that takes a degree above 1, which is called where no
            layout before it fits. ``None``: the profile of the model holds for all degrees that divide its heads and
            feed-forward.

    Returns:
        The first plan in the order of preference with a fullest rank within ``cluster.memory_bytes *
        constraints.memory_fraction``. ``print(plan)`` shows it, ``print(plan.explain())`` the table.

    Raises:
        NoPlanFitsError: (a `ValueError`) no plan fits; the text has the nearest miss, ``error.explain()`` the table.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> with torch.device("meta"):
        ...     model = nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, batch_first=True), 12)
        >>> run = Constraints(global_batch_size=16, sequence_length=512)
        >>> plan = generate_plan(model, Cluster(8, memory_bytes=4 * 2**30), run)
        >>> (plan.dp, plan.tp, plan.pp)
        (8, 1, 1)
    """
    found = model
    if not isinstance(model, ModelProfile):
        found = profile(build("generate_plan", model), sequence_length=constraints.sequence_length)
    limit = int(cluster.memory_bytes * constraints.memory_fraction)
    search = _Search(_Degrees(found, tensor_parallel, constraints), cluster, constraints, limit)
    search.run()
    table = search.table()
    if search.chosen is None:
        raise NoPlanFitsError(_nearest_miss(table, cluster, constraints, limit), table)
    return Plan(
        **dataclasses.asdict(search.chosen),
        mode=constraints.mode,
        device=cluster.device,
        memory=search.degrees.estimator(search.chosen.tp).stages(search.chosen),
        limit_bytes=limit,
        table=table,
    )


class _Degrees:
    """What is known of a model under each degree of tensor parallelism, see `generate_plan`."""

    def __init__(self, whole: ModelProfile, given: TensorParallel | None, constraints: Constraints) -> None:
        self.whole, self.by_sizes, self._constraints = whole, given is None, constraints
        self._ask = given if callable(given) else None
        self._profiles = {1: whole, **(given if isinstance(given, Mapping) else {})}
        self._estimators: dict[int, Estimator] = {}

    def is_known(self, tp: int) -> bool:
        """Return whether the profile of a degree costs no time."""
        return self._ask is None or tp in self._profiles

    def profile(self, tp: int) -> ModelProfile:
        """Return the profile of a degree."""
        if tp not in self._profiles:
            if self._ask is not None:
                found = self._ask(tp)
            elif self.by_sizes:
                found = self.whole
            else:
                found = dataclasses.replace(self.whole, refusals={"tp": f"no profile was given for tp = {tp}"})
            self._profiles[tp] = found
        return self._profiles[tp]

    def estimator(self, tp: int) -> Estimator:
        """Return the estimator of a degree."""
        if tp not in self._estimators:
            self._estimators[tp] = self._estimator(self.profile(tp))
        return self._estimators[tp]

    def least(self, tp: int) -> Estimator:
        """Return an estimator of no more bytes than a degree needs: it shares what its divisors share, or less."""
        known = [each for each in self._profiles if each > 1 and tp % each == 0]
        known = [each for each in known if "tp" not in self._profiles[each].refusals]
        return self.estimator(max(known)) if known else self._all_shared

    @functools.cached_property
    def _all_shared(self) -> Estimator:
        sharded = tuple(dataclasses.replace(info, sharded=True) for info in self.whole.parameters)
        return self._estimator(dataclasses.replace(self.whole, parameters=sharded))

    def _estimator(self, found: ModelProfile) -> Estimator:
        return Estimator(
            found,
            global_batch_size=self._constraints.global_batch_size,
            sequence_length=self._constraints.sequence_length,
            state=self._constraints.state_bytes,
        )


class _Search:
    """One search: the layouts that were considered, and the first that fits."""

    def __init__(self, degrees: _Degrees, cluster: Cluster, constraints: Constraints, limit: int) -> None:
        self.degrees, self.cluster, self.constraints, self.limit = degrees, cluster, constraints, limit
        self.rows: list[Candidate] = []
        self.open: dict[Any, Candidate] = {}
        self.has_fit = False
        self.chosen: Layout | None = None

    def run(self) -> None:
        """Consider all layouts, in classes of the first two preferences, with more and more recomputation."""
        bases = list(self._bases())
        wanted = self.constraints.recompute
        levels = _RECOMPUTE if isinstance(wanted, str) else (wanted,)
        layouts = [layout for base in bases for layout in self._choices(base)]
        for kind in sorted({_preference(layout, self.cluster)[:2] for layout in layouts}):
            of_kind = [layout for layout in layouts if _preference(layout, self.cluster)[:2] == kind]
            for level in levels:
                if self._consider([dataclasses.replace(layout, recompute=level) for layout in of_kind]):
                    break

    def _consider(self, layouts: Sequence[Layout]) -> bool:
        """Add the layouts to the table, and return whether one of them fits."""
        fits: set[Any] = set()
        refused: set[Any] = set()
        for layout in sorted(layouts, key=lambda layout: _preference(layout, self.cluster)):
            degrees = layout.dp, layout.tp, layout.pp
            if layout.ep > 1 and self.constraints.ep is None and degrees in fits:
                continue  # fewer ranks for experts were enough
            if self.has_fit and not self.degrees.is_known(layout.tp):
                self.open.setdefault(degrees, Candidate(layout, OPEN, _OPEN))
                continue
            layout, reason = self._refuse(layout)
            if reason:
                if (degrees, reason) not in refused:
                    self.rows.append(Candidate(layout, REFUSED, reason))
                refused.add((degrees, reason))
                continue
            worst = self.degrees.estimator(layout.tp).fullest(layout)
            if worst > self.limit:
                over = f"{format_bytes(worst - self.limit)} over the limit"
                self.rows.append(Candidate(layout, REFUSED, over, worst))
                continue
            fits.add(degrees)
            self.has_fit = True
            self.rows.append(Candidate(layout, FITS, bytes_per_rank=worst))
        return bool(fits)

    def _refuse(self, layout: Layout) -> tuple[Layout, str]:
        """Return a layout as it is possible, and the reason to refuse it before its memory is counted, or ""."""
        by_sizes = self.degrees.by_sizes
        if not self.degrees.is_known(layout.tp):
            layout = self._as_possible(layout, self.degrees.whole)
            if reason := refuse(self.degrees.whole, layout, self.constraints, by_sizes=by_sizes):
                return layout, reason
            if self.degrees.least(layout.tp).fullest(layout) > self.limit:
                return layout, f"over the limit even if tp = {layout.tp} shared all that it may"
        found = self.degrees.profile(layout.tp)
        layout = self._as_possible(layout, found)
        return layout, refuse(found, layout, self.constraints, by_sizes=by_sizes)

    def _as_possible(self, layout: Layout, found: ModelProfile) -> Layout:
        """Return a layout without sequence parallelism where it is neither possible nor asked for."""
        is_free = layout.sequence_parallel and self.constraints.sequence_parallel is None
        if is_free and "sequence_parallel" in found.refusals:
            return dataclasses.replace(layout, sequence_parallel=False)
        return layout

    def table(self) -> tuple[Candidate, ...]:
        """Return the rows in the order of preference, with the first that fits marked as chosen."""
        rows = sorted([*self.rows, *self.open.values()], key=lambda row: _preference(row.layout, self.cluster))
        for index, row in enumerate(rows):
            if row.verdict == FITS:
                self.chosen = row.layout
                rows[index] = dataclasses.replace(row, verdict=CHOSEN)
                break
        return tuple(rows)

    def _bases(self) -> Iterator[Layout]:
        """Yield the degrees that use all devices, as far as they are not fixed otherwise."""
        fixed = {name: getattr(self.constraints, name) for name in ("dp", "tp", "pp")}
        for dp, tp, pp in degrees(self.cluster.num_devices):
            if any(value not in (None, own) for value, own in zip(fixed.values(), (dp, tp, pp), strict=True)):
                continue
            yield from self._expert_degrees(dp, tp, pp)

    def _expert_degrees(self, dp: int, tp: int, pp: int) -> Iterator[Layout]:
        constraints = self.constraints
        shards = dp // constraints.dp_replicate if dp % constraints.dp_replicate == 0 else 0
        if not shards:
            return
        whole = self.degrees.whole
        experts = 1 if "ep" in whole.refusals else max(whole.experts, 1)
        chosen = [constraints.ep] if constraints.ep else divisors(math.gcd(shards, experts))
        for ep in chosen:
            if shards % ep == 0:
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    dp_replicate=constraints.dp_replicate,
                    schedule=constraints.schedule,
                    stages_per_rank=constraints.stages_per_rank,
                    param_dtype=constraints.param_dtype,
                )

    def _choices(self, base: Layout) -> Iterator[Layout]:
        """Yield the layouts of given degrees: ZeRO stages with an effect, and useful numbers of micro-batches."""
        constraints = self.constraints
        stages = (0, 1, 2, 3) if base.dp // base.dp_replicate > 1 else (0,)
        if constraints.zero is not None:
            stages = (constraints.zero,)
        divides = constraints.sequence_length % base.tp == 0
        wanted = divides if constraints.sequence_parallel is None else constraints.sequence_parallel
        for zero in stages:
            if base.dp_replicate > 1 and zero == 0:
                continue
            for pieces in _microbatch_choices(base, constraints):
                yield dataclasses.replace(
                    base, zero=zero, num_microbatches=pieces, sequence_parallel=base.tp > 1 and wanted
                )


def degrees(num_devices: int) -> Iterator[tuple[int, int, int]]:
    """Yield every (dp, tp, pp) with ``dp * tp * pp == num_devices``, in ascending order of tp, then pp."""
    for tp in divisors(num_devices):
        for pp in divisors(num_devices // tp):
            yield num_devices // tp // pp, tp, pp


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def _microbatch_choices(base: Layout, constraints: Constraints) -> list[int]:
    if constraints.num_microbatches is not None:
        return [constraints.num_microbatches]
    if constraints.global_batch_size % base.dp:
        return [1]  # refused
    per_rank = constraints.global_batch_size // base.dp
    allowed = [pieces for pieces in divisors(per_rank) if pieces <= constraints.max_microbatches]
    return allowed if base.pp == 1 else allowed[-1:]


def _preference(layout: Layout, cluster: Cluster) -> tuple[Any, ...]:
    return (
        layout.tp > cluster.devices_per_host,
        layout.bubble > _MAX_BUBBLE,
        _RECOMPUTE.index(layout.recompute) if layout.recompute in _RECOMPUTE else 1,
        layout.tp * layout.pp,
        layout.tp,
        layout.ep,
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
