"""One forward of one micro-batch on one stage.

Note [How a forward is followed]
Every stage runs the user's whole forward. A call is an **event** when it is a call of a unit, or an operator outside of
units with a value among its arguments. Events are numbered; the numbers agree on all stages, since all run the same
program. The home of an event is the unit's stage, or the last home among the operator's arguments:

    event                    home    on its home           elsewhere
    e = embed(ids)           0       runs                  returns a placeholder
    h = blocks[0](e)         0       runs                  returns a placeholder
    g = blocks[1](h)         1       receives h and runs   stage 0 sends h; a placeholder is returned
    s = h + g                1       runs (h is here)      returns a placeholder
    n = norm(e + s)          1       receives e and runs   stage 0 sends e

A value whose home is before an event's home is sent there once, at the first event that needs it. Both sides know this
from the event alone, so messages need no headers, and match by order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from ._backward import Boundary, attach
from ._program import CallKey, Outcome, Program, Record, Transfer
from ._recorder import Recorder
from ._torch import version_of
from ._transport import FORWARD, Transport
from ._tree import Structure, flatten
from ._values import (
    PipelineError,
    Placeholder,
    Repeated,
    SameAs,
    TensorMeta,
    Value,
    ValueId,
    from_local_part,
    local_part,
    meta_of,
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass
class Call:
    """An event in progress. ``real`` are its arguments as they run here, None where the call does not run here."""

    key: CallKey
    arguments: list[Any]
    structure: Structure
    real: list[Any] | None = None
    versions: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[tuple, dict]:
        """Positional and keyword arguments to run the call with on its home stage."""
        assert self.real is not None, "the call runs on another stage"
        return self.structure.rebuild(self.real)


class Frame:
    """Follows one forward on one stage; see Note [How a forward is followed].

    Args:
        transport: this stage's communication.
        program: the records; filled if ``recorder`` is given, followed otherwise.
        recorder: agreement between stages in the first micro-batch, None later.
        find_mesh: returns this stage's mesh with the given axis names.
    """

    def __init__(
        self,
        transport: Transport,
        program: Program,
        *,
        recorder: Recorder | None,
        find_mesh: Callable[[tuple[str, ...]], DeviceMesh],
    ) -> None:
        self.stage = transport.stage
        self.boundary = Boundary()
        self.recorder = recorder
        self._transport = transport
        self._program = program
        self._find_mesh = find_mesh
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._crossed: set[tuple[ValueId, int]] = set()
        self._num_events = 0

    # --- what the function mode asks ---

    def value_of(self, leaf: Any) -> Value | None:
        """Return the record of a tensor that depends on a unit; None for anything else."""
        return self._values.get(leaf) if isinstance(leaf, torch.Tensor) else None

    def is_event(self, leaves: list[Any], name: str) -> bool:
        """Return whether an operator call with these arguments involves a value."""
        if any(self.value_of(leaf) is not None for leaf in leaves):
            return True
        if self.recorder is not None:
            self.recorder.check_arguments(leaves, [None] * len(leaves), name)
        return False

    # --- events ---

    def begin(self, name: str, arguments: list[Any], structure: Structure, *, owner: int | None = None) -> Call:
        """Start an event: find its home, and move the values that it needs there.

        Args:
            name: the unit's name, or the operator's.
            arguments: leaves of ``(args, kwargs)``, whose structure is ``structure``.
            owner: the unit's stage; None for an operator.

        Raises:
            PipelineError: a value of a later stage is needed on an earlier one, or the program differs.
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
            if home == self.stage:  # found before the meeting: nothing may fail between a send and its receive
                for _, value in needed.values():
                    self._mesh_for(value)
            if needed:
                self.recorder.meet("before", call.key)
        for leaf, value in needed.values():
            self._cross(call.key, leaf, value)
        if home == self.stage:
            call.real = [self._real(leaf) for leaf in arguments]
            call.versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in call.real]
        return call

    def finish(self, call: Call, output: Any, *, is_operator: bool) -> Any:
        """End an event on its home stage: mark its outputs as values, and return what the caller gets."""
        leaves, structure = flatten(output)
        position = {id(leaf): i for i, leaf in enumerate(call.real or ()) if isinstance(leaf, torch.Tensor)}
        if self.recorder is None:
            record = self._program.records[call.key.index]
            _check_repeated(record, leaves, position)
        else:
            outcome = _outcome(call, leaves, structure, position, is_operator=is_operator)
            self.recorder.announce(call.key, outcome)
            record = self._keep(call.key, outcome)
        results: list[Any] = []
        for i, (leaf, described) in enumerate(zip(leaves, record.outputs, strict=True)):
            if isinstance(described, TensorMeta):
                self._values[leaf] = Value((call.key.index, i), self.stage, described)
            results.append(call.arguments[described.argument] if isinstance(described, SameAs) else leaf)
        self._apply_changes(call, record)
        # rebuilding copies containers, which is only needed where an output is replaced
        unchanged = all(result is leaf for result, leaf in zip(results, leaves, strict=True))
        return output if unchanged else structure.rebuild(results)

    def absent(self, call: Call) -> Any:
        """End an event on a stage that is not its home: return placeholders for its outputs."""
        if self.recorder is None:
            record = self._program.records[call.key.index]
        else:
            record = self._keep(call.key, self.recorder.announce(call.key, None))
        results: list[Any] = []
        for i, described in enumerate(record.outputs):
            if isinstance(described, TensorMeta):
                results.append(self._placeholder(Value((call.key.index, i), call.key.home, described)))
            elif isinstance(described, SameAs):
                results.append(call.arguments[described.argument])
            else:
                results.append(results[described.output] if isinstance(described, Repeated) else described)
        self._apply_changes(call, record)
        return record.structure.rebuild(results)

    def end(self, loss: Any, *, last_stage: int) -> torch.Tensor | None:
        """Check the loss and return it on the last stage, None on the others.

        Raises:
            PipelineError: the loss does not come from the last stage.
        """
        value = self.value_of(loss)
        if value is None:
            raise PipelineError("the loss does not depend on the output of any stage")
        if value.home != last_stage:
            raise PipelineError(
                f"the loss is {self._program.origin(value)}, but the last stage is {last_stage}: the modules of the "
                "stages after it are not used for the loss; choose another split"
            )
        if self.recorder is not None:
            self.recorder.check_end()
            self.recorder.meet("end", None)
            self._program.loss = value.meta
        return self._real(loss) if self.stage == last_stage else None

    # --- pieces ---

    def _check_order(self, name: str, home: int, values: list[Value]) -> None:
        late = next((value for value in values if value.home > home), None)
        if late is not None:
            raise PipelineError(
                f"`{name}` runs on stage {home} but needs {self._program.origin(late)}: values can only go to later "
                f"stages. Put `{name}` on stage {late.home} or later with PipelinePlan(split=[[...], ...]), or both on "
                "one stage"
            )

    def _real(self, leaf: Any) -> Any:
        value = self.value_of(leaf)
        return leaf if value is None or value.received is None else value.received

    def _placeholder(self, value: Value) -> Placeholder:
        device = self._transport.device_of(value.meta.device_type)
        placeholder = Placeholder(value, device=device, origin=self._program.origin(value))
        self._values[placeholder] = value
        return placeholder

    def _keep(self, key: CallKey, outcome: Outcome) -> Record:
        record = Record.of(key, outcome)
        assert len(self._program.records) == key.index
        self._program.records.append(record)
        return record

    def _cross(self, key: CallKey, leaf: torch.Tensor, value: Value) -> None:
        """Move a value from its home to the home of a call."""
        self._crossed.add((value.id, key.home))
        if self.recorder is not None:
            origin = self._program.origin(value)
            self._program.transfers.append(Transfer(value.home, key.home, origin, key.name, value.meta))
        if self.stage == value.home:
            self._send(key, self._real(leaf), value)
        elif self.stage == key.home:
            value.received = self._receive(key, value)

    def _send(self, key: CallKey, tensor: torch.Tensor, value: Value) -> None:
        if self.recorder is not None:
            self.recorder.note_sent(tensor, self._program.origin(value))
        elif not (meta := meta_of(tensor)).same_data(value.meta):
            raise PipelineError(
                f"{self._program.origin(value)} is now {meta}, requires_grad={meta.requires_grad}; in the first "
                f"micro-batch it was {value.meta}, requires_grad={value.meta.requires_grad}. What crosses stages must "
                "keep its shape while the inputs keep theirs"
            )
        self._transport.send(local_part(tensor), key.home, FORWARD, stride=value.meta.local_layout[1])
        if value.meta.requires_grad:
            self.boundary.add_sent(tensor, value, key)

    def _mesh_for(self, value: Value) -> DeviceMesh | None:
        return None if value.meta.sharded is None else self._find_mesh(value.meta.sharded.axis_names)

    def _receive(self, key: CallKey, value: Value) -> torch.Tensor:
        meta, mesh = value.meta, self._mesh_for(value)
        local = self._transport.receive(
            *meta.local_layout,
            meta.dtype,
            device=self._transport.device_of(meta.device_type),
            source=value.home,
            direction=FORWARD,
        )
        tensor = from_local_part(local, meta, mesh)
        if not meta.requires_grad:
            return tensor
        tensor, edge = attach(tensor)
        self.boundary.add_received(edge, value, key, mesh)
        return tensor

    def _apply_changes(self, call: Call, record: Record) -> None:
        """Give the arguments that the call wrote to a new identity, at the home of the call."""
        for position, meta in record.changed:
            argument = call.arguments[position]
            before = self.value_of(argument)
            after = Value((call.key.index, -1 - position), call.key.home, meta)
            if call.real is not None and call.real[position] is not argument:
                after.received = call.real[position]
            self._values[argument] = after
            if isinstance(argument, Placeholder):
                argument.value = after
                if meta.requires_grad and not argument.requires_grad:
                    argument.requires_grad_(True)
            elif self.recorder is not None and (before is None or before.home != call.key.home):
                self.recorder.note_moved(argument, after, call.key.name)


def _outcome(call: Call, leaves: list, structure: Structure, position: dict[int, int], *, is_operator: bool) -> Outcome:
    """Describe what a call returned and wrote, on its home stage."""
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if is_operator and not has_tensor and any(leaf is not None for leaf in leaves):
        raise PipelineError(
            f"`{call.key.name}` reads the elements of a value of stage {call.key.home} outside of the stages' modules, "
            "and other stages do not hold it. Control flow there may depend on shapes, not on values: move this code "
            "into a module that belongs to one stage, or to where the loss is used"
        )
    described: list[Any] = []
    seen: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), i)
            if id(leaf) in position:
                described.append(SameAs(position[id(leaf)]))
            else:
                described.append(meta_of(leaf) if first == i else Repeated(first))
        elif isinstance(leaf, _PLAIN) or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)):
            described.append(leaf)
        else:
            raise PipelineError(
                f"`{call.key.name}` returns a {type(leaf).__name__}, which the pipeline cannot look into; return "
                "tensors and plain Python values, in tuples, lists, dicts or dataclasses"
            )
    changed = tuple(
        (i, meta_of(leaf))
        for i, (leaf, version) in enumerate(zip(call.real or (), call.versions, strict=True))
        if isinstance(leaf, torch.Tensor) and version_of(leaf) != version
    )
    return Outcome(structure.rebuild(described), changed)


def _check_repeated(record: Record, leaves: list[Any], position: dict[int, int]) -> None:
    """Check that a call returned what it returned in the first micro-batch, shapes of unsent tensors aside."""

    def matches(leaf: Any, described: Any) -> bool:
        if isinstance(described, SameAs):
            return position.get(id(leaf)) == described.argument
        if isinstance(described, TensorMeta):
            return isinstance(leaf, torch.Tensor) and id(leaf) not in position
        if isinstance(described, Repeated):
            return leaf is leaves[described.output]
        return type(leaf) is type(described) and leaf == described

    if len(leaves) != len(record.outputs) or not all(map(matches, leaves, record.outputs)):
        now = [type(leaf).__name__ if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        raise PipelineError(
            f"`{record.key.name}` returned {now}, and in the first micro-batch {[*map(str, record.outputs)]}, on which "
            "the other stages rely. Return what varies as a tensor"
        )
