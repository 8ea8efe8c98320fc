"""One forward of one micro-batch on one stage; while it is recorded, on all stages of a rank.

Note [Events of a forward]
Every stage runs the user's full forward. An **event** is a call of a unit, or an operator outside of units with a value
among its arguments. Event numbers agree on all stages, because all stages run the same program. The home of an event is
the unit's stage, or the last home among the operator's arguments:

    event                    home    on its home           on other stages
    e = embed(ids)           0       runs                  returns a placeholder
    h = blocks[0](e)         0       runs                  returns a placeholder
    g = blocks[1](h)         1       receives h and runs   stage 0 sends h; returns a placeholder
    s = h + g                1       runs (h is received)  returns a placeholder
    n = norm(e + s)          1       receives e and runs   stage 0 sends e; returns a placeholder

A value from an earlier stage is sent to the event's home once, at the first event that needs it. Sender and receiver
derive each transfer from the event alone, so messages need no headers.

A rank that runs several stages records them in one forward. Their values cross like those of other ranks: as copies
that end and begin the autograd graphs of the stages. Later forwards are of one stage each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import is_transformed, version_of
from .crossings import Crossings
from .draws import Course, unequal_generators
from .generators import NOWHERE
from .inside import InnerCall, Opaque
from .program import CallKey, Outcome, Program, Record, Transfer
from .recorder import Recorder
from .tape import State, Tape, versions_of
from .transport import Transport
from .tree import Structure, flatten
from .values import (
    PipelineError,
    Placeholder,
    Repeated,
    SameAs,
    TensorMeta,
    Value,
    ValueId,
    meta_of,
    note_value,
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

# of calls inside of units; numbers may depend on the data, as rows of an expert do
_FLAGS = (type(None), bool, str, torch.dtype, torch.device)


@dataclass
class Call:
    """An event in progress. ``real`` has the arguments on the home stage, and ``state`` that of a tape."""

    key: CallKey
    arguments: list[Any]
    structure: Structure
    real: list[Any] | None = None
    versions: list[int] = field(default_factory=list)
    state: State | None = None

    @property
    def inputs(self) -> tuple[tuple, dict]:
        """Positional and keyword arguments of the call on its home stage."""
        assert self.real is not None, "the call runs on another stage"
        args, kwargs = self.structure.rebuild(self.real)
        return args, kwargs


class Frame:
    """Run the events of one forward on some stages; see Note [Events of a forward].

    Args:
        transport: this rank's communication.
        crossings: sends and receives the values.
        program: the records; filled if ``recorder`` is given, replayed otherwise.
        stages: the stages to run; the events of others return placeholders.
        recorder: the synchronization of the first micro-batch; None for later ones.
        tape: takes down what the stage runs outside of units; None if nothing is taken down.
        course: the position of the generators, call by call; None if nothing draws.
    """

    def __init__(
        self,
        transport: Transport,
        crossings: Crossings,
        program: Program,
        *,
        stages: Collection[int],
        recorder: Recorder | None,
        tape: Tape | None,
        course: Course | None,
    ) -> None:
        self.stages = frozenset(stages)
        self.recorder = recorder
        self.tape = tape
        self._course = course
        self._transport = transport
        self._crossings = crossings
        self._program = program
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._crossed: set[tuple[ValueId, int]] = set()
        self._num_events = 0

    # --- queries of the function mode ---

    def value_of(self, leaf: Any) -> Value | None:
        """Return the value record of a tensor that depends on a unit, else None."""
        return self._values.get(leaf) if isinstance(leaf, torch.Tensor) else None

    def is_event(self, leaves: list[Any], name: str) -> bool:
        """Return whether an operator call with these arguments involves a value."""
        known = [self.value_of(leaf) is not None for leaf in leaves]
        for leaf, is_known in zip(leaves, known, strict=True):
            if not is_known and isinstance(leaf, Placeholder):
                raise PipelineError(
                    f"`{name}`: expected values of this forward, got {leaf.origin} of an earlier one, which a hook or "
                    "an attribute has kept; clear it when a forward begins"
                )
        if any(known):
            return True
        if self.recorder is not None:
            self.recorder.check_arguments(leaves, [None] * len(leaves), name)
        return False

    # --- events ---

    def begin(self, name: str, arguments: list[Any], structure: Structure, *, owner: int | None = None) -> Call:
        """Begin an event: find its home, and move the needed values there.

        Args:
            name: the name of the unit or of the operator.
            arguments: leaves of ``(args, kwargs)``.
            structure: structure of ``(args, kwargs)``.
            owner: the unit's stage; None for an operator.

        Raises:
            PipelineError: the event needs a value of a later stage, or the program differs from the recorded one.
        """
        values = [self.value_of(leaf) for leaf in arguments]
        present = [value for value in values if value is not None]
        home = owner if owner is not None else max(value.home for value in present)
        self._check_order(name, home, present)
        needed: dict[ValueId, tuple[torch.Tensor, Value]] = {}
        for leaf, value in zip(arguments, values, strict=True):
            if value is not None and value.home < home and (value.id, home) not in self._crossed:
                needed.setdefault(value.id, (leaf, value))
        call = Call(CallKey(self._num_events, name, home, tuple(needed), len(arguments)), arguments, structure)
        self._num_events += 1
        if self.recorder is None:
            self._program.record(call.key)
        else:
            self.recorder.check_arguments(arguments, values, name)
            self._program.used_inside.update(value.id[0] for value in present if self._program.is_inside(value))
            if home in self.stages:  # fails before the synchronization, never between a send and its receive
                for _, value in needed.values():
                    self._crossings.mesh_for(value.meta)
            if needed:
                self.recorder.synchronize("before", call.key)
        for leaf, value in needed.values():
            self._cross(call.key, leaf, value)
        if self._course is not None:
            self._course.begin(call.key.index)
        if home in self.stages:
            call.real = [self._real(leaf, home) for leaf in arguments]
            call.versions = versions_of(call.real)
            call.state = None if self.tape is None else self.tape.state()
        return call

    def notes_inside(self, call: Call) -> bool:
        """Return whether calls of modules with hooks are to be noted inside of a unit."""
        return self.recorder is not None or call.key.index in self._program.used_inside

    def finish(
        self, call: Call, function: Any, output: Any, *, is_operator: bool, inside: Sequence[InnerCall] = ()
    ) -> Any:
        """Finish an event on its home stage: register its outputs as values, and return them to the caller.

        Args:
            call: the event.
            function: a function of torch, or a unit.
            output: what it returned.
            is_operator: whether it is no unit.
            inside: calls of modules with hooks inside of the unit.
        """
        if self.tape is not None and call.real is not None and call.state is not None:
            where = call.real, call.structure, call.versions, call.state
            self.tape.add(function, *where, output, stage=call.key.home)
            if call.key.index in self._program.used_inside:
                self.tape.refuse(f"a hook inside of `{call.key.name}` stores a tensor that code outside uses")
        moved = NOWHERE if self._course is None else self._course.finish(call.key.index, call.key.name)
        leaves, structure = flatten(output)
        inner, inner_structure = flatten(tuple(inside))
        position = {id(leaf): i for i, leaf in enumerate(call.real or ()) if isinstance(leaf, torch.Tensor)}
        if self.recorder is None:
            record = self._program.records[call.key.index]
            if call.key.index in self._program.used_inside:
                inner = _inside_as_recorded(record, leaves, inner, position)
            _check_repeated(record, leaves, position)
        else:
            inner = [leaf if self._is_shown(leaf, leaves, position) else _opaque(leaf) for leaf in inner]
            outcome = _outcome(call, leaves, structure, position, inner, inner_structure, is_operator=is_operator)
            outcome = dataclasses.replace(outcome, moved=moved)
            self.recorder.announce(call.key, outcome)
            record = self._keep(call.key, outcome)
        for i, (leaf, described) in enumerate(zip([*leaves, *inner], [*record.outputs, *record.inside], strict=False)):
            if isinstance(described, TensorMeta):
                self._set(leaf, Value((call.key.index, i), call.key.home, described))
        results = [
            call.arguments[described.argument] if isinstance(described, SameAs) else leaf
            for leaf, described in zip(leaves, record.outputs, strict=True)
        ]
        self._apply_changes(call, record)
        # rebuilding copies containers; it is needed only if an output is replaced
        unchanged = all(result is leaf for result, leaf in zip(results, leaves, strict=True))
        return output if unchanged else structure.rebuild(results)

    def absent(self, call: Call) -> tuple[Any, tuple[InnerCall, ...]]:
        """Finish an event on another stage than its home: return placeholders for its outputs and calls inside."""
        moved = NOWHERE
        if self.recorder is None:
            record = self._program.records[call.key.index]
        else:
            outcome = self.recorder.announce(call.key, None)
            record, moved = self._keep(call.key, outcome), outcome.moved
        if self._course is not None:
            self._course.skip(call.key.index, moved)
        results: list[Any] = []
        for i, described in enumerate([*record.outputs, *record.inside]):
            if isinstance(described, TensorMeta):
                results.append(self._placeholder(Value((call.key.index, i), call.key.home, described)))
            elif isinstance(described, SameAs):
                results.append(call.arguments[described.argument])
            else:
                results.append(results[described.output] if isinstance(described, Repeated) else described)
        self._apply_changes(call, record)
        num_outputs = len(record.outputs)
        inside = record.inside_structure.rebuild(results[num_outputs:])
        return record.structure.rebuild(results[:num_outputs]), inside

    def end(self, loss: Any, *, last_stage: int) -> torch.Tensor | None:
        """Check the loss, and return it where the last stage runs, and None elsewhere.

        Raises:
            PipelineError: the loss is not a value of the last stage.
        """
        value = self.value_of(loss)
        if value is None:
            raise PipelineError(
                "expected a loss that depends on the output of a stage, got one that depends on none; compute it from "
                "the model's output"
            )
        if value.home != last_stage:
            raise PipelineError(
                f"expected a result of the last stage {last_stage}, got {self._program.origin(value)}: the loss or the "
                "selected output does not use the modules of later stages; choose another split"
            )
        if self.recorder is not None:
            self.recorder.check_end()
            self._check_generators(self.recorder)
            self._program.loss = value.meta
        found = self._real(loss, last_stage) if last_stage in self.stages else None
        if self.tape is not None:
            self.tape.end(found)
        return found

    def _check_generators(self, recorder: Recorder) -> None:
        """Check that the generators of all stages were at the same position, if something has drawn."""
        course = self._course
        every = recorder.synchronize("end", None, course and (bool(course.chain), course.start.checksum))
        if course is not None and any(draws for draws, _ in every) and len({number for _, number in every}) > 1:
            raise unequal_generators()

    # --- steps of an event ---

    def _check_order(self, name: str, home: int, values: list[Value]) -> None:
        late = next((value for value in values if value.home > home), None)
        if late is not None:
            raise PipelineError(
                f"`{name}` on stage {home}: expected arguments of this or earlier stages, got "
                f"{self._program.origin(late)}; put `{name}` on stage {late.home} or later with "
                "split=[[...], ...] in the plan, or both on one stage"
            )

    def _is_shown(self, leaf: Any, outputs: Sequence[Any], position: Mapping[int, int]) -> bool:
        """Return whether other stages get a leaf of a call inside of a unit, or a placeholder of it."""
        if not isinstance(leaf, torch.Tensor):
            return isinstance(leaf, _FLAGS)
        if id(leaf) in position or any(leaf is output for output in outputs):
            return True
        if leaf.layout is not torch.strided or is_transformed(leaf):
            return False
        assert self.recorder is not None
        return leaf.grad_fn is not None or self.recorder.is_made_inside(leaf)

    def _set(self, leaf: torch.Tensor, value: Value) -> None:
        self._values[leaf] = value
        note_value(leaf)

    def _real(self, leaf: Any, stage: int) -> Any:
        value = self.value_of(leaf)
        return leaf if value is None else value.received.get(stage, leaf)

    def _placeholder(self, value: Value) -> Placeholder:
        device = self._transport.device_of(value.meta.device_type)
        placeholder = Placeholder(value, device=device, origin=self._program.origin(value))
        self._set(placeholder, value)
        return placeholder

    def _keep(self, key: CallKey, outcome: Outcome) -> Record:
        record = Record.of(key, outcome)
        assert len(self._program.records) == key.index
        self._program.records.append(record)
        return record

    def _cross(self, key: CallKey, leaf: torch.Tensor, value: Value) -> None:
        """Move a value from its home to the home of a call."""
        crossing = (value.id, key.home)
        self._crossed.add(crossing)
        if self.recorder is None:
            index = self._program.crossings[crossing]
        else:
            origin = self._program.origin(value)
            transfer = Transfer(value.home, key.home, origin, key.name, value.meta)
            index = self._program.cross(crossing, transfer)
        if value.home in self.stages:
            tensor = self._real(leaf, value.home)
            if self.recorder is not None:
                self.recorder.note_sent(tensor, self._program.origin(value))
            if self.tape is not None:
                self.tape.send(index, tensor)
            self._crossings.send(index, tensor)
        if key.home in self.stages:
            if value.home in self.stages:
                value.received.setdefault(value.home, tensor)
            received = value.received[key.home] = self._crossings.receive(index)
            self._set(received, value)  # a hook may store it
            if self.tape is not None:
                self.tape.receive(index, value.received[key.home])

    def _apply_changes(self, call: Call, record: Record) -> None:
        """Assign a new value, at the home of the call, to each argument written in place."""
        for position, meta in record.changed:
            argument = call.arguments[position]
            before = self.value_of(argument)
            after = Value((call.key.index, -1 - position), call.key.home, meta)
            if call.real is not None and call.real[position] is not argument:
                after.received[call.key.home] = call.real[position]
                self._set(call.real[position], after)
            self._set(argument, after)
            if isinstance(argument, Placeholder):
                argument.value = after
                if meta.requires_grad and not argument.requires_grad:
                    argument.requires_grad_(True)
            elif self.recorder is not None and (before is None or before.home != call.key.home):
                self.recorder.note_moved(argument, after, call.key.name)


def _outcome(
    call: Call,
    leaves: list,
    structure: Structure,
    position: dict[int, int],
    inner: list,
    inner_structure: Structure,
    *,
    is_operator: bool,
) -> Outcome:
    """Return the metadata of a call's outputs and in-place writes, and of calls inside of it, on its home stage."""
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if is_operator and not has_tensor and any(leaf is not None for leaf in leaves):
        raise PipelineError(
            f"expected tensor operators outside of stage modules, got `{call.key.name}`, which reads the elements of a "
            f"value of stage {call.key.home} that other stages do not hold; move this code into a module of one stage, "
            "or after the engine's call"
        )
    described: list[Any] = []
    seen: dict[int, int] = {}
    for i, leaf in enumerate([*leaves, *inner]):
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), i)
            if id(leaf) in position:
                described.append(SameAs(position[id(leaf)]))
            else:
                described.append(meta_of(leaf) if first == i else Repeated(first))
        elif isinstance(leaf, (*_PLAIN, Opaque)) or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)):
            described.append(leaf)
        else:
            raise PipelineError(
                f"output of `{call.key.name}`: expected tensors and plain Python values, in tuples, lists, dicts or "
                f"dataclasses, got {type(leaf).__name__}; return its tensors"
            )
    changed = tuple(
        (i, meta_of(leaf))
        for i, (leaf, version) in enumerate(zip(call.real or (), call.versions, strict=True))
        if isinstance(leaf, torch.Tensor) and version_of(leaf) != version
    )
    inside = inner_structure.rebuild(described[len(leaves) :])
    return Outcome(structure.rebuild(described[: len(leaves)]), changed, inside=inside)


def _opaque(leaf: Any) -> Opaque:
    return Opaque(type(leaf).__name__)


def _matches(leaf: Any, described: Any, leaves: Sequence[Any], position: Mapping[int, int]) -> bool:
    """Return whether a leaf is as recorded, except for shapes of tensors that are not sent."""
    if isinstance(described, SameAs):
        return position.get(id(leaf)) == described.argument
    if isinstance(described, TensorMeta):
        return isinstance(leaf, torch.Tensor) and id(leaf) not in position
    if isinstance(described, Repeated):
        return leaf is leaves[described.output]
    return type(leaf) is type(described) and leaf == described


def _inside_as_recorded(record: Record, outputs: list[Any], inner: list[Any], position: dict[int, int]) -> list[Any]:
    """Return what was noted inside of a unit without what is opaque, checked against its record."""
    shown = [d if isinstance(d, Opaque) else leaf for leaf, d in zip(inner, record.inside, strict=False)]
    every = [*outputs, *shown]
    if len(inner) != len(record.inside) or not all(
        _matches(leaf, described, every, position) for leaf, described in zip(shown, record.inside, strict=True)
    ):
        raise PipelineError(
            f"modules with hooks inside of `{record.key.name}`: expected the same calls in every micro-batch, since "
            "code outside of stage modules uses a tensor that a hook stores, got others; hook modules whose calls do "
            "not depend on the data, or return the tensor from its module"
        )
    return shown


def _check_repeated(record: Record, leaves: list[Any], position: dict[int, int]) -> None:
    """Check a call's outputs against its record."""
    if len(leaves) != len(record.outputs) or not all(
        _matches(leaf, described, leaves, position) for leaf, described in zip(leaves, record.outputs, strict=True)
    ):
        now = [type(leaf).__name__ if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        raise PipelineError(
            f"output of `{record.key.name}`: expected {[*map(str, record.outputs)]}, as recorded, got {now}; return "
            "values that vary between micro-batches as tensors"
        )
