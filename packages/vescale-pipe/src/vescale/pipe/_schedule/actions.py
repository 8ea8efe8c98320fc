"""Actions and schedules as data.

An action is printed and parsed as ``<stage><kind><micro-batch>``: ``2F0`` is the forward of micro-batch 0 on stage 2.

    F   forward
    B   full backward (input and weight gradients)
    I   input gradients alone        } B = I + W, the split that zero-bubble schedules use
    W   weight gradients alone       }

``torch.distributed.pipelining`` uses the same text, so schedules can be exchanged with it.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .._checked import Size, checked

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One computation on one stage for one micro-batch.

    Args:
        stage: index of the model part, 0 .. num_stages-1.
        kind: ``"F"``, ``"B"``, ``"I"`` or ``"W"``.
        microbatch: index of the micro-batch, 0 .. num_microbatches-1.

    Raises:
        ValueError: an index is negative, or the kind is unknown.

    Example:
        >>> str(Action(2, "F", 0)), Action.parse("1B3")
        ('2F0', Action(stage=1, kind='B', microbatch=3))
    """

    stage: int
    kind: str
    microbatch: int

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"expected one of {', '.join(KINDS)} for the kind of an action, got {self.kind!r}")
        if not (isinstance(self.stage, int) and isinstance(self.microbatch, int)):
            raise TypeError(
                f"expected integers for stage and microbatch, got stage={self.stage!r}, microbatch={self.microbatch!r}"
            )
        if not (0 <= self.stage < 2**63 and 0 <= self.microbatch < 2**63):
            raise ValueError(
                f"expected stage >= 0 and microbatch >= 0, got stage={self.stage}, microbatch={self.microbatch}"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    @checked
    def parse(cls, text: str) -> Action:
        """Parse an action from text such as ``"2F0"``.

        Raises:
            ValueError: the text is not ``<stage><F|B|I|W><micro-batch>``.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"expected an action like '2F0' (<stage><F|B|I|W><micro-batch>), got the text {text!r}")
        return cls(int(match[1]), match[2], int(match[3]))


def _are_actions(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(action, Action) for action in value)


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank.

    Args:
        num_stages: number of model parts over all ranks.
        num_microbatches: number of micro-batches in a step.
        ranks: one tuple of actions per rank.

    Example:
        >>> print(Schedule.parse("0F0 0B0; 1F0 1B0", num_stages=2, num_microbatches=1))
        0F0 0B0
        1F0 1B0
    """

    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
                raise ValueError(f"Schedule: expected an integer of 0 or more for {name}, got {value!r}")
        if not isinstance(self.ranks, list | tuple) or not all(map(_are_actions, self.ranks)):
            raise TypeError(
                f"Schedule: expected a tuple of actions for each rank in ranks, got {reprlib.repr(self.ranks)}"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Yield ``(rank, action)``, rank by rank, in schedule order."""
        return ((rank, action) for rank, actions in enumerate(self.ranks) for action in actions)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

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
        lines = re.split(r"[;\n]", text.strip()) if isinstance(text, str) else list(text)
        ranks = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
        actions = [action for rank in ranks for action in rank]
        return cls(
            num_stages if num_stages is not None else 1 + max((a.stage for a in actions), default=-1),
            num_microbatches if num_microbatches is not None else 1 + max((a.microbatch for a in actions), default=-1),
            ranks,
        )
