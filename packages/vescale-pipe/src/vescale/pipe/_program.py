"""What the first micro-batch teaches: the calls that involve values of stages, in order.

The record of a call says where it runs, which values must come from earlier stages for it, and what it returns. All
stages hold the same records, so later micro-batches run without asking one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ._tree import Structure, flatten
from ._values import PipelineError, TensorMeta, Value, ValueId

CrossingKey = tuple[ValueId, int]  # (value, destination stage)


@dataclass(frozen=True)
class Transfer:
    """A value that is sent from its home stage to a later stage, once per micro-batch.

    Args:
        source: stage that computes the value.
        destination: stage that needs it.
        value: the call that made it, for example ``"output 0 of `layers.1`"``.
        consumer: the first call that needs it there.
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
    """What all stages must agree on about a call before it runs."""

    index: int
    name: str
    home: int
    needed: tuple[ValueId, ...]
    num_arguments: int

    def __str__(self) -> str:
        return f"call {self.index} `{self.name}` of stage {self.home}"


@dataclass(frozen=True)
class Outcome:
    """What a call did: its nested output with metadata in place of tensors, and the arguments that it wrote to.

    Args:
        outputs: leaves are ``TensorMeta``, ``SameAs`` or plain values.
        changed: (position among the arguments, metadata after the call).
    """

    outputs: Any
    changed: tuple[tuple[int, TensorMeta], ...]


@dataclass(frozen=True)
class Record:
    """A call of the program and its outcome, with the outputs taken apart."""

    key: CallKey
    outputs: list[Any]
    structure: Structure
    changed: tuple[tuple[int, TensorMeta], ...]

    @classmethod
    def of(cls, key: CallKey, outcome: Outcome) -> Record:
        """Make a record of a call and its announced outcome."""
        outputs, structure = flatten(outcome.outputs)
        return cls(key, outputs, structure, outcome.changed)


@dataclass
class Program:
    """The records of one micro-batch, for one form of the inputs.

    ``stage_form`` is the part of the form that only this stage sees (which parameters are frozen, their dtypes).
    ``dead`` are the crossings whose gradient is never produced; they are known after the first backward.
    """

    stage_form: str = ""
    records: list[Record] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    loss: TensorMeta | None = None
    dead: set[CrossingKey] = field(default_factory=set)
    recorded: bool = False
    backward_known: bool = False

    @property
    def loss_meta(self) -> TensorMeta:
        """Metadata of the loss, after the first forward."""
        assert self.loss is not None, "no forward has run"
        return self.loss

    def origin(self, value: Value) -> str:
        """Return where a value comes from, for messages."""
        index, leaf = value.id
        name = self.records[index].key.name if index < len(self.records) else "?"
        what = f"output {leaf} of" if leaf >= 0 else f"argument {-1 - leaf} changed by"
        return f"{what} `{name}` (stage {value.home})"

    def record(self, key: CallKey) -> Record:
        """Return the record of a call, checked against what the call is now.

        Raises:
            PipelineError: the program differs from its first micro-batch.
        """
        recorded = self.records[key.index].key if key.index < len(self.records) else "the end of the forward"
        if recorded != key:
            raise PipelineError(
                f"this micro-batch runs another program than the first one: {key}, where {recorded} was expected. "
                "Control flow outside of the stages' modules may depend on shapes, not on values"
            )
        return self.records[key.index]
