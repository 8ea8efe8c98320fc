"""Check the communication of a lowered schedule.

Sends and receives are asynchronous. A receive is posted where it stands; the computation that uses the message waits
for it. A send waits if the other rank has left too many messages without a receive. What one rank sends to another is
received in the same order, so that messages need no tags.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque

from .actions import (
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    INPUT_GRAD,
    KINDS,
    MESSAGES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    WEIGHT_GRAD,
    Action,
    Schedule,
)
from .errors import ScheduleError
from .table import Table

__all__ = ["check_communication", "message_of", "receive_for", "sender_of"]

#: kind of a computation -> kinds of the messages that may follow and precede it
SENDS = {FORWARD: SEND_F, BACKWARD: SEND_B, INPUT_GRAD: SEND_B}
RECEIVES = {FORWARD: RECV_F, BACKWARD: RECV_B, INPUT_GRAD: RECV_B}


def message_of(action: Action, home: list[int]) -> tuple[Action, Action] | None:
    """Return the send and the receive of the result of a computation; None if no other rank needs it.

    Args:
        action: the computation.
        home: the rank of every stage.
    """
    if action.kind not in SENDS:
        return None
    step = 1 if action.kind == FORWARD else -1
    other = action.stage + step
    if not 0 <= other < len(home) or home[other] == home[action.stage]:
        return None
    send = SENDS[action.kind]
    receive = RECV_F if send == SEND_F else RECV_B
    return Action(action.stage, send, action.microbatch), Action(other, receive, action.microbatch)


def sender_of(receive: Action) -> Action:
    """Return the send of a receive."""
    if receive.kind == RECV_F:
        return Action(receive.stage - 1, SEND_F, receive.microbatch)
    return Action(receive.stage + 1, SEND_B, receive.microbatch)


def receive_for(action: Action, home: list[int]) -> Action | None:
    """Return the receive that a computation waits for; None if it needs nothing of another rank."""
    if action.kind not in RECEIVES:
        return None
    other = action.stage + (-1 if action.kind == FORWARD else 1)
    if not 0 <= other < len(home) or home[other] == home[action.stage]:
        return None
    return Action(action.stage, RECEIVES[action.kind], action.microbatch)


def receiver_of(send: Action, home: list[int]) -> int:
    """Return the rank that receives what is sent."""
    return home[send.stage + (1 if send.kind == SEND_F else -1)]


def check_communication(schedule: Schedule, table: Table, buffers: int | None) -> None:
    """Check the communication of a schedule whose computations are valid.

    Raises:
        ScheduleError: see ``validate``.
    """
    home = table.rank_of_stage().tolist()
    _check_messages(schedule, home)
    _check_order(schedule, home)
    _check_parameters(schedule, home)
    _check_buffers(schedule, home, buffers)


def _check_messages(schedule: Schedule, home: list[int]) -> None:
    expected: dict[Action, int] = {}
    for rank, action in schedule:
        if (message := message_of(action, home)) is not None:
            expected[message[0]] = rank
            expected[message[1]] = home[message[1].stage]
    found: Counter[Action] = Counter()
    for rank, action in schedule:
        if action.kind in MESSAGES:
            if expected.get(action) != rank:
                why = f"belongs to rank {expected[action]}" if action in expected else "is no message between ranks"
                raise ScheduleError(
                    f"rank {rank}: expected sends and receives of values that another rank needs, got {action}, which "
                    f"{why}; let lower() add the communication"
                )
            found[action] += 1
    for action, rank in expected.items():
        if found[action] != 1:
            raise ScheduleError(
                f"rank {rank}: expected {action} once, got it {found[action]} times; let lower() add the communication"
            )


def _check_order(schedule: Schedule, home: list[int]) -> None:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank in range(schedule.num_ranks):
        done: set[Action] = set()
        for action in schedule.actions(rank):
            needed: list[Action] = []
            if action.kind in (SEND_F, SEND_B):
                kinds = (FORWARD,) if action.kind == SEND_F else (BACKWARD, INPUT_GRAD)
                needed = [Action(action.stage, kind, action.microbatch) for kind in kinds]
                sent[rank, receiver_of(action, home)].append(action)
            elif action.kind in (RECV_F, RECV_B):
                received[home[sender_of(action).stage], rank].append(sender_of(action))
            elif (receive := receive_for(action, home)) is not None:
                needed = [receive]
            if needed and not any(need in done for need in needed):
                raise ScheduleError(f"rank {rank}: expected {needed[0]} before {action}, got it later; move it up")
            done.add(action)
    for link, actions in sent.items():
        for send, receive in itertools.zip_longest(actions, received[link]):
            if send != receive:
                raise ScheduleError(
                    f"expected rank {link[1]} to receive in the order in which rank {link[0]} sends, got {receive} "
                    f"where {send} is next; move the receive"
                )


def _check_parameters(schedule: Schedule, home: list[int]) -> None:
    """Check that parameters are gathered while they are used, and gradients reduced after the last one."""
    gathers = any(action.kind == UNSHARD for _, action in schedule)
    for rank in range(schedule.num_ranks):
        gathered: set[int] = set()
        reduced: set[int] = set()
        for action in schedule.actions(rank):
            stage = action.stage
            if action.kind in COLLECTIVES and home[stage] != rank:
                raise ScheduleError(
                    f"rank {rank}: expected collectives of its own stages, got {action} of rank {home[stage]}"
                )
            if action.kind == UNSHARD:
                if stage in gathered:
                    raise ScheduleError(f"rank {rank}: expected one {action} at a time, got a second one; remove it")
                gathered.add(stage)
            elif gathers and action.kind in (*KINDS, RESHARD) and stage not in gathered:
                raise ScheduleError(f"rank {rank}: expected {stage}{UNSHARD} before {action}, got none; add it")
            elif action.kind == RESHARD:
                gathered.discard(stage)
            if action.kind in (REDUCE_GRAD, BACKWARD, WEIGHT_GRAD) and stage in reduced:
                raise ScheduleError(
                    f"rank {rank}: expected {stage}{REDUCE_GRAD} once, after the last gradient of the stage, got "
                    f"{action} after it; move it down"
                )
            if action.kind == REDUCE_GRAD:
                reduced.add(stage)


def _check_buffers(schedule: Schedule, home: list[int], buffers: int | None) -> None:
    """Run the schedule with at most so many messages from one rank to another that have no receive yet."""
    unreceived: Counter[tuple[int, int]] = Counter()
    sent: set[Action] = set()
    rows = [schedule.actions(rank) for rank in range(schedule.num_ranks)]
    position = [0] * schedule.num_ranks
    waits: dict[int, str] = {}
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        waits.pop(rank, None)
        woken: set[int] = set()
        while position[rank] < len(rows[rank]):
            action = rows[rank][position[rank]]
            if action.kind in (SEND_F, SEND_B):
                other = receiver_of(action, home)
                if buffers is not None and unreceived[rank, other] >= buffers:
                    waits[rank] = f"rank {rank} waits at {action} for a receive of rank {other}"
                    break
                unreceived[rank, other] += 1
                sent.add(action)
                woken.add(other)
            elif action.kind in (RECV_F, RECV_B):
                other = home[sender_of(action).stage]
                unreceived[other, rank] -= 1
                woken.add(other)
            elif (receive := receive_for(action, home)) is not None and sender_of(receive) not in sent:
                waits[rank] = f"rank {rank} waits at {action} for {sender_of(receive)}"
                break
            position[rank] += 1
        ready.extend(other for other in woken if other in waits and other not in ready)
    if waits:
        raise ScheduleError(
            f"expected an order in which every action can run with {buffers} buffers, got a deadlock: "
            f"{'; '.join(waits[rank] for rank in sorted(waits))}; allow more buffers, or receive earlier"
        )
