"""Generate pipeline schedules.

With p ranks, m micro-batches, v stages per rank, F, I and W the times of a rank for one micro-batch (forward, gradients
of inputs, gradients of weights; B = I + W), equal stages and no latency:

======================== ========================================= ============================ =====================
schedule                 order of a rank r                         idle time of the makespan    peak activations
======================== ========================================= ============================ =====================
gpipe                    all F, then all B                         (p-1)(F+B)                   m
one_f_one_b              p-1-r F to begin, then F and B in turn    (p-1)(F+B)                   p-r
looped_bfs               stage by stage: all F, then all B         (p-1)(F+B)/v                 m
interleaved_1f1b         as 1F1B, in rounds of p micro-batches     (p-1)(F+B)/v                 p + (p-1)/v
zb_h1                    as 1F1B; W is r micro-batches late        (p-1)(F+I-W)                 p
zb_h2                    twice the F to begin; W 2r late           as zb_h1, none in the span   2p-1 or 2p
interleaved_zero_bubble  interleaved, W r stages late              (p-1)(F+I-W)/v               p
zb_v                     two stages per rank, placed as a V        (p-1)F/2, none in the span   p
dual_pipe_v              the same; F and B of two stages overlap   (p-1)(F+B-3W/2) or less      p + 1/2
======================== ========================================= ============================ =====================

``search_schedule`` finds orders for costs and limits of memory that none of these was made for; ``v_half`` and
``v_min`` are those for a half and a third of the activations.

Stage s is on rank s mod p; placed as a V, on ranks 0 .. p-1, p-1 .. 0. Any numbers of ranks, micro-batches and stages
per rank are possible: rounds of other sizes are evened, and orders that need more micro-batches are made for that many,
and the surplus is left out.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (PipeDream, 1F1B), 2021 (Megatron-LM, interleaved);
Lamy-Poirier 2023, arXiv:2211.05953 (looped breadth-first); Qi et al. 2024, arXiv:2401.10241 (ZB-H1, ZB-H2),
arXiv:2405.15362 (ZB-V, V-Half, V-Min); DeepSeek-AI 2024, arXiv:2412.19437 (DualPipe).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ._checked import Count, NonNegative, checked
from ._schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Cell, Overlap, Schedule, actions_of
from ._schedule.search import Placement, search
from ._schedule.simulate import Costs

__all__ = [
    "dual_pipe_v",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "search_schedule",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

#: Forwards of one schedule: more take gigabytes and minutes, so a number above is taken for a mistake.
MAX_FORWARDS = 2**23

Part = tuple[int, int]  # a stage and a micro-batch


@checked
def gpipe(num_stages: Count, num_microbatches: Count) -> Schedule:
    """Return the GPipe schedule: every forward, then every backward, stage r on rank r.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(gpipe(2, 2))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    return looped_bfs(num_stages, num_microbatches, 1)


@checked
def one_f_one_b(num_stages: Count, num_microbatches: Count) -> Schedule:
    """Return the 1F1B schedule, stage r on rank r, for any number of micro-batches.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(one_f_one_b(2, 3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    return interleaved_1f1b(num_stages, num_microbatches, 1)


@checked
def looped_bfs(num_ranks: Count, num_microbatches: Count, stages_per_rank: Count = 2) -> Schedule:
    """Return the looped breadth-first schedule: all forwards stage by stage, then all backwards, last stage first.

    Every stage runs once forward and once backward, so ZeRO 3 gathers its parameters twice in a step.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(looped_bfs(2, 2, 2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    _check_sizes(num_ranks * stages_per_rank, num_microbatches)
    return _looped(num_ranks, num_microbatches, stages_per_rank, one_round=True)


@checked
def interleaved_1f1b(num_ranks: Count, num_microbatches: Count, stages_per_rank: Count = 2) -> Schedule:
    """Return the interleaved 1F1B schedule of Megatron-LM.

    Each rank takes the micro-batches in rounds of at least ``num_ranks``, stage by stage.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(interleaved_1f1b(2, 2, 2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    _check_sizes(num_ranks * stages_per_rank, num_microbatches)
    return _looped(num_ranks, num_microbatches, stages_per_rank, ahead=2 if stages_per_rank > 1 else 1)


@checked
def interleaved_zero_bubble(num_ranks: Count, num_microbatches: Count, stages_per_rank: Count = 2) -> Schedule:
    """Return the interleaved schedule with split backwards: rank r fills gaps with weight gradients, r of them late.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(interleaved_zero_bubble(2, 2, 1))
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    _check_sizes(num_ranks * stages_per_rank, num_microbatches)
    return _looped(num_ranks, num_microbatches, stages_per_rank, ahead=1, late=1)


@checked
def zb_h1(num_ranks: Count, num_microbatches: Count) -> Schedule:
    """Return the ZB-H1 schedule: 1F1B with split backwards, a third of its bubble, and its peak activations.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(zb_h1(2, 2))
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    return interleaved_zero_bubble(num_ranks, num_microbatches, 1)


@checked
def zb_h2(num_ranks: Count, num_microbatches: Count) -> Schedule:
    """Return the ZB-H2 schedule: no rank idles between its first and its last action, for twice the activations.

    The makespan is that of ZB-H1, unless ranks begin the next step without waiting for each other.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(zb_h2(2, 2))
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    _check_sizes(num_ranks, num_microbatches)
    return _looped(num_ranks, num_microbatches, 1, ahead=2, late=2)


@checked
def zb_v(num_ranks: Count, num_microbatches: Count) -> Schedule:
    """Return the ZB-V schedule: two stages per rank, placed as a V, without a bubble in the span of any rank.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(zb_v(1, 2))
        0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """
    _check_sizes(2 * num_ranks, num_microbatches)
    rows = (_zb_v_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule(2 * num_ranks, num_microbatches, tuple(tuple(_kept(row, num_microbatches)) for row in rows))


@checked
def dual_pipe_v(num_ranks: Count, num_microbatches: Count) -> Schedule:
    """Return the DualPipeV schedule: two stages per rank, placed as a V; forwards and backwards of the two overlap.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> print(dual_pipe_v(1, 3))
        0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B (0F2;1B1)OVERLAP_F_B (1F2;0B1)OVERLAP_F_B 1B2 0I2 0W2
    """
    _check_sizes(2 * num_ranks, num_microbatches)
    rows = (_dual_pipe_v_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule(2 * num_ranks, num_microbatches, tuple(tuple(_kept(row, num_microbatches)) for row in rows))


@checked
def search_schedule(
    num_ranks: Count,
    num_microbatches: Count,
    *,
    costs: Costs | None = None,
    activations: NonNegative | None = None,
    stages_per_rank: Count = 1,
    placement: Placement = "loop",
    effort: Count = 3_000_000,
) -> Schedule:
    """Return the schedule with the least makespan that was found for given costs and memory.

    It is never worse than the other schedules of this module for the same stages, as long as these keep the limit. The
    result depends on the arguments alone, so all ranks find the same.

    Args:
        num_ranks: number of ranks.
        num_microbatches: number of micro-batches of a step.
        costs: durations of every stage, the latency of a hop, and the memory of a stage's activations.
        activations: the most live activations on a rank, in micro-batches, 1/v of one per stage; ``num_ranks`` if None.
        stages_per_rank: v.
        placement: ``"loop"``, or ``"V"``: stages there and back over the ranks.
        effort: how many actions to place or evaluate; 3 million take about 5 seconds of one processor.

    Raises:
        ScheduleError: no schedule was found within the limit.
        ValueError: a size is below 1, or a list in the costs has not one number per stage.

    Example:
        >>> from vescale.pipe import simulate
        >>> costs = Costs(1.0, 1.4, 0.6, latency=0.1)
        >>> found = search_schedule(2, 4, costs=costs, effort=100_000)
        >>> simulate(found, costs).makespan <= simulate(zb_h1(2, 4), costs).makespan
        True
    """
    _check_sizes(num_ranks * stages_per_rank, num_microbatches)
    costs = costs or Costs()
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    candidates = list(_candidates(**sizes, placement=placement))
    limit = float(num_ranks) if activations is None else activations
    return search(**sizes, costs=costs, activations=limit, placement=placement, candidates=candidates, effort=effort)


@checked
def v_half(
    num_ranks: Count, num_microbatches: Count, *, costs: Costs | None = None, effort: Count = 1_000_000
) -> Schedule:
    """Return a schedule of two stages per rank, placed as a V, for half of the activations of 1F1B, and one more.

    Args:
        num_ranks: p; the limit is p/2 + 1 micro-batches per rank.
        num_microbatches: number of micro-batches of a step.
        costs: see ``search_schedule``.
        effort: see ``search_schedule``.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> from vescale.pipe import simulate
        >>> max(simulate(v_half(4, 8, effort=100_000)).peak_activations) <= 3
        True
    """
    return _v_within(num_ranks / 2 + 1, num_ranks, num_microbatches, costs, effort)


@checked
def v_min(
    num_ranks: Count, num_microbatches: Count, *, costs: Costs | None = None, effort: Count = 1_000_000
) -> Schedule:
    """Return a schedule of two stages per rank, placed as a V, for a third of those of 1F1B, and one more.

    Args:
        num_ranks: p; the limit is p/3 + 1 micro-batches per rank.
        num_microbatches: number of micro-batches of a step.
        costs: see ``search_schedule``.
        effort: see ``search_schedule``.

    Raises:
        ValueError: a size is below 1, or there are more than 8 million forwards.

    Example:
        >>> from vescale.pipe import simulate
        >>> max(simulate(v_min(6, 8, effort=100_000)).peak_activations) <= 3
        True
    """
    return _v_within(num_ranks / 3 + 1, num_ranks, num_microbatches, costs, effort)


def _v_within(activations: float, num_ranks: int, num_microbatches: int, costs: Costs | None, effort: int) -> Schedule:
    return search_schedule(
        num_ranks,
        num_microbatches,
        costs=costs,
        activations=activations,
        stages_per_rank=2,
        placement="V",
        effort=effort,
    )


def _candidates(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, placement: Placement
) -> Iterator[Schedule]:
    """Yield the schedules of this module for a placement."""
    if placement == "loop" or num_ranks == 1:
        for make in (looped_bfs, interleaved_1f1b, interleaved_zero_bubble):
            yield make(num_ranks, num_microbatches, stages_per_rank)
        if stages_per_rank == 1:
            yield zb_h2(num_ranks, num_microbatches)
    if (placement == "V" or num_ranks == 1) and stages_per_rank == 2:
        yield zb_v(num_ranks, num_microbatches)
        yield dual_pipe_v(num_ranks, num_microbatches)


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages * num_microbatches > MAX_FORWARDS:
        raise ValueError(
            f"expected num_stages x num_microbatches of at most {MAX_FORWARDS}, got num_stages={num_stages}, "
            f"num_microbatches={num_microbatches}; pass smaller numbers"
        )


# --- stages placed in a loop ---


def _looped(
    num_ranks: int, num_microbatches: int, v: int, *, ahead: int = 0, late: int | None = None, one_round: bool = False
) -> Schedule:
    """Return a schedule whose ranks alternate between fixed orders of forwards and of backwards.

    Args:
        num_ranks: p.
        num_microbatches: m.
        v: stages per rank.
        ahead: forwards that a rank begins with, per rank that follows it, in addition to those of all stages but the
            last.
        late: for split backwards, by how many of them per preceding rank the weight gradient is late; None if whole.
        one_round: whether all forwards come before all backwards.
    """
    num_rounds = 1 if one_round else max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_rounds)
    sizes = [size + (n < larger) for n in range(num_rounds)]
    starts = [sum(sizes[:n]) for n in range(num_rounds)]
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * v, num_ranks)
        forwards, backwards = (
            [(s, m) for n, start in enumerate(starts) for s in order for m in range(start, start + sizes[n])]
            for order in (stages, stages[::-1])
        )
        first = len(forwards) if one_round else (v - 1) * sizes[0] + ahead * (num_ranks - 1 - rank)
        rows.append(tuple(_in_turn(forwards, backwards, first, None if late is None else late * rank)))
    return Schedule(num_ranks * v, num_microbatches, tuple(rows))


def _in_turn(forwards: list[Part], backwards: list[Part], first: int, late: int | None) -> Iterator[Action]:
    """Yield the first forwards, then a forward and a backward in turn; weight gradients ``late`` backwards after I."""
    yield from (Action(s, FORWARD, m) for s, m in forwards[:first])
    for number, (stage, m) in enumerate(backwards):
        yield from (Action(s, FORWARD, k) for s, k in forwards[first + number : first + number + 1])
        yield Action(stage, BACKWARD if late is None else INPUT_GRAD, m)
        if late is not None and number >= late:
            yield Action(backwards[number - late][0], WEIGHT_GRAD, backwards[number - late][1])
    if late:
        yield from (Action(s, WEIGHT_GRAD, m) for s, m in backwards[-late:])


# --- two stages per rank, placed as a V ---


class _Turns:
    """Hands out the actions of the two stages of a rank, each kind in the order of micro-batches."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._stages = rank, 2 * num_ranks - 1 - rank
        self._counts = {"F": [0, 0], "B": [0, 0]}
        self.late: list[Part] = []  # with weight gradients to come

    def __call__(self, *words: str) -> list[Action]:
        """Return the next actions, given as ``"F0"``: the kind, and the first (0) or second (1) stage of the rank.

        ``"W"`` is the weight gradient that is late for the longest time, if there is one, ``"W1"`` that of a stage.
        """
        actions = []
        for word in words:
            kind, which = word[0], word[1:]
            if kind == WEIGHT_GRAD:
                late = [part for part in self.late if not which or part[0] == self._stages[int(which)]][:1]
                self.late = [part for part in self.late if part not in late]
                actions += [Action(stage, WEIGHT_GRAD, m) for stage, m in late]
                continue
            counts = self._counts["F" if kind == FORWARD else "B"]
            part = self._stages[int(which)], counts[int(which)]
            counts[int(which)] += 1
            if kind == INPUT_GRAD:
                self.late.append(part)
            actions.append(Action(part[0], kind, part[1]))
        return actions

    def count(self, which: int) -> int:
        """Return the number of forwards of a stage."""
        return self._counts["F"][which]


def _zb_v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Cell]:
    total = max(num_microbatches, 2 * num_ranks - 1)  # fewer do not fill the V
    turns, after = _Turns(rank, num_ranks), num_ranks - rank
    cells: list[Cell] = [*turns(*["F0"] * (2 * after - 1), *["F1", "F0"] * rank, *["F1", "I1", "W1"] * after)]
    while turns.count(1) < total:
        cells += turns(*["F0"] * (turns.count(0) < total), "I0", "W0", "F1", "I1", "W1")
    return [*cells, *turns(*["I0", "I1"] * rank, *["I0", "W0"] * after, *["W1", "W0"] * total)]


def _dual_pipe_v_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Cell]:
    total = max(num_microbatches, 2 * num_ranks)
    turns, after = _Turns(rank, num_ranks), num_ranks - rank - 1

    def pair(forward: str, backward: str) -> Overlap:
        return Overlap(*turns(forward, backward))

    cells: list[Cell] = [*turns(*["F0"] * (2 * after), *["F0", "F1"] * (rank + 1), *["I1", "W", "F1"] * after)]
    for number in range(total - 2 * num_ranks + rank + 1):
        # the first backward of the last stage follows its forward directly, and waits for nothing
        cells += turns("F0", "B1") if number == after == 0 else [pair("F0", "B1")]
        cells.append(pair("F1", "B0"))
    for _ in range(after):
        cells += [*turns("B1"), pair("F1", "B0")]
    # from the middle of the last backwards on, their weight gradients fill gaps
    end = ["B1", "B0"] * (rank + 1)
    half = 2 * ((rank + 1) // 2) + (rank + 1) % 2
    end[half:] = [word.replace("B", "I") for word in end[half:]]
    return [*cells, *turns(*end, *["W", "I0"] * after, *["W"] * (rank + 1))]


def _kept(cells: Iterable[Cell], num_microbatches: int) -> Iterator[Cell]:
    """Yield the cells of the micro-batches that exist."""
    for cell in cells:
        kept = [action for action in actions_of(cell) if action.microbatch < num_microbatches]
        yield from [cell] if len(kept) == 2 else kept
