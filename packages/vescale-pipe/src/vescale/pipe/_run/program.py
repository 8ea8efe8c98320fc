"""The recorded program: the ordered calls that involve values of stages.

The record of a call has its home stage, the values that it needs from earlier stages, and the metadata of its outputs.
All stages hold the same records, so later micro-batches need no agreement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .rows import LossRule
from .tree import Structure, flatten
from .values import PipelineError, TensorMeta, Value, ValueId

CrossingKey = tuple[ValueId, int]  # (value, destination stage)


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
        return f"call {self.index} `{self.name}` of stage {self.home}"


@dataclass(frozen=True)
class Outcome:
    """The result of a call: its nested output with metadata in place of tensors, and the arguments it wrote in place.

    Args:
        outputs: leaves are ``TensorMeta``, ``SameAs`` or plain values.
        changed: (position among the arguments, metadata after the call).
    """

    outputs: Any
    changed: tuple[tuple[int, TensorMeta], ...]


@dataclass(frozen=True)
class Record:
    """A call of the program and its outcome, with flattened outputs."""

    key: CallKey
    outputs: list[Any]
    structure: Structure
    changed: tuple[tuple[int, TensorMeta], ...]

    @classmethod
    def of(cls, key: CallKey, outcome: Outcome) -> Record:
        """Return the record of a call and its announced outcome."""
        outputs, structure = flatten(outcome.outputs)
        return cls(key, outputs, structure, outcome.changed)


@dataclass
class Program:
    """The records of one micro-batch, for one input signature.

    ``stage_form`` is the part of the signature that only this stage has (frozen parameters, dtypes). ``dead`` are the
    crossings without a gradient; the first backward finds them. ``rule`` is that of the loss, once it is known.
    """

    stage_form: str = ""
    records: list[Record] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    loss: TensorMeta | None = None
    dead: set[CrossingKey] = field(default_factory=set)
    recorded: bool = False
    backward_known: bool = False
    rule: LossRule | None = None

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
        return f"{what} `{name}` (stage {value.home})"

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
