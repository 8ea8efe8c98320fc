"""Search for a schedule: list scheduling for given costs and memory, improved along the critical path.

1. Candidates are the schedules of :mod:`vescale.pipe.schedules` for the placement, and list schedules: every rank runs,
   of what it can run within its memory, the action that is due first. The due times are those of a steady state, in
   which each stage runs one micro-batch per period: ``m * period + offset(stage, kind)``. Offsets are drawn around the
   times of a single micro-batch; weight gradients are due later, or fill gaps.
2. The best ones are improved. The makespan is that of the critical path, the chain of actions without a gap from the
   first to the last, on one rank or over a dependency. Only another order within a part of it on one rank can shorten
   it, so these are tried: first and last two exchanged, one moved to the other end, a weight gradient moved out.

Random numbers are those of a generator with a fixed seed, and the effort is counted in actions, not in seconds: all
ranks find the same schedule.

Sources: list scheduling, Graham 1969; moves along the critical path, Nowicki and Smutnicki 1996 (job shop).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .._checked import Count, NonNegative, checked
from .actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from .errors import ScheduleError
from .simulate import Costs, simulate

__all__ = ["Placement", "home_of", "search"]

Placement = Literal["loop", "V"]

KINDS = FORWARD, INPUT_GRAD, WEIGHT_GRAD
F, I, W = range(3)  # noqa: E741
EPSILON = 1e-9
LATE_START, NEW_BASE = 300, 0.3  # moves without gain before a return to the best order; part of draws that are new
TRIED = 14  # moves of one critical path
CLOSE = 1.1  # makespan of a second schedule to improve, as a multiple of that of the best one

Part = tuple[int, int, int]  # kind, stage, micro-batch
Rows = list[list[Part]]


def home_of(num_ranks: int, stages_per_rank: int, placement: Placement) -> list[int]:
    """Return the rank of every stage: 0 .. p-1 again and again, or, placed as a V, there and back.

    Example:
        >>> home_of(2, 2, "loop"), home_of(2, 2, "V")
        ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    there = list(range(num_ranks))
    back = there[::-1] if placement == "V" else there
    return [rank for n in range(stages_per_rank) for rank in (back if n % 2 else there)]


@dataclass
class Problem:
    """What to schedule.

    Args:
        home: rank of every stage.
        num_microbatches: m.
        lengths: per kind and stage, the duration.
        latency: time of a hop between ranks.
        weights: per stage, its part of the memory of a rank.
        limit: memory of each rank.
    """

    home: list[int]
    num_microbatches: int
    lengths: list[list[float]]
    latency: float
    weights: list[float]
    limit: float

    def __post_init__(self) -> None:
        self.num_ranks, self.num_stages = max(self.home) + 1, len(self.home)
        self.stages = [[s for s, rank in enumerate(self.home) if rank == r] for r in range(self.num_ranks)]
        self.num_actions = 3 * self.num_stages * self.num_microbatches

    def hop(self, stage: int, other: int) -> float:
        """Return the latency from one stage to another."""
        return self.latency if self.home[stage] != self.home[other] else 0.0

    def fits(self, row: Iterable[Part]) -> bool:
        """Return whether the activations of a rank stay within its memory."""
        live = 0.0
        for kind, stage, _ in row:
            if kind == F:
                live += self.weights[stage]
                if live > self.limit + EPSILON:
                    return False
            elif kind == W:
                live -= self.weights[stage]
        return True

    def schedule(self, rows: Rows) -> Schedule:
        """Return the schedule of an order."""
        ranks = tuple(tuple(Action(stage, KINDS[kind], m) for kind, stage, m in row) for row in rows)
        return Schedule(self.num_stages, self.num_microbatches, ranks)


def rows_of(schedule: Schedule) -> Rows:
    """Return the order of a schedule; a whole backward is its two parts, one after the other."""
    rows: Rows = []
    for rank in range(schedule.num_ranks):
        row: list[Part] = []
        for action in schedule.actions(rank):
            kinds = {FORWARD: (F,), INPUT_GRAD: (I,), WEIGHT_GRAD: (W,)}.get(action.kind, (I, W))
            row += [(kind, action.stage, action.microbatch) for kind in kinds]
        rows.append(row)
    return rows


def _one_by_one(problem: Problem) -> Rows:
    """Return the order with the fewest activations: one micro-batch after the other."""
    return [
        [
            part
            for m in range(problem.num_microbatches)
            for part in [*((F, s, m) for s in own), *((kind, s, m) for s in own[::-1] for kind in (I, W))]
        ]
        for own in problem.stages
    ]


# --- list schedules ---


@dataclass
class Due:
    """When actions are due, ``m * period + offsets[kind][stage]``, and memory that is kept for other stages."""

    period: float
    offsets: list[list[float]]
    room: list[float]


def _drawn(problem: Problem, generator: random.Random) -> Due:
    lengths, num_stages = problem.lengths, problem.num_stages
    turns = range(math.ceil(num_stages / problem.num_ranks))
    slack = [[generator.uniform(0.5, 2.5) for _ in turns] for _ in (F, I)]  # how much slower than alone
    forward, back = [0.0], [0.0]
    for stage in range(num_stages - 1):
        step = lengths[F][stage] + problem.hop(stage, stage + 1)
        forward.append(forward[-1] + slack[F][stage // problem.num_ranks] * step)
        after = num_stages - 1 - stage
        step = lengths[I][after] + problem.hop(after, after - 1)
        back.append(back[-1] + slack[I][after // problem.num_ranks] * step)
    longest = max(sum(lengths[k][s] for k in (F, I, W) for s in own) for own in problem.stages)
    turn = forward[-1] + longest * generator.uniform(-3.0, 2.0)
    backward = [turn + x for x in back[::-1]]
    late = generator.choice([0.0, longest * generator.uniform(0.0, 13.0), math.inf])
    step = generator.choice([0.0, 1.0, 2.0, 3.0])
    room = [0.0] * problem.num_stages
    for own in problem.stages:
        for position, stage in enumerate(own[:-1]):
            room[stage] = step * problem.weights[stage] * (len(own) - 1 - position) / (len(own) - 1)
    period = longest * generator.uniform(0.1, 1.3)
    return Due(period, [forward, backward, [x + late for x in backward]], room)


def _changed(due: Due, problem: Problem, generator: random.Random) -> Due:
    """Return due times near others: one offset, those of all stages after one, or of one turn, moved."""
    offsets = [list(row) for row in due.offsets]
    row, scale = generator.choice(offsets), problem.lengths[F][0] * generator.choice([0.3, 1.0, 3.0])
    delta, stage = generator.gauss(0.0, scale), generator.randrange(problem.num_stages)
    turn = stage // problem.num_ranks
    for s in generator.choice(
        [[stage], range(stage, problem.num_stages), [s for s in range(len(row)) if s // problem.num_ranks == turn]]
    ):
        row[s] += delta
    return Due(due.period * generator.choice([1.0, 1.0, 0.9, 1.1]), offsets, due.room)


def _list_schedule(problem: Problem, due: Due) -> tuple[float, Rows]:
    """Return the makespan and the order in which every rank runs what is due first; infinity if memory ends."""
    home, lengths, weights, limit = problem.home, problem.lengths, problem.weights, problem.limit + EPSILON
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    arrival = [[[math.inf] * num_microbatches for _ in range(num_stages)] for _ in range(2)]
    arrival[F][0] = [0.0] * num_microbatches
    counts = [[0] * num_stages for _ in range(3)]
    live, free_at = [0.0] * problem.num_ranks, [0.0] * problem.num_ranks
    rows: Rows = [[] for _ in range(problem.num_ranks)]
    events = [(0.0, rank) for rank in range(problem.num_ranks)]
    period, offsets, room = due.period, due.offsets, due.room
    left, end = problem.num_actions, 0.0
    while events:
        now, rank = heapq.heappop(events)
        if now < free_at[rank] - EPSILON:
            continue
        best, pick, wake = math.inf, None, math.inf
        late, fill = math.inf, None
        for stage in problem.stages[rank]:
            for kind in (F, I):
                m = counts[kind][stage]
                if m == num_microbatches or (kind == F and live[rank] + weights[stage] + room[stage] > limit):
                    continue
                at = arrival[kind][stage][m]
                if at <= now + EPSILON:
                    when = m * period + offsets[kind][stage]
                    if when < best:
                        best, pick = when, (kind, stage, m)
                elif at < wake:
                    wake = at
            m = counts[W][stage]
            if m < counts[I][stage] and (fill is None or m * period + offsets[W][stage] < late):
                late, fill = m * period + offsets[W][stage], (W, stage, m)
        if fill is not None and (pick is None or late < best):
            pick = fill
        if pick is None:
            if wake < math.inf:
                heapq.heappush(events, (wake, rank))
            continue
        kind, stage, m = pick
        counts[kind][stage] += 1
        done = free_at[rank] = now + lengths[kind][stage]
        live[rank] += weights[stage] * (1 - kind)  # F takes it, W frees it
        rows[rank].append(pick)
        end, left = max(end, done), left - 1
        heapq.heappush(events, (done, rank))
        last = stage == num_stages - 1
        if kind == F and last:
            arrival[I][stage][m] = done
        elif kind == F or (kind == I and stage > 0):
            other = stage + 1 - 2 * kind
            at = arrival[kind][other][m] = done + (problem.latency if home[other] != rank else 0.0)
            if home[other] != rank:
                heapq.heappush(events, (max(at, free_at[home[other]]), home[other]))
    return (end if left == 0 else math.inf), rows


# --- improvement along the critical path ---


class Timing:
    """When the actions of an order run.

    Attributes:
        makespan: the end of the last one; infinity if the order cannot run.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.rows, self._problem = rows, problem
        num_stages = problem.num_stages
        #: per rank and action: whether it began when a result of another stage arrived, later than its rank was free
        self._waited: list[list[bool]] = [[] for _ in rows]
        self._ends = [0.0] * len(rows)
        ends: list[dict[tuple[int, int], float]] = [{}, {}]
        hops, lengths, home = problem.latency, problem.lengths, problem.home
        waiting: dict[tuple[int, int, int], int] = {}
        ready, left = list(range(len(rows))), problem.num_actions
        while ready:
            rank = ready.pop()
            waited, now = self._waited[rank], self._ends[rank]
            for kind, stage, m in itertools.islice(rows[rank], len(waited), None):
                was_late = False
                if kind != W:
                    other = stage - 1 + 2 * kind
                    if 0 <= other < num_stages:
                        arrival = ends[kind].get((other, m))
                        if arrival is None:
                            waiting[kind, other, m] = rank
                            break
                        if home[other] != rank:
                            arrival += hops
                        if arrival > now:
                            now, was_late = arrival, True
                now += lengths[kind][stage]
                waited.append(was_late)
                left -= 1
                if kind != W:
                    ends[kind][stage, m] = now
                    if (kind, stage, m) in waiting:
                        ready.append(waiting.pop((kind, stage, m)))
            self._ends[rank] = now
        self.makespan = max(self._ends) if left == 0 else math.inf

    def critical_blocks(self) -> list[tuple[int, int, int]]:
        """Return rank, first and last position of each part of the critical path on one rank."""
        index = {part: (rank, at) for rank, row in enumerate(self.rows) for at, part in enumerate(row)}
        rank = max(range(len(self.rows)), key=self._ends.__getitem__)
        last = at = len(self.rows[rank]) - 1
        blocks = []
        while at >= 0:
            if self._waited[rank][at]:
                blocks.append((rank, at, last))
                kind, stage, m = self.rows[rank][at]
                rank, at = index[kind, stage - 1 + 2 * kind, m]
                last = at
            else:
                at -= 1
        return [*blocks, (rank, 0, last)]


def _moves(timing: Timing, generator: random.Random) -> list[tuple[int, int, int]]:
    """Return rank, position and new position of actions on the critical path, in random order."""
    moves = []
    for rank, first, last in timing.critical_blocks():
        if first == last:
            continue
        row = timing.rows[rank]
        moves += [(rank, last - 1, last), (rank, first, first + 1), (rank, last, first)]
        moves += [(rank, at, last) for at in range(first, last) if row[at][0] == W]
        low, high = sorted(generator.sample(range(first, last + 1), 2))
        moves += [(rank, low, high), (rank, high, low), (rank, last, low)]
    generator.shuffle(moves)
    return [move for move in moves[:TRIED] if move[1] != move[2]]


def _moved(row: list[Part], start: int, stop: int) -> list[Part] | None:
    """Return a row with one action moved; None if it passes one of its own stage or micro-batch that it must not."""
    kind, stage, m = row[start]
    low, high = min(start, stop), max(start, stop)
    for other, at, k in row[low : high + 1]:
        if at == stage and ((other == kind and k != m) or (k == m and other != kind)):
            return None
    changed = row[:start] + row[start + 1 :]
    changed.insert(stop, row[start])
    return changed


def _improve(problem: Problem, rows: Rows, effort: int, generator: random.Random) -> tuple[float, Rows]:
    """Return a makespan and an order at least as good, after moves that cost about so many actions to evaluate."""
    now = best = Timing(problem, rows)
    forbidden: dict[Part, int] = {}
    turn = since = 0
    while effort > 0 and since < 2 * LATE_START:
        turn += 1
        effort -= problem.num_actions // 4  # of the path itself
        chosen: tuple[Timing, Part] | None = None
        for rank, start, stop in _moves(now, generator):
            part = now.rows[rank][start]
            row = None if forbidden.get(part, 0) > turn else _moved(now.rows[rank], start, stop)
            if row is None or not problem.fits(row):
                continue
            found = Timing(problem, [*now.rows[:rank], row, *now.rows[rank + 1 :]])
            effort -= problem.num_actions
            if chosen is None or found.makespan < chosen[0].makespan:
                chosen = found, part
            if found.makespan < best.makespan - EPSILON or effort <= 0:
                break
        since += 1
        allowed = now.makespan + generator.choice([0.0, 0.0, 0.05, 0.2]) * problem.lengths[F][0]
        if chosen is not None and chosen[0].makespan <= allowed:
            now, part = chosen
            forbidden[part] = turn + generator.randint(3, 10)
        if now.makespan < best.makespan - EPSILON:
            best, since = now, 0
        elif since % LATE_START == 0:
            now = best
    return best.makespan, best.rows


# --- the search ---


@checked
def search(
    num_ranks: Count,
    num_microbatches: Count,
    *,
    costs: Costs,
    activations: NonNegative,
    stages_per_rank: Count,
    placement: Placement,
    candidates: Sequence[Schedule],
    effort: Count,
) -> Schedule:
    """Return the best schedule found; see ``vescale.pipe.search_schedule``.

    Args:
        candidates: schedules for the placement to begin with.
        effort: number of actions to place or evaluate.

    Raises:
        ScheduleError: none was found within the limit of activations.
    """
    home = home_of(num_ranks, stages_per_rank, placement)
    costs.check_stages(len(home))
    table = costs.table(len(home)).tolist()
    weights = [float(x) / stages_per_rank for x in costs.per_stage("activations", len(home))]
    problem = Problem(home, num_microbatches, [table[0], table[2], table[3]], costs.latency, weights, activations)
    generator = random.Random(0)
    found: list[tuple[float, Rows]] = []
    for rows in (*map(rows_of, candidates), _one_by_one(problem)):
        if all(map(problem.fits, rows)):
            found.append((Timing(problem, rows).makespan, rows))
    least, base = math.inf, _drawn(problem, generator)
    for _ in range(max(1, effort // (3 * problem.num_actions))):
        is_new = least == math.inf or generator.random() < NEW_BASE
        due = _drawn(problem, generator) if is_new else _changed(base, problem, generator)
        makespan, rows = _list_schedule(problem, due)
        if makespan < least:
            least, base = makespan, due
            found = [*found, (makespan, rows)]
    if not found:
        raise ScheduleError(
            f"expected a limit of activations that a schedule keeps, got {activations:g} micro-batches on each of "
            f"{num_ranks} ranks with {stages_per_rank} stages each; allow more"
        )
    found = sorted(found, key=lambda pair: pair[0])[:2]
    found = [pair for pair in found if pair[0] <= CLOSE * found[0][0]]
    improved = [_improve(problem, rows, effort // (3 * len(found)), generator) for _, rows in found]
    # whole backwards, and those that overlap, are candidates as they are
    best = [problem.schedule(min(improved, key=lambda pair: pair[0])[1]), *candidates]
    kept = [schedule for schedule in best if all(map(problem.fits, rows_of(schedule)))]
    return min(kept, key=lambda schedule: simulate(schedule, costs).makespan)
