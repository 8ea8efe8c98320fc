"""The recorded program: the ordered calls that involve values of stages.

The record of a call has its home stage, the values that it needs from earlier stages, and the metadata of its outputs.
All stages hold the same records, so later micro-batches need no agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .draws import Chain
from .generators import NOWHERE, Distance
from .inside import InnerCall
from .rows import LossRule
from .tape import Tape
from .ties import TieState
from .tree import Structure, flatten
from .values import PipelineError, TensorMeta, Value, ValueId

Crossing = tuple[ValueId, int]  # (value, destination stage)


@dataclass(frozen=True)
class Transfer:
    """A value sent from its home stage to a later stage, once per micro-batch.

    Args:
        source: stage that computes the value.
        destination: stage that needs the value.
        value: the call that computes it, for example ``"output 0 of `layers.1`"``.
        consumer: the first call on the destination that needs it.
        meta: shape, dtype and layout.
    """

    source: int
    destination: int
    value: str
    consumer: str
    meta: TensorMeta

    def __str__(self) -> str:
        return f"stage {self.source} -> {self.destination}: {self.value}, {self.meta}, for `{self.consumer}`"


@dataclass(frozen=True)
class CallKey:
    """The identity of a call, on which all stages agree before it runs."""

    index: int
    name: str
    home: int
    needed: tuple[ValueId, ...]
    num_arguments: int

    def __str__(self) -> str:
        return f"call {self.index} `{self.name}` of stage {self.home} with {self.num_arguments} arguments"


@dataclass(frozen=True)
class Outcome:
    """The result of a call: its nested output with metadata in place of tensors, and the arguments it wrote in place.

    Args:
        outputs: leaves are ``TensorMeta``, ``SameAs`` or plain values.
        changed: (position among the arguments, metadata after the call).
        moved: how far the call moves the generators.
        inside: the calls of modules with hooks inside of a unit; leaves are as in ``outputs``.
    """

    outputs: Any
    changed: tuple[tuple[int, TensorMeta], ...]
    moved: Distance = NOWHERE
    inside: tuple[InnerCall, ...] = ()


@dataclass(frozen=True)
class Record:
    """A call of the program and its outcome, with flattened outputs, and what is noted inside of a unit."""

    key: CallKey
    outputs: list[Any]
    structure: Structure
    changed: tuple[tuple[int, TensorMeta], ...]
    inside: list[Any]
    inside_structure: Structure

    @classmethod
    def of(cls, key: CallKey, outcome: Outcome) -> Record:
        """Return the record of a call and its announced outcome."""
        return cls(key, *flatten(outcome.outputs), outcome.changed, *flatten(outcome.inside))


@dataclass
class Program:
    """The records of one micro-batch, for one input signature.

    ``stage_form`` is the part of the signature that only this rank has (frozen parameters, dtypes). ``crossings`` has
    the index of each transfer. ``dead`` are the transfers without a gradient, which the first backward finds. ``whole``
    are the stages whose gradients of weights are computed with those of inputs. ``rule`` is that of the loss, once it
    is known. ``tapes`` are those of this rank's stages, made with these ``attributes`` of modules outside of units.
    ``draws`` is what a micro-batch draws, once it is known. ``ties`` are the states of tied weights.
    ``constants`` are the buffers and attributes that stages read of others. ``used_inside`` are the calls of units of
    which code outside uses a tensor that a hook has stored.

    The gradient of a value visits the stages that use it from the last one back, and each adds its own, so all are
    added in the order of one process.
    """

    stage_form: str = ""
    records: list[Record] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    crossings: dict[Crossing, int] = field(default_factory=dict)
    loss: TensorMeta | None = None
    dead: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    recorded: bool = False
    rule: LossRule | None = None
    tapes: dict[int, Tape] = field(default_factory=dict)
    attributes: tuple = ()
    draws: Chain | None = None
    ties: tuple[TieState, ...] = ()
    constants: frozenset[str] = frozenset()
    used_inside: set[int] = field(default_factory=set)
    _of_value: dict[ValueId, list[int]] = field(default_factory=dict)
    _same_value: list[list[int]] = field(default_factory=list)
    _lists: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def cross(self, crossing: Crossing, transfer: Transfer) -> int:
        """Record a transfer; return its index."""
        index = self.crossings[crossing] = len(self.transfers)
        self.transfers.append(transfer)
        others = self._of_value.setdefault(crossing[0], [])
        others.append(index)
        others.sort(key=lambda other: self.transfers[other].destination)
        self._same_value.append(others)
        return index

    def from_stage(self, stage: int) -> list[int]:
        """Return the transfers of values from a stage, in the order of sending."""
        return self._listed("from", stage, lambda index: self.transfers[index].source == stage)

    def to_stage(self, stage: int) -> list[int]:
        """Return the transfers of values to a stage, in the order of use."""
        return self._listed("to", stage, lambda index: self.transfers[index].destination == stage)

    def gradients_from_stage(self, stage: int) -> list[int]:
        """Return the transfers whose gradients a stage sends back, in the order of sending: the latest use first."""
        return self._listed(
            "gradients from", stage, lambda i: self._has_gradient(i) and self.transfers[i].destination == stage
        )[::-1]

    def gradients_to_stage(self, stage: int) -> list[int]:
        """Return the transfers whose gradients a stage gets, in the order of sending."""
        belongs = lambda index: self._has_gradient(index) and self.gradient_to(index) == stage  # noqa: E731
        return self._listed("gradients to", stage, belongs)[::-1]

    def _listed(self, what: str, stage: int, belongs: Callable[[int], bool]) -> list[int]:
        if not self.recorded:
            return list(filter(belongs, range(len(self.transfers))))
        if (what, stage) not in self._lists:
            self._lists[what, stage] = list(filter(belongs, range(len(self.transfers))))
        return self._lists[what, stage]

    def gradient_to(self, index: int) -> int:
        """Return the stage that gets the gradient of a transfer: the one before that uses the value, or its home."""
        uses = self._same_value[index]
        before = uses.index(index) - 1
        return self.transfers[index].source if before < 0 else self.transfers[uses[before]].destination

    def later_use(self, index: int) -> int | None:
        """Return the transfer of the same value to the next stage, if it has a gradient."""
        uses = self._same_value[index]
        following = uses[uses.index(index) + 1 :]
        return following[0] if following and self._has_gradient(following[0]) else None

    def _has_gradient(self, index: int) -> bool:
        return self.transfers[index].meta.requires_grad and index not in self.dead

    @property
    def loss_meta(self) -> TensorMeta:
        """Metadata of the loss, after the first forward."""
        assert self.loss is not None, "no forward has run"
        return self.loss

    def origin(self, value: Value) -> str:
        """Return the call that computed a value, for messages."""
        index, leaf = value.id
        name = self.records[index].key.name if index < len(self.records) else "?"
        what = f"output {leaf} of" if leaf >= 0 else f"argument {-1 - leaf} changed by"
        if self.is_inside(value):
            what = "a tensor that a hook stores inside of"
        return f"{what} `{name}` (stage {value.home})"

    def is_inside(self, value: Value) -> bool:
        """Return whether a value is no output of a unit, but a tensor that a hook inside of it has got."""
        index, leaf = value.id
        return index < len(self.records) and leaf >= len(self.records[index].outputs)

    def record(self, key: CallKey) -> Record:
        """Return the record of a call, checked against its key.

        Raises:
            PipelineError: the program differs from the recorded one.
        """
        recorded = self.records[key.index].key if key.index < len(self.records) else "the end of the forward"
        if recorded != key:
            raise PipelineError(
                f"this micro-batch diverges from the recorded program: expected {recorded}, got {key}; control flow "
                "outside of stage modules may depend on shapes, not on values"
            )
        return self.records[key.index]
