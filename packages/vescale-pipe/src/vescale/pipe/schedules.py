"""Generate pipeline schedules, and validate a schedule from any source.

With p stages and m micro-batches (F = forward, B = backward, equal stages):

    gpipe         all F, then all B              idle (p-1)(F+B)    peak activations m
    one_f_one_b   p-1-r warm-up F, then F and B in turn, then the remaining B
                                                 idle (p-1)(F+B)    peak activations min(p-r, m) on rank r

    one_f_one_b(4, 8), rank 0:   F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
                       rank 3:   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7

``validate`` accepts any placement of stages on ranks (several stages per rank, V-shaped, ...), so it also checks
schedules from other tools.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (PipeDream, 1F1B), 2021 (Megatron-LM).
"""

from __future__ import annotations

from collections import Counter

from ._checked import Count, checked
from ._schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run or does not compute each gradient exactly once."""


#: Forwards of one schedule: more take gigabytes and minutes, so a number above is taken for a mistake.
MAX_FORWARDS = 2**23


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages * num_microbatches > MAX_FORWARDS:
        raise ValueError(
            f"expected num_stages x num_microbatches of at most {MAX_FORWARDS}, got num_stages={num_stages}, "
            f"num_microbatches={num_microbatches}; pass smaller numbers"
        )


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
    _check_sizes(num_stages, num_microbatches)
    order = [(kind, m) for kind in (FORWARD, BACKWARD) for m in range(num_microbatches)]
    ranks = tuple(tuple(Action(stage, kind, m) for kind, m in order) for stage in range(num_stages))
    return Schedule(num_stages, num_microbatches, ranks)


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
    _check_sizes(num_stages, num_microbatches)
    ranks = tuple(_one_f_one_b_rank(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule(num_stages, num_microbatches, ranks)


def _one_f_one_b_rank(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    warmup = min(num_stages - 1 - stage, num_microbatches)
    actions = [Action(stage, FORWARD, m) for m in range(warmup)]
    for m in range(num_microbatches):
        if warmup + m < num_microbatches:
            actions.append(Action(stage, FORWARD, warmup + m))
        actions.append(Action(stage, BACKWARD, m))
    return tuple(actions)


def dependencies(action: Action, schedule: Schedule, *, split_backward: frozenset[tuple[int, int]]) -> list[Action]:
    """Return the actions that must finish before ``action`` starts.

    ``split_backward`` holds the (stage, micro-batch) pairs with an I and a W in place of one B.
    """
    stage, m = action.stage, action.microbatch
    if action.kind == FORWARD:
        return [Action(stage - 1, FORWARD, m)] if stage > 0 else []
    if action.kind == WEIGHT_GRAD:
        return [Action(stage, INPUT_GRAD, m)]
    needed = [Action(stage, FORWARD, m)]
    if stage + 1 < schedule.num_stages:
        kind = INPUT_GRAD if (stage + 1, m) in split_backward else BACKWARD
        needed.append(Action(stage + 1, kind, m))
    return needed


def split_backwards(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the (stage, micro-batch) pairs with the backward split into I and W."""
    return frozenset((a.stage, a.microbatch) for _, a in schedule if a.kind == INPUT_GRAD)


@checked
def validate(schedule: Schedule) -> None:
    """Check that a schedule computes each result exactly once and does not deadlock.

    The checks are:

    - indices are in range;
    - each stage runs on one rank;
    - each (stage, micro-batch) has one F and either one B, or one I and one W;
    - if all ranks run their actions in order, every rank reaches its end.

    Raises:
        ScheduleError: a check fails; the text names the rank and the action.

    Example:
        >>> validate(one_f_one_b(4, 8))
    """
    _check_indices(schedule)
    _check_counts(schedule)
    _check_progress(schedule)


def _check_indices(schedule: Schedule) -> None:
    home: dict[int, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            raise ScheduleError(f"rank {rank}: expected at least one action, got none; give every rank a stage")
    for rank, action in schedule:
        if action.stage >= schedule.num_stages or action.microbatch >= schedule.num_microbatches:
            raise ScheduleError(
                f"rank {rank}: expected an action within {schedule.num_stages} stages x "
                f"{schedule.num_microbatches} micro-batches, got {action}; count both from 0"
            )
        if home.setdefault(action.stage, rank) != rank:
            raise ScheduleError(
                f"expected stage {action.stage} on one rank, got {action} on rank {rank} and other actions on rank "
                f"{home[action.stage]}; move all actions of a stage to one rank"
            )


def _check_counts(schedule: Schedule) -> None:
    counts = Counter(action for _, action in schedule)
    repeated = [str(action) for action, count in counts.items() if count > 1]
    if repeated:
        raise ScheduleError(f"expected each action once, got several of {', '.join(repeated)}; list it once")
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            kinds = "".join(kind for kind in "FBIW" if counts[Action(stage, kind, m)])
            if kinds not in ("FB", "FIW"):
                raise ScheduleError(
                    f"stage {stage}, micro-batch {m}: expected the actions F and B, or F, I and W, got {list(kinds)}"
                )


def _check_progress(schedule: Schedule) -> None:
    split = split_backwards(schedule)
    done: set[Action] = set()
    position = [0] * schedule.num_ranks
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if any(need not in done for need in dependencies(action, schedule, split_backward=split)):
                    break
                done.add(action)
                position[rank] += 1
                progressed = True
    stuck = [
        _stuck_text(rank, actions[position[rank]], schedule, split, done)
        for rank, actions in enumerate(schedule.ranks)
        if position[rank] < len(actions)
    ]
    if stuck:
        raise ScheduleError(
            f"expected an order in which every action can run, got a deadlock: {'; '.join(stuck)}; put each action "
            "after the actions that it waits for"
        )


def _stuck_text(rank: int, action: Action, schedule: Schedule, split: frozenset, done: set[Action]) -> str:
    missing = [n for n in dependencies(action, schedule, split_backward=split) if n not in done]
    return f"rank {rank} waits at {action} for {', '.join(map(str, missing))}"
