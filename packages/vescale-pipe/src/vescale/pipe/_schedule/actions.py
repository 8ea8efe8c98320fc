"""Actions and schedules as data.

An action is printed and parsed as ``<stage><kind><micro-batch>``: ``2F0`` is the forward of micro-batch 0 on stage 2.

    F   forward
    B   full backward (input and weight gradients)
    I   input gradients alone        } B = I + W, the split that zero-bubble schedules use
    W   weight gradients alone       }

A rank may run the forward of one micro-batch and the backward of another one at the same time, so that one computes
while the other communicates: ``(0F8;7B0)OVERLAP_F_B``. A lowered schedule (``lower``) has communication as well:

    SEND_F, RECV_F            values of a micro-batch, to the next stage: ``0SEND_F3`` and ``1RECV_F3`` are one message
    SEND_B, RECV_B            gradients of a micro-batch, to the stage before: ``1SEND_B3`` and ``0RECV_B3``
    UNSHARD, RESHARD          gather the parameters of a stage, free them: ``2UNSHARD``
    REDUCE_GRAD               reduce the gradients of a stage over the data-parallel ranks: ``2REDUCE_GRAD``

``torch.distributed.pipelining`` uses the same text, so schedules can be exchanged with it.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .._checked import Size, checked

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = KINDS = ("F", "B", "I", "W")
SEND_F, RECV_F, SEND_B, RECV_B = MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
UNSHARD, RESHARD, REDUCE_GRAD = COLLECTIVES = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
ALL_KINDS = (*KINDS, *MESSAGES, *COLLECTIVES)

_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ALL_KINDS, key=len, reverse=True))})(\d*)")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, order=True)
class Action:
    """One computation or communication of one stage, for one micro-batch or, of parameters, for all.

    Args:
        stage: index of the model part, 0 .. num_stages-1.
        kind: ``"F"``, ``"B"``, ``"I"`` or ``"W"``; in a lowered schedule also a kind of communication.
        microbatch: index of the micro-batch, 0 .. num_microbatches-1; 0 for UNSHARD, RESHARD and REDUCE_GRAD.

    Raises:
        TypeError: an index is no integer.
        ValueError: an index is negative, or the kind is unknown or has no micro-batch.

    Example:
        >>> str(Action(2, "F", 0)), Action.parse("1B3"), str(Action(1, "UNSHARD"))
        ('2F0', Action(stage=1, kind='B', microbatch=3), '1UNSHARD')
    """

    stage: int
    kind: str
    microbatch: int = 0

    def __post_init__(self) -> None:
        stage, kind, microbatch = self.stage, self.kind, self.microbatch
        if not isinstance(kind, str) or kind not in ALL_KINDS:
            raise ValueError(f"expected one of {', '.join(ALL_KINDS)} for the kind of an action, got {kind!r}")
        if not (isinstance(stage, int) and isinstance(microbatch, int)):
            raise TypeError(f"expected integers for stage and microbatch, got {stage=!r}, {microbatch=!r}")
        if not (0 <= stage < 2**63 and 0 <= microbatch < 2**63):
            raise ValueError(f"expected stage >= 0 and microbatch >= 0, got {stage=}, {microbatch=}")
        if microbatch and kind in COLLECTIVES:
            raise ValueError(f"expected no micro-batch for {kind}, which is of a whole stage, got {microbatch}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind in COLLECTIVES else self.microbatch}"

    @classmethod
    @checked
    def parse(cls, text: str) -> Action:
        """Parse an action from text such as ``"2F0"``.

        Raises:
            ValueError: the text is not ``<stage><kind><micro-batch>``.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None or bool(match[3]) == (match[2] in COLLECTIVES):
            raise ValueError(f"expected an action like '2F0' (<stage><F|B|I|W><micro-batch>), got the text {text!r}")
        return cls(int(match[1]), match[2], int(match[3] or 0))


@dataclass(frozen=True)
class Overlap:
    """A forward and a backward that one rank runs at the same time.

    Args:
        forward: the forward.
        backward: the backward, B or I, of another micro-batch or stage.

    Raises:
        ValueError: they are of other kinds, or of one stage and micro-batch.

    Example:
        >>> str(Overlap(Action(0, "F", 8), Action(7, "B", 0)))
        '(0F8;7B0)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        kinds = (getattr(self.forward, "kind", None), getattr(self.backward, "kind", None))
        if kinds[0] != FORWARD or kinds[1] not in (BACKWARD, INPUT_GRAD):
            raise ValueError(f"Overlap: expected a forward F and a backward B or I, got {kinds[0]} and {kinds[1]}")
        if (self.forward.stage, self.forward.microbatch) == (self.backward.stage, self.backward.microbatch):
            raise ValueError(f"Overlap: expected different micro-batches or stages, got {self}")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell = Action | Overlap


def parse_cell(text: str) -> Cell:
    """Parse an action, or two that overlap."""
    match = _OVERLAP.fullmatch(text.strip())
    return Action.parse(text) if match is None else Overlap(Action.parse(match[1]), Action.parse(match[2]))


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of a cell."""
    return (cell,) if isinstance(cell, Action) else (cell.forward, cell.backward)


def _are_cells(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(cell, Action | Overlap) for cell in value)


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank.

    Args:
        num_stages: number of model parts over all ranks.
        num_microbatches: number of micro-batches in a step.
        ranks: one tuple of cells per rank: actions, or pairs of actions that overlap.

    Example:
        >>> print(Schedule.parse("0F0 0B0; 1F0 1B0", num_stages=2, num_microbatches=1))
        0F0 0B0
        1F0 1B0
    """

    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise ValueError(f"Schedule: expected an integer of 0 or more for {name}, got {value!r}")
        if not isinstance(self.ranks, list | tuple) or not all(map(_are_cells, self.ranks)):
            raise TypeError(
                f"Schedule: expected a tuple of actions for each rank in ranks, got {reprlib.repr(self.ranks)}"
            )
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @functools.cached_property
    def is_lowered(self) -> bool:
        """Whether the schedule has communication."""
        computations = frozenset(KINDS)
        return any(isinstance(cell, Action) and cell.kind not in computations for row in self.ranks for cell in row)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank in order; of two that overlap, the forward first."""
        return self._actions[rank]

    @functools.cached_property
    def _actions(self) -> list[tuple[Action, ...]]:
        return [tuple(action for cell in cells for action in actions_of(cell)) for cells in self.ranks]

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Yield ``(rank, action)``, rank by rank, in schedule order."""
        return ((rank, action) for rank in range(self.num_ranks) for action in self.actions(rank))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, cells)) for cells in self.ranks)

    @classmethod
    @checked
    def parse(
        cls, text: str | Iterable[str], *, num_stages: Size | None = None, num_microbatches: Size | None = None
    ) -> Schedule:
        """Parse a schedule from one line of actions per rank; newlines or ``;`` separate ranks.

        The numbers of stages and micro-batches default to the largest index found plus one.

        Raises:
            ValueError: a word is not an action.
        """
        lines = re.split(r"\n|;(?![^()]*\))", text.strip()) if isinstance(text, str) else list(text)
        ranks = tuple(tuple(parse_cell(word) for word in line.split()) for line in lines)
        return cls.of(ranks, num_stages=num_stages, num_microbatches=num_microbatches)

    @classmethod
    @checked
    def of(
        cls,
        ranks: Sequence[Sequence[Action | Overlap]],
        *,
        num_stages: Size | None = None,
        num_microbatches: Size | None = None,
    ) -> Schedule:
        """Return the schedule of cells, by default with as many stages and micro-batches as they name.

        Example:
            >>> Schedule.of([[Action(0, "F", 0), Action(0, "B", 0)]]).num_microbatches
            1
        """
        cells = tuple(map(tuple, ranks))
        actions = [action for rank in cells for cell in rank for action in actions_of(cell)]
        found = 1 + max((a.stage for a in actions), default=-1)
        parts = 1 + max((a.microbatch for a in actions), default=-1)
        return cls(
            found if num_stages is None else num_stages, parts if num_microbatches is None else num_microbatches, cells
        )
