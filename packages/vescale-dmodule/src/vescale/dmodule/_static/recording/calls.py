"""Note the calls of torch functions in a call that runs on DTensors."""

from __future__ import annotations

import bisect
import contextlib
import functools
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.overrides import TorchFunctionMode

from vescale.dtensor import extension

from ... import _torch
from ..._boundary.convert import as_dtensor, bring, to_plain
from ..._boundary.rows_axis import gradient_over_rows, lift, settled, whole_extremes
from ...errors import NotLocalFriendlyError
from ..movement.steps import without_partials
from ..operators import ModuleOperators, Operand, Part, RecordedOperator, Repeat
from ..parts import Parts, describe, is_inside, ways_out
from .memory import initialized
from .names import ModuleCall, Names
from .observe import replicated
from .rounding import nudged

__all__ = ["CallRecorder", "Island", "KeptCall", "Place", "is_metadata"]

METADATA = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.stride,
        Tensor.storage_offset,
        Tensor.element_size,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.data_ptr,
        Tensor.__len__,
        Tensor.__hash__,
        Tensor.__format__,
        Tensor.__repr__,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_tensor,
        torch.numel,
    }
)
TENSORS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})
"""Attributes of a tensor that are tensors."""

Place = tuple[int, int]
"""A call of a torch function: the number of the call of its module, and its position in that call."""


@dataclass
class Island:
    """What is known of an operator that must run on DTensors.

    Attributes:
        constants: see :class:`RecordedOperator`.
        written: see :class:`RecordedOperator`.
        part: see :class:`RecordedOperator`.
        operands: placements of operands that local code has as shards, and the recording as whole tensors; by place.
    """

    constants: dict[int, tuple[object, object]] = field(default_factory=dict)
    written: tuple[int, ...] = ()
    part: Part | None = None
    operands: dict[int, tuple[Placement, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class KeptCall:
    """One call of a torch function with its values, for the search for islands.

    Attributes:
        operator: what is recorded of it.
        constants: the arguments that are no tensors.
        result: the result, with local values in place of tensors.
        operands: local values, after the call, of the operands that it wrote; by their place.
        returned: the place of the operand that each tensor of the result is; None if it is another tensor.
        communicates: whether an operand was redistributed implicitly, or the log shows a collective.
        averages: whether an operand or the result is a mean over ranks; its local gradients are no layout of DTensors.
        whole: mesh axes whose ranks all have the whole result; empty if it is not one tensor, or has a gradient.
        shape: of that result, the same on all ranks.
        trained: the operands that are parameters.
        cuts: mesh axes along which ranks have parts of an operand or of the result.
        is_inner: whether it is a call of the forward of an ``autograd.Function``, of which only the results count.
    """

    operator: RecordedOperator
    constants: list[object]
    result: object
    operands: dict[int, Tensor]
    returned: list[int | None]
    communicates: bool
    averages: bool
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    trained: list[Tensor]
    cuts: set[int]
    is_inner: bool


class CallRecorder(TorchFunctionMode):
    """Note every call of a torch function, and whether it advances the random stream.

    Args:
        names: the running modules.
        mesh: of the recorded layouts.
        islands: the calls that are known to run on DTensors in static mode.
        keeps: whether to keep the values of all calls, to find out which others must.
        nudges: whether to change every result by rounding errors (see ``rounding``).
        over_rows: whether the first axis of the mesh is that of the rows of data-parallel ranks, ahead of a plan.
        of_rows: whether the mesh is the axis of the rows of data-parallel ranks; there nothing is recorded of backward.

    Attributes:
        drawn: all random operators, by module, and all calls with a generator argument.
        kept: the values of the calls, if they are kept.
        takes_gradients: whether a call takes gradients itself.
        communicating: calls whose backward redistributed an operand implicitly.
        mesh: of the recorded layouts.
        log: of collectives, if operators that communicate in their own rules count as communicating.
        is_inner: whether calls are those of the forward of an ``autograd.Function`` (see ``_rows.functions``).
        edges: the nodes of autograd of values at boundaries, and of results of islands: where gradients have layouts.
    """

    def __init__(
        self,
        names: Names,
        mesh: DeviceMesh,
        islands: Mapping[Place, Island],
        *,
        keeps: bool,
        nudges: bool = False,
        over_rows: bool = False,
        of_rows: bool = False,
    ):
        super().__init__()
        self._nudges, self._over_rows, self._of_rows = nudges, over_rows, of_rows
        self._names, self.mesh, self._islands, self._keeps = names, mesh, islands, keeps
        names.position_in = self._position_in
        self._calls: dict[ModuleCall, list[RecordedOperator]] = {}
        self._first: dict[str, int] = {}  # number of the first call of each module
        self._communicates = False
        self._drawn_on: list[tuple[Placement, ...]] = []
        self._begun: tuple[list[int], list[Place]] = [], []  # sequence numbers at the begin of each call
        self.drawn: dict[str, list[RecordedOperator]] = {}
        self.kept: dict[Place, KeptCall] = {}
        self.communicating: set[Place] = set()
        self.takes_gradients = False
        self.log: Sized = ()
        self.is_inner: Callable[[], bool] = bool
        self.edges: set[object] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_metadata(func) or func in (bring, to_plain):  # see Note [boundaries are torch functions]
            return func(*args, **kwargs)
        leaves = _torch.tree_leaves((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        place = self._place()
        island = self._islands.get(place)
        if island is not None and island.operands:
            moved = {id(t): self._lifted(t) for t in operands if isinstance(t, DTensor)}
            moved |= {id(operands[i]): self._sharded(operands[i], island.operands[i]) for i in island.operands}
            args, kwargs = _torch.tree_map(lambda leaf: moved.get(id(leaf), leaf), (args, kwargs))
            operands = [moved.get(id(tensor), tensor) for tensor in operands]
        described = [_describe(tensor, self.mesh) for tensor in operands]
        operator = RecordedOperator(func, described, draws=False, over_rows=self._over_rows)
        copies: dict[int, Tensor] = {}  # of operands that an island writes, as on local tensors
        if island is not None:
            operator.is_island, operator.constants, operator.part = True, island.constants, island.part
            _watch_operands(operands, operator, self.edges, written=island.written)
            copies = {id(operands[i]): operands[i].clone() for i in island.written}
            args, kwargs = _torch.tree_map(lambda leaf: copies.get(id(leaf), _pinned(leaf)), (args, kwargs))
        before, versions = extension.random_position(self.mesh.device_type), [_version(t) for t in operands]
        self._communicates, self._drawn_on, num_collectives = False, [], len(self.log)
        result = initialized(func, func(*args, **kwargs))
        if self._over_rows and any(isinstance(t, DTensor) and t.device_mesh.ndim == self.mesh.ndim for t in operands):
            result = settled(result, operands)
        if self._of_rows:
            result = whole_extremes(result)
        if copies:
            result = _written_back(result, [(operands[i], copies[id(operands[i])]) for i in island.written])
        self._communicates |= len(self.log) > num_collectives
        operator.draws = extension.random_position(self.mesh.device_type) != before
        # what communicates draws by the values of all ranks
        operator.drawn_on = ((),) * len(self._drawn_on) if self._communicates else tuple(self._drawn_on)
        operator.written = tuple(i for i, t in enumerate(operands) if _version(t) != versions[i])
        if place is not None:
            self._calls.setdefault(self._names.path[-1], []).append(operator)
            if self._keeps and not self._names.path[-1].is_repeat:
                self.kept[place] = self._kept(operator, leaves, operands, result)
        self.takes_gradients |= func is torch.autograd.grad
        if operator.draws or isinstance(kwargs.get("generator"), torch.Generator):
            self.drawn.setdefault(self._names.running, []).append(operator)
        if self._nudges and place is not None and not any(result is tensor for tensor in operands):
            result = nudged(result) if isinstance(result, Tensor) else result
        if not (operator.draws or operator.is_island):
            return result
        written = [operands[i] for i in operator.written]
        results = [leaf for leaf in _torch.tree_leaves(result) if not any(leaf is tensor for tensor in written)]
        for leaf in (*results, *(copies.get(id(leaf), leaf) for leaf in written)):
            if isinstance(leaf, DTensor):
                _watch(leaf, operator, self.mesh)
                self.edges.add(leaf.grad_fn)
        return result

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note calls while the context is open, and implicit redistributions if values are kept."""
        with contextlib.ExitStack() as stack:
            if self._keeps:
                stack.enter_context(extension.on_implicit_redistribution(self._note_communication))
            stack.enter_context(self)
            yield

    def note_draw(self, operands: Sequence[DTensor]) -> None:
        """Note for which tensors a random operator draws, see ``extension.on_draw``."""
        for operand in operands:
            # a shard with one row does not show where dim 0 is in the memory order of the whole
            is_known = operand.is_contiguous() or _torch.local_of(operand).shape[:1] != (1,)
            self._drawn_on.append(tuple(operand.placements) if is_known else ())

    def fact(self) -> extension.Fact:
        """Return what must be equal on all ranks: which functions were called, in which order."""
        names = [f"{call.name}: {' '.join(map(_name, found))}" for call, found in self._calls.items()]
        text = "; ".join(names)
        number = zlib.crc32(text.encode())
        return extension.Fact(
            "the sequence of torch functions in a call",
            f"{sum(map(len, self._calls.values()))} calls with checksum {number:08x}",
            "let all ranks run the same code, whatever their rows are",
        )

    def _place(self) -> Place | None:
        """Return the place of the next call; in a recomputation that of the call which it repeats."""
        if not self._names.path:
            return None
        call = self._names.path[-1]
        first = self._first.setdefault(call.name, call.number)  # all calls of a recomputed module agree
        place = first if call.is_repeat else call.number, self._position_in(call)
        if self._keeps:
            self._begun[0].append(extension.sequence_number())
            self._begun[1].append(place)
        return place

    def _position_in(self, call: ModuleCall) -> int:
        return call.begin + len(self._calls.get(call, ()))

    def _kept(
        self, operator: RecordedOperator, leaves: Sequence[object], operands: Sequence[Tensor], result: object
    ) -> KeptCall:
        places = {id(operands[i]): i for i in operator.written}
        return KeptCall(
            operator=operator,
            constants=[leaf for leaf in leaves if not isinstance(leaf, Tensor)],
            result=_torch.tree_map(lambda leaf: _value(leaf) if isinstance(leaf, Tensor) else leaf, result),
            operands={i: _value(operands[i]) for i in operator.written},
            returned=[places.get(id(leaf)) for leaf in _torch.tree_leaves(result) if isinstance(leaf, Tensor)],
            communicates=self._communicates,
            averages=any(map(self._is_mean, (*operands, *_torch.tree_leaves(result)))),
            whole=() if places else self._whole(result),
            shape=tuple(result.shape) if isinstance(result, Tensor) else (),
            trained=[t for t in operands if isinstance(t, nn.Parameter) and isinstance(t, DTensor) and t.requires_grad],
            cuts=_cut_axes((*operands, *_torch.tree_leaves(result))),
            is_inner=self.is_inner(),
        )

    def _is_mean(self, leaf: object) -> bool:
        """Return whether a value is a mean over ranks; this rank's mean over its rows is what local code has."""
        if not isinstance(leaf, DTensor):
            return False
        is_ahead = self._over_rows and leaf.device_mesh.ndim == self.mesh.ndim
        return any(p.is_partial("avg") for p in leaf.placements[is_ahead:])

    def apart(self) -> set[Place]:
        """Return the calls that use a parameter as a whole on all ranks, where others use it for parts: a tied weight.

        Its gradient is a sum of whole and of partial ones, which local code cannot add.
        """
        uses: dict[int, dict[Place, KeptCall]] = {}
        for place, call in self.kept.items():
            for tensor in call.trained:
                uses.setdefault(id(tensor), {})[place] = call
        found: set[Place] = set()
        for calls in uses.values():
            for axis in range(self.mesh.ndim):
                whole = {place for place, call in calls.items() if axis not in call.cuts}
                if len(whole) < len(calls):
                    found |= whole
        return found

    def _sharded(self, tensor: Tensor, placements: tuple[Placement, ...]) -> DTensor:
        tensor = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, self.mesh)
        return self._lifted(tensor).redistribute(placements=placements)

    def _lifted(self, tensor: DTensor) -> DTensor:
        return lift(tensor, self.mesh) if tensor.device_mesh.ndim < self.mesh.ndim else tensor

    def _whole(self, result: object) -> tuple[int, ...]:
        if not isinstance(result, Tensor) or (result.requires_grad and not self._of_rows):
            return ()
        placements = _describe(result, self.mesh).placements
        return tuple(axis for axis, placement in enumerate(placements) if placement.is_replicate())

    def _note_communication(self, sequence_number: int | None) -> None:
        """Note an implicit redistribution, see ``extension.on_implicit_redistribution``."""
        if sequence_number is None:
            self._communicates = True
        elif sequence_number >= 0 and self._begun[0]:
            numbers, places = self._begun
            self.communicating.add(places[max(0, bisect.bisect_right(numbers, sequence_number) - 1)])

    @property
    def has_quiet_islands(self) -> bool:
        """Whether operators that draw nothing must run on DTensors."""
        drawn = {id(operator) for found in self.drawn.values() for operator in found}
        each = (operator for found in self._calls.values() for operator in found)
        return any(operator.is_island and id(operator) not in drawn for operator in each)

    def of_local_parts(self, parts: Parts, *, all_draws: bool = False) -> dict[str, ModuleOperators]:
        """Return the operators of the local modules with calls that need DTensors, and of their parts.

        Args:
            parts: of the program.
            all_draws: whether to return those of all modules with random operators, too.

        Raises:
            NotLocalFriendlyError: a recomputed module has calls with different operators.
        """
        each = [(call.name, operator) for call, found in self._calls.items() for operator in found]
        functions = {operator.function for _, operator in each if operator.draws or operator.is_island}
        owners = {name for name, op in each if op.needs_dtensors or (all_draws and op.draws)}
        owners = set(filter(parts.is_watched, owners))
        calls: dict[str, tuple[list[list[RecordedOperator]], list[Repeat]]] = {}
        for call in self._names.calls:
            if any(is_inside(call.name, owner) for owner in owners) and parts.is_watched(call.name):
                all_calls = self._calls.get(call, ())
                noted = [operator for operator in all_calls if operator.function in functions]
                firsts, repeats = calls.setdefault(call.name, ([], []))
                if call.is_repeat:
                    before = self._first_calls(call.name)[: call.begin]
                    repeats.append((sum(operator.function in functions for operator in before), noted))
                else:
                    firsts.append(noted)
        return {n: _joined(n, *both) for n, both in calls.items() if any(both[0]) or any(found for _, found in both[1])}

    def _first_calls(self, name: str) -> Sequence[RecordedOperator]:
        """Return the calls of functions in the first call of a module."""
        call = next(call for call in self._names.calls if call.name == name)
        return self._calls.get(call, ())


def _name(operator: RecordedOperator) -> str:
    return getattr(operator.function, "__name__", "")


def is_metadata(function: Callable) -> bool:
    """Return whether a torch function reads metadata. Such calls have no place: hooks read metadata, too."""
    if function in METADATA:
        return True
    getter = getattr(function, "__self__", None)
    return getattr(function, "__name__", "") == "__get__" and getattr(getter, "__name__", "") not in TENSORS


def _joined(name: str, calls: list[list[RecordedOperator]], repeats: list[Repeat]) -> ModuleOperators:
    try:
        return ModuleOperators(calls, repeats)
    except ValueError as error:
        raise NotLocalFriendlyError(
            f"{describe(name)}: expected the same random operators in all of its {len(calls)} calls, because "
            f"activation checkpointing recomputes it, got different ones; {ways_out(name, is_random=True)}"
        ) from error


def _describe(tensor: Tensor, mesh: DeviceMesh) -> Operand:
    if isinstance(tensor, DTensor):
        ahead = replicated(mesh)[tensor.device_mesh.ndim :]  # on the mesh of a plan: equal on the axis of rows
        return Operand(_torch.local_of(tensor).shape, tensor.shape, (*ahead, *tensor.placements))
    return Operand(tensor.shape, tensor.shape, replicated(mesh))


def _cut_axes(leaves: Iterable[object]) -> set[int]:
    return {
        a for leaf in leaves if isinstance(leaf, DTensor) for a, p in enumerate(leaf.placements) if not p.is_replicate()
    }


def _value(tensor: Tensor) -> Tensor:
    return (_torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach().clone()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _written_back(result: object, pairs: Sequence[tuple[Tensor, Tensor]]) -> object:
    """Copy what an operator wrote into its operands, and return its result with these.

    The gradient of a copy has a layout that hooks see. That of an operand may not: autograd leaves out a view whose
    base is used later.
    """
    for operand, copy in pairs:
        operand.copy_(copy)
    originals = {id(copy): operand for operand, copy in pairs}
    return _torch.tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def _pinned(leaf: object) -> object:
    """Return a DTensor operand so that its gradient has its layout, whatever the operator makes of it."""
    if not isinstance(leaf, DTensor) or leaf.is_leaf or not leaf.requires_grad:
        return leaf
    return bring(leaf, tuple(leaf.placements), leaf.device_mesh)


def _watch_operands(
    operands: Sequence[Tensor], operator: RecordedOperator, edges: Container[object], *, written: Sequence[int]
) -> None:
    """Note along which axes the gradients of operands, of which the island gives one summand each, are sums over ranks.

    Others may join it on the way to the boundary or island that gave the operand, as where a tensor was split.
    """
    for place, operand in enumerate(operands):
        if isinstance(operand, DTensor) and operand.requires_grad and place not in written:
            note = functools.partial(_note_sums, operator, place)
            _torch.hook_first(operand, note)
            for node in _torch.nodes_before(operand, edges):
                node.register_hook(lambda inputs, outputs, note=note: note(*inputs, *outputs))


def _note_sums(operator: RecordedOperator, place: int, *grads: object) -> None:
    own = without_partials(operator.operands[place].placements)
    for grad in grads:
        if isinstance(grad, DTensor):
            ahead = own[: len(own) - grad.device_mesh.ndim]
            pairs = zip(operator.totals.get(place, own), (*ahead, *grad.placements), strict=True)
            operator.totals[place] = tuple(new if new.is_partial() else old for old, new in pairs)


def _watch(result: DTensor, operator: RecordedOperator, mesh: DeviceMesh) -> None:
    """Note the layout of the gradient of a result, or of an operand that the operator wrote.

    On local tensors the gradient of a shard is the shard of the gradient, also where DTensor makes a full one, and that
    of a whole value is whole, also where DTensor makes a shard. On the axis of rows the placement of the result decides
    it.
    """
    position = len(operator.gradients)
    operator.gradients.append(None)
    placements = tuple(result.placements)
    if not result.requires_grad:
        return
    ahead: tuple[Placement, ...] = ()
    if operator.over_rows:
        own = _describe(result, mesh).placements[0]
        ahead = (
            own if own.is_partial("avg") else gradient_over_rows(own),
        )  # `unwrapped` counts that of a mean N times

    def note(grad: Tensor) -> None:
        if isinstance(grad, DTensor):
            pairs = zip(placements, grad.placements, strict=True)
            layout = tuple(own if own.is_shard() else Replicate() if here.is_shard() else here for own, here in pairs)
            operator.gradients[position] = (*ahead, *layout[len(ahead) - mesh.ndim :])

    result.register_hook(note)
