"""The tape of a stage: what its forward runs, as a list, so that later micro-batches need not run the user's code.

While a micro-batch runs the user's code, every call of a torch function and of a unit is put on the tape with the
tensors that it takes: leaves of the input, results of other calls, and constants (buffers, attributes). Later ones run
what the stage needs of it: its own calls, what it sends and receives, and the calls on tensors that depend on no unit
(masks, rotary tables) whose results it uses. Nothing is traced, and only what can differ is compared:

    numbers that code reads from such tensors (``if mask.all():``)     if one differs, the user's code runs instead
    plain values and shapes in the outputs of units                    must be as they were: an error
    attributes of modules on every stage, and variables that code      if one differs, a new tape
    outside of units reads, compared in every step
    all else that code outside of units can depend on                  compared with a new tape now and then: an error

Units run where the user's code calls them, in contexts that it may open, and read what it may set. What a unit finds
there must be what the step began with: modes, the switches of torch, attributes of units, variables. What may differ is
in the `State` of each call.

What a tape cannot repeat is left to the user's code: ``Tape.reason`` says why.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import OperatorMode, is_transformed, set_grad_enabled, version_of
from .sources import Sources
from .surroundings import PLAIN, State, is_of_torch, surroundings
from .tree import Structure, flatten, is_flat
from .values import PipelineError, local_part

CALL, READ, SEND, RECEIVE = "call", "read", "send", "receive"
_FIXED = (type, EllipsisType, torch.memory_format, torch.layout)  # a function or a module may hold tensors


@dataclass
class Node:
    """An entry of the tape.

    Attributes:
        kind: a call, a number that is read, a send or a receive.
        is_own: whether the stage runs it for itself; else it is a call on tensors that depend on no unit.
        function: a function of torch or a unit.
        leaves: of its arguments; None for those that come from slots.
        slots: where the tensors among them come from.
        structure: of ``(args, kwargs)``.
        is_flat: whether the leaves are the arguments, all of them positional.
        results: the slots of the tensors among the leaves of its result; None for other leaves.
        expected: the shapes of tensors and the other leaves of its result.
        state: in which it runs; None if it is that of the step.
        transfer: index of a sent or received value.
        writes: the memory that it writes.
        free: slots that no later entry uses.
    """

    kind: str
    is_own: bool
    function: Callable[..., Any] | None = None
    leaves: list[Any] = field(default_factory=list)
    slots: list[int | None] = field(default_factory=list)
    structure: Structure | None = None
    is_flat: bool = False
    results: list[int | None] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    state: State | None = None
    transfer: int = -1
    writes: frozenset[int] = frozenset()
    free: tuple[int, ...] = ()

    def inputs(self) -> Iterable[int]:
        """Return the slots that it reads."""
        return (slot for slot in self.slots if slot is not None)

    def outputs(self) -> Iterable[int]:
        """Return the slots that it fills."""
        return (slot for slot in self.results if slot is not None)

    @property
    def name(self) -> str:
        """The name of the function, for messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def run(self, slots: dict[int, Any]) -> list[Any]:
        """Run the call, fill the slots of its result, and return its leaves."""
        assert self.function is not None
        assert self.structure is not None
        given = [leaf if slot is None else slots[slot] for leaf, slot in zip(self.leaves, self.slots, strict=True)]
        args, kwargs = (given, {}) if self.is_flat else self.structure.rebuild(given)
        if self.state is None:
            result = self.function(*args, **kwargs)
        else:
            with self.state.active():
                result = self.function(*args, **kwargs)
        outputs = [result] if isinstance(result, torch.Tensor) else flatten(result)[0]
        for slot, leaf in zip(self.results, outputs, strict=False):
            if slot is not None:
                slots[slot] = leaf
        return outputs

    def matches(self, outputs: Sequence[Any]) -> bool:
        """Return whether shapes and plain values of a result are as they were."""
        return self.expected == [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs]

    def same(self, other: Node) -> bool:
        """Return whether two entries are of the same call with the same constants."""
        mine = self.kind, self.slots, self.results, self.state, self.transfer
        theirs = other.kind, other.slots, other.results, other.state, other.transfer
        is_same_function = self.function is other.function or self.function == other.function
        return mine == theirs and is_same_function and all(map(_is_same, self.leaves, other.leaves))


class Tape:
    """What one stage runs in a forward. It takes down one forward, until ``end``; then it can be run.

    Args:
        device_type: of the pipeline's mesh.
        inside: returns the attributes of the stage's units, which code outside of them may not set.

    Attributes:
        reason: why it cannot be run; None if it can.
        uses: how often it has run.
    """

    def __init__(self, device_type: str, inside: Callable[[], tuple]) -> None:
        self.nodes: list[Node] = []
        self._inside, self._seen = inside, inside()
        self.reason: str | None = None
        self.uses = 0
        self._device_type = device_type
        self._variables = contextvars.copy_context()
        self._ambient, self._around = self.state(), surroundings()
        self._sources = Sources()
        self._loss: int | None = None
        self._has_flat_input = False
        self._strides: list[tuple[int, ...]] = []  # of the input, on which code may depend
        self._reads: list[Node] = []
        self._rest: list[Node] = []
        self._slots: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._num_slots = 0
        self._memory: dict[int, int] = {}  # of slots: an address
        self._alive: list[torch.Tensor] = []  # so that no address is used twice
        self._born: set[int] = set()  # addresses of results
        self._filled: set[int] = set()  # of slots, other than those of constants
        self._constant: set[int] = {0}

    # --- taking down ---

    @contextlib.contextmanager
    def taking_down(self) -> Iterator[None]:
        """Take down the forward that runs in this context."""
        if sys.getprofile() is not None:
            self.refuse("a profiler of Python runs")  # there can be one only
        with contextlib.nullcontext() if self.reason else self._sources.watching():
            yield

    def is_current(self) -> bool:
        """Return whether the variables that code outside of units reads are as they were."""
        return self._sources.look()

    def state(self) -> State:
        """Return the present state."""
        return State.present(self._device_type, self._variables)

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Fill the first slots with the tensors of the input."""
        leaves, _ = flatten((args, kwargs))
        self._has_flat_input = is_flat(args, kwargs, leaves)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if leaf not in self._slots:
                    self._strides.append(leaf.stride())
                self._fill(leaf)
            elif not isinstance(leaf, PLAIN):
                self.refuse(f"the input has a {type(leaf).__name__}")

    def add(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        structure: Structure,
        versions: Sequence[int],
        state: State,
        result: Any,
        *,
        stage: int | None,
    ) -> None:
        """Put a call on the tape that has run.

        Args:
            function: a function of torch, or a unit.
            leaves: of its arguments.
            structure: of its arguments.
            versions: of the leaves before the call.
            state: before the call.
            result: what it returned.
            stage: that of the call; None for one on tensors that depend on no unit.
        """
        if function is set_grad_enabled:
            return  # calls are taken down with their state
        if any(isinstance(leaf, torch.Tensor) and is_transformed(leaf) for leaf in leaves):
            self.refuse("code outside of modules uses a transform of torch.func")
            return
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and not _is_constant(leaf):
                # it may be a new one in every forward, and calls may change it
                self.refuse(f"`{getattr(function, '__name__', type(function).__name__)}` gets a {type(leaf).__name__}")
        self._compare(surroundings() | {"modes": self._around["modes"]})  # those on top are not seen in a call
        if (reason := state.refused()) is not None:
            self.refuse(reason)
        if is_of_torch(function):
            state = dataclasses.replace(state, variables=())  # it reads none
        slots = [self._slot(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        written = frozenset(
            address
            for leaf, version in zip(leaves, versions, strict=True)
            if isinstance(leaf, torch.Tensor) and version_of(leaf) != version and (address := _address(leaf))
        )
        outputs = flatten(result)[0]
        tensors = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
        reads = stage is None and any(leaf is not None and not isinstance(leaf, torch.Tensor) for leaf in outputs)
        if stage is None and not tensors and not written and not any(slot is not None for slot in slots):
            return  # of constants
        if reads and not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in outputs):
            self.refuse(f"`{getattr(function, '__name__', function)}` gives an object to code outside of modules")
        self.nodes.append(
            Node(
                READ if reads else CALL,
                stage is not None,
                function,
                [leaf if slot is None else None for slot, leaf in zip(slots, leaves, strict=True)],
                slots,
                structure,
                _is_flat(structure, len(leaves)),
                [self._fill(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in outputs],
                [_described(leaf) for leaf in outputs],
                None if state == self._ambient else state,
                writes=written,
            )
        )

    def send(self, transfer: int, tensor: torch.Tensor) -> None:
        """Put a send on the tape."""
        self.nodes.append(Node(SEND, True, slots=[self._slot(tensor)], transfer=transfer))

    def receive(self, transfer: int, tensor: torch.Tensor) -> None:
        """Put a receive on the tape."""
        self.nodes.append(Node(RECEIVE, True, results=[self._fill(tensor)], transfer=transfer))

    def end(self, loss: torch.Tensor | None) -> None:
        """Put the loss on the tape, let go of what taking down needed, and keep what the stage needs."""
        self.entering()
        self._seen = ()
        self._loss = None if loss is None else self._slot(loss)
        self._reads = self._needed([node for node in self.nodes if node.kind == READ])
        if any(node.writes for node in self._reads):
            self.refuse("code outside of modules reads numbers from tensors that it writes")
        early = set(map(id, self._reads))
        kept = self._needed([node for node in self.nodes if node.is_own], self._loss)
        self._rest = [node for node in kept if id(node) not in early]
        last = {slot: node for node in self._rest for slot in (*node.inputs(), *node.outputs())}
        for node in self._rest:
            own = dict.fromkeys((*node.inputs(), *node.outputs()))
            node.free = tuple(slot for slot in own if last[slot] is node and slot != self._loss)
        self._slots, self._alive, self._born, self._memory = WeakTensorKeyDictionary(), [], set(), {}

    def born(self, function: Any, given: Any, result: Any) -> None:
        """Note the new memory of an operator's result."""
        if torch.Tag.dynamic_output_shape in function.tags:
            self.refuse(f"{function} gives shapes that depend on elements")
        new = [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor) and not is_transformed(leaf)]
        old = {_address(leaf) for leaf in flatten(given)[0] if isinstance(leaf, torch.Tensor)}
        for leaf in new:
            if (address := _address(leaf)) and address not in old:
                self._born.add(address)
                self._alive.append(leaf)

    def entering(self) -> None:
        """Note that a unit begins, or the forward ends: until now code outside has run."""
        if self._inside() != self._seen:
            self.refuse("code outside of modules sets attributes of modules")
        self._compare(surroundings())
        self._sources.pause()
        if self._sources.changed is not None:
            self.refuse(f"code outside of modules changes the variable {self._sources.changed}")

    def leaving(self) -> None:
        """Note that a unit ends."""
        self._seen = self._inside()
        self._sources.resume()

    def _compare(self, around: dict[str, Any]) -> None:
        if self.reason is None and around != self._around:
            names = [name for name in {**around, **self._around} if around.get(name) != self._around.get(name)]
            self.refuse(f"code outside of modules changes {' and '.join(names)} around calls")

    def refuse(self, reason: str) -> None:
        """Leave this stage to the user's code."""
        self.reason = self.reason or reason

    def _slot(self, tensor: torch.Tensor) -> int | None:
        """Return where a tensor comes from; None for a constant."""
        slot: int | None = self._slots.get(tensor)
        if slot is None and (address := _address(tensor)) not in self._constant:
            if address in self._born or address in self._filled or tensor.grad_fn is not None:
                self.refuse("code outside of modules uses the result of an operator that is not seen")
            self._constant.add(address)
        return slot

    def _fill(self, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor: a new one, unless it is that of an argument."""
        if tensor not in self._slots:
            self._slots[tensor] = self._num_slots
            self._num_slots += 1
        slot: int = self._slots[tensor]
        self._memory[slot] = address = _address(tensor)
        if address and address not in self._constant:
            self._filled.add(address)
        self._alive.append(tensor)
        return slot

    def _needed(self, wanted: Iterable[Node], loss: int | None = None) -> list[Node]:
        """Return these nodes, those whose results they use, and those that write memory that is used."""
        made = {self._memory[slot] for node in self.nodes for slot in node.outputs()}
        kept, needed = {id(node) for node in wanted}, set() if loss is None else {loss}
        grows = True
        while grows:  # a write may come before or after a use of its memory
            count = len(kept)
            for node in reversed(self.nodes):
                memory = {self._memory[slot] for slot in needed}
                writes = any(address in memory or address not in made for address in node.writes)
                if id(node) in kept or (not node.is_own and (writes or not needed.isdisjoint(node.outputs()))):
                    kept.add(id(node))
                    needed.update(node.inputs())
            grows = len(kept) > count
        return [node for node in self.nodes if id(node) in kept]

    # --- running ---

    def prepared(self, args: tuple, kwargs: dict) -> dict[int, Any] | None:
        """Return the slots that are filled at the start; None if numbers that code reads, or strides, differ."""
        leaves = [*args, *kwargs.values()] if self._has_flat_input else flatten((args, kwargs))[0]
        tensors = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if [leaf.stride() for leaf in tensors] != self._strides:
            return None
        slots: dict[int, Any] = dict(enumerate(tensors))
        for node in self._reads:
            outputs = node.run(slots)
            if node.kind == READ and not node.matches(outputs):
                return None
        return slots

    def run(
        self,
        slots: dict[int, Any],
        send: Callable[[int, torch.Tensor], None],
        receive: Callable[[int], torch.Tensor],
    ) -> torch.Tensor | None:
        """Run the stage, and return the loss where it is computed.

        Args:
            slots: those of ``prepared``.
            send: sends a value, given the index of the transfer.
            receive: receives one.

        Raises:
            PipelineError: a unit's result has other shapes or plain values than before.
        """
        self.uses += 1
        for node in self._rest:
            if node.kind == CALL:
                outputs = node.run(slots)
                if node.is_own and not node.matches(outputs):
                    raise PipelineError(
                        f"output of `{node.name}`: expected {node.expected}, as in an earlier micro-batch, got "
                        f"{[_described(leaf) for leaf in outputs]}; return values that vary between micro-batches as "
                        "tensors"
                    )
            elif node.kind == SEND:
                send(node.transfer, slots[next(iter(node.inputs()))])
            elif node.kind == RECEIVE:
                slots[next(iter(node.outputs()))] = receive(node.transfer)
            for slot in node.free:
                del slots[slot]
        return None if self._loss is None else slots[self._loss]

    def check_same(self, other: Tape) -> None:
        """Compare with a tape that was taken down later.

        Raises:
            PipelineError: code outside of modules has done something else.
        """
        found = None
        for mine, theirs in zip(self.nodes, other.nodes, strict=False):
            if not mine.same(theirs):
                found = f"{mine.name} and {theirs.name}"
                break
            if mine.kind == READ and mine.expected != theirs.expected:
                return  # what follows may depend on this number
        if found is None and len(self.nodes) != len(other.nodes):
            found = f"{len(self.nodes)} and {len(other.nodes)} calls"
        if found is not None:
            raise PipelineError(
                "expected code outside of stage modules that does the same in every step, got different calls: "
                f"{found}; keep what it depends on in attributes of the model or in its inputs"
            )


class Births(OperatorMode):
    """Tells a tape of the results of operators while it is active.

    Args:
        tape: the tape.
        outside: returns a context, or None where operators are not told of.
    """

    _vescale_passes_on = True  # for modes around it that see every operator

    def __init__(self, tape: Tape, outside: Callable[[], contextlib.AbstractContextManager | None]) -> None:
        super().__init__()
        self._tape, self._outside = tape, outside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if (context := self._outside()) is not None:
            with context:
                self._tape.born(func, (args, kwargs), result)
        return result


def versions_of(leaves: Iterable[Any]) -> list[int]:
    """Return how often tensors have been written; 0 for other leaves."""
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


def _is_constant(leaf: Any) -> bool:
    """Return whether an argument is one that no call changes."""
    if isinstance(leaf, slice):
        return all(map(_is_constant, (leaf.start, leaf.stop, leaf.step)))
    return isinstance(leaf, (*PLAIN, *_FIXED))


def _described(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf


def _is_flat(structure: Structure, count: int) -> bool:
    numbers = list(range(count))
    args, kwargs = structure.rebuild(numbers)
    return list(args) == numbers and not kwargs


def _is_same(mine: Any, theirs: Any) -> bool:
    if mine is theirs or type(mine) is not type(theirs):
        return mine is theirs
    if isinstance(mine, torch.Tensor):
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return not isinstance(mine, PLAIN) or mine == theirs or (mine != mine and theirs != theirs)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return local_part(tensor).untyped_storage().data_ptr()
