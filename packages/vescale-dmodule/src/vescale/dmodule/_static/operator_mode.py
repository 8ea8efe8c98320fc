"""Operators that run on DTensors at their place, while everything around them runs on local tensors.

They are random operators, which advance the random stream, and islands, which give another result on local tensors (see
``recording.search``). The recording notes them, with the layouts of all operands. On local tensors the same call, by
its position in the call of its module (see ``operators``), gets its operands as DTensors in these layouts. The rules of
``vescale.dtensor`` then draw this rank's part, or communicate, and the result is converted to a local tensor::

    recording        dropout(DTensor)                       CallRecorder notes function, shapes, layouts
    local tensors    dropout(local) -> as DTensor -> local  OperatorMode, only in modules with such operators

Modules without them have no overhead. A random operator on tensors that are equal on all ranks runs unchanged, because
all ranks draw the same numbers. The gradient of an operand of an island is brought to the layout of the operand, in the
recording too; it is partial where other operators give partial gradients of the same tensor, as of a tied weight. An
operator that writes an operand writes a copy, which is then copied into the local tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import debug, extension, random

from .. import _torch
from .._boundary.edges import unwrapped, wrapped
from .._boundary.rows_axis import settled
from .._execution.module_hooks import OwnHook
from ..errors import NotLocalFriendlyError
from .operators import ModuleOperators, RecordedOperator
from .parts import describe, ways_out

__all__ = ["OperatorHooks", "OperatorMode", "ProgramCall", "QuietCall", "active_mode", "inactive"]


class ProgramCall(Protocol):
    """The attributes of a call of a program that recorded operators use.

    Attributes:
        mesh: of the layouts.
        number: counts the calls of the program.
        silent: parameters that are shown as negative zeros, by the identity of the local tensor.
        checks: whether the call checks a recording.
    """

    mesh: DeviceMesh
    number: int
    silent: Mapping[int, DTensor]

    @property
    def checks(self) -> bool: ...

    def operators_of(self, name: str) -> ModuleOperators | None:
        """Return the recorded operators of a module; None if it runs unchanged now, or has none."""

    def note_cost(self, name: str, operator: RecordedOperator, log: debug.CommLog) -> None:
        """Note what an island in a module communicates, in a call that checks a recording."""


def log_text(log: debug.CommLog) -> str:
    """Return the number of collectives in a log, and their size."""
    return f"{len(log)} collectives, {extension.bytes_text(sum(record.num_bytes for record in log))}"


class QuietCall:
    """Run a call that drew no random numbers when it was recorded.

    The call runs without the modes that watch for random operators. An error is raised if it advances the random
    stream.

    Args:
        device_type: of the random stream.
    """

    def __init__(self, device_type: str):
        self._device_type = device_type
        self._before: extension.Position | None = None
        self._unwatched: AbstractContextManager | None = None

    def begin(self) -> None:
        """Begin the call."""
        self._before = extension.random_position(self._device_type)
        if _torch.has_dispatch_mode():
            self._unwatched = extension.unwatched()
            self._unwatched.__enter__()

    def end(self, name: str, *, well: bool) -> None:
        """End the call of a module; do nothing if no call was begun.

        Args:
            name: of the module.
            well: whether the call returned; False if it raised.

        Raises:
            NotLocalFriendlyError: the call drew random numbers.
        """
        if self._unwatched is not None:
            unwatched, self._unwatched = self._unwatched, None
            unwatched.__exit__(None, None, None)
        before, self._before = self._before, None
        if before is not None and well and extension.random_position(self._device_type) != before:
            raise NotLocalFriendlyError(
                f"{describe(name)} drew random numbers, but the recorded call did not (a dropout rate that was 0?), so "
                'their global positions are unknown; call set_mode(model, "static") after such a change, or run the '
                'model on DTensors (mode="eager")'
            )


# ------------------------------------------------------------------------------------------------- on local tensors


class Turn:
    """The time in which one mode, or none, sees the functions that are called, from its making until its end.

    The mode whose turn it was rests, and is not on torch's stack: every function would go through all modes there.

    Args:
        mode: the mode; None for none.
    """

    def __init__(self, mode: OperatorMode | None):
        before = active_mode()
        self._resting = before if before is not None and _torch.function_mode_on_top() is before else None
        if self._resting is not None:
            self._resting.__exit__(None, None, None)
        self.mode = mode
        if mode is not None:
            mode.__enter__()
        _here.turns.append(self)

    def end(self) -> None:
        """End it, and all that began in it; where an error has left some, they may be ended in any order."""
        if self not in _here.turns:
            return
        while _here.turns[-1] is not self:
            _here.turns[-1].end()
        _here.turns.pop()
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
        if self._resting is not None:
            self._resting.__enter__()


class _Thread(threading.local):
    """What runs in this thread: one turn per running module, innermost last."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []


_here = _Thread()


def active_mode() -> OperatorMode | None:
    """Return the mode that sees the functions which are called now."""
    return _here.turns[-1].mode if _here.turns else None


@contextlib.contextmanager
def inactive() -> Iterator[None]:
    """Disable every `OperatorMode`, for a compiled block, which runs its random operators itself."""
    turn = Turn(None)
    try:
        yield
    finally:
        turn.end()


class OperatorMode(TorchFunctionMode):
    """Run the random operators of one call of a module on local tensors as they were recorded.

    Args:
        name: of the module.
        operators: recorded in it.
        number: of the call among the calls of the module in a call of the program.
        call: of the program.
    """

    def __init__(self, name: str, operators: ModuleOperators, number: int, call: ProgramCall):
        super().__init__()
        self.name, self.operators, self.number = name, operators, number
        self.call, self.mesh, self.silent = call, call.mesh, call.silent
        self.position = 0
        self.uses_order = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self.sees(func):
            return func(*args, **kwargs)
        leaves = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes = tuple(leaf.shape for leaf in leaves)
        at = self.number, self.position, func
        operator = self.operators.by_shape(func, shapes)
        if operator is None or self.operators.has_other_shapes(*at, shapes):
            self.uses_order = True
            operator = self.operators.by_order(*at, shapes, self.mesh, checks=self.call.checks)
        if operator is None and self.operators.is_island_at(*at):
            raise NotLocalFriendlyError(
                f"in {describe(self.name)}: {resolve_name(func)} on local shapes {[tuple(shape) for shape in shapes]} "
                f"communicates, and was not recorded on such shapes, so their layouts are unknown; {self._ways_out()}"
            )
        self.position += 1
        if operator is None or not (operator.draws or operator.is_island):
            return self._run_quietly(func, args, kwargs, shapes)
        if not operator.needs_dtensors:
            return func(*args, **kwargs)  # equal on all ranks
        if operator.draws_rows:
            with random.local_batch(self.mesh):
                return func(*args, **kwargs)
        if operator.constants:
            args, kwargs = self._recorded_constants(operator, args, kwargs)
        dtensors = {id(leaf): self._wrapped(leaf, i, operator) for i, leaf in enumerate(leaves)}
        args, kwargs = _torch.tree_map(lambda leaf: dtensors.get(id(leaf), leaf), (args, kwargs))
        result = self._run(operator, args, kwargs)
        return self._local(result, leaves, dtensors, operator)

    def sees(self, function: Callable) -> bool:
        """Return whether some calls of a function are recorded in the module that is running."""
        return function in self.operators.functions and self is _here.turns[-1].mode

    def _run(self, operator: RecordedOperator, args: tuple, kwargs: dict) -> object:
        if self.call.checks and operator.is_island:
            with debug.comm_log(mesh=self.mesh) as log:
                result = self._run_on_dtensors(operator, args, kwargs)
            self.call.note_cost(self.name, operator, log)
            return result
        return self._run_on_dtensors(operator, args, kwargs)

    def _run_on_dtensors(self, operator: RecordedOperator, args: tuple, kwargs: dict) -> object:
        with _torch.plain_operands_replicated():  # composite operators create plain tensors
            result = operator.function(*args, **kwargs)
        return settled(result, _torch.tree_leaves((args, kwargs))) if operator.over_rows else result

    def _ways_out(self, *, is_random: bool = False) -> str:
        """Return the fixes, for error messages."""
        return ways_out(self.name, is_random=is_random)

    def _wrapped(self, leaf: Tensor, place: int, operator: RecordedOperator) -> DTensor:
        """Return an operand as a DTensor; a copy of one that the operator writes, see `_local`."""
        operand = operator.operands[place]
        reads = operator.is_island and leaf.requires_grad and place not in operator.written
        value = leaf.clone() if place in operator.written else leaf
        if operator.is_island and id(leaf) in self.silent:
            value = leaf + _torch.local_of(self.silent[id(leaf)]).detach()  # x + -0.0 is x
        gradient = operator.gradient_of(place) if reads else None
        return wrapped(value, self.mesh, operand.placements, shape=operand.shape, gradient=gradient)

    def _unwrapped(self, leaf: DTensor, gradient: tuple[Placement, ...] | None) -> Tensor:
        """Return a result as a local tensor; local code gives its gradient in a layout."""
        return unwrapped(leaf, gradient)

    def _recorded_constants(self, operator: RecordedOperator, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of an island with the global sizes of the recorded call in place of local ones.

        Raises:
            NotLocalFriendlyError: local code passes another value than when the call was recorded.
        """
        number = itertools.count()

        def convert(leaf: object) -> object:
            place = None if isinstance(leaf, Tensor) else next(number)
            if place not in operator.constants:
                return leaf
            mine, recorded = operator.constants[place]
            if type(leaf) is not type(mine) or leaf != mine:
                raise NotLocalFriendlyError(
                    f"in {describe(self.name)}: {resolve_name(operator.function)} expected {mine!r}, which stands for "
                    f"{recorded!r} of the full tensor, as when this call was recorded, got {leaf!r}; an "
                    f"argument that depends on a local size must not change between calls, so {self._ways_out()}"
                )
            return recorded

        return _torch.tree_map(convert, (args, kwargs))

    @contextlib.contextmanager
    def repeated(self, position: int) -> Iterator[None]:
        """Run the operators from a position on once more, in a function that activation checkpointing repeats."""
        again = type(self)(self.name, self.operators, self.number, self.call)
        again.position = position
        turn = Turn(again)
        try:
            yield
        finally:
            turn.end()

    def check_order(self) -> None:
        """Check that the module made as many calls as recorded, if their order was used.

        Raises:
            NotLocalFriendlyError: it made fewer or more.
        """
        expected = len(self.operators.sequence(self.number))
        if self.uses_order and self.position != expected:
            names = ", ".join(sorted(resolve_name(function) or str(function) for function in self.operators.functions))
            raise NotLocalFriendlyError(
                f"in {describe(self.name)}: expected {expected} calls of {names}, as when this call was recorded, got "
                f"{self.position}; only their order tells apart operators of equal local shapes, so "
                f"{self._ways_out(is_random=True)}"
            )

    def _run_quietly(self, func: Callable, args: tuple, kwargs: dict, shapes: tuple[torch.Size, ...]) -> object:
        """Run a call that must draw nothing.

        Raises:
            NotLocalFriendlyError: it drew; names module, function and shapes.
        """
        before = extension.random_position(self.mesh.device_type)
        result = func(*args, **kwargs)
        if extension.random_position(self.mesh.device_type) != before:
            raise NotLocalFriendlyError(
                f"in {describe(self.name)}: {resolve_name(func)} on local shapes {[tuple(shape) for shape in shapes]} "
                "draws random numbers, but the recorded call did not, so their global positions are unknown; "
                f"{self._ways_out(is_random=True)}"
            )
        return result

    def _local(
        self, result: object, leaves: list[Tensor], dtensors: dict[int, DTensor], operator: RecordedOperator
    ) -> object:
        written = {id(dtensors[id(leaves[i])]): leaves[i] for i in operator.written}
        gradients = iter(operator.gradients)

        def local(leaf: DTensor) -> Tensor:
            gradient = next(gradients, None)
            return self._unwrapped(leaf, gradient) if leaf.requires_grad else _torch.local_of(leaf)

        def convert(leaf: object) -> object:
            if id(leaf) in written:
                return written[id(leaf)]
            return local(leaf) if isinstance(leaf, DTensor) else leaf

        result = _torch.tree_map(convert, result)
        for leaf in written.values():
            leaf.copy_(local(dtensors[id(leaf)]))
        return result if operator.part is None else result.narrow(*operator.part)


class OperatorHooks:
    """Hooks that run the random operators of a module as recorded, while it runs on local tensors.

    Args:
        call: of the program.
        name: of the module.

    Attributes:
        mode: the class of the modes that run the operators.
    """

    mode = OperatorMode

    def __init__(self, call: ProgramCall, name: str):
        self.call, self.name = call, name
        self.entered: list[tuple[OperatorMode, Turn] | None] = []
        self._number, self._of = 0, -1  # calls of the module, in which call of the program

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Register hooks inside all other hooks, because some of those open and close the program."""
        return [
            module.register_forward_pre_hook(OwnHook(self.enter)),
            module.register_forward_hook(OwnHook(self.leave), prepend=True, always_call=True),
        ]

    def enter(self, _module: nn.Module, _args: tuple) -> None:
        """Enter an `OperatorMode` if the module runs on local tensors."""
        call = self.call
        operators = call.operators_of(self.name)
        if operators is None:
            self.entered.append(None)
            return
        self._number, self._of = 0 if self._of != call.number else self._number + 1, call.number
        mode = self.mode(self.name, operators, self._number, call)
        self.entered.append((mode, Turn(mode)))

    def leave(self, _module: nn.Module, _args: tuple, output: object) -> None:
        """Exit the mode."""
        entered = self.entered.pop() if self.entered else None
        if entered is not None:
            mode, turn = entered
            turn.end()
            if output is not None:
                mode.check_order()
