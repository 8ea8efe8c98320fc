"""Random operators on local tensors draw the numbers that one device draws.

A random operator is a call of a torch function that advances the random stream. The recording notes every random
operator with a DTensor operand, with the layouts of all operands. On local tensors the same call gets its operands as
DTensors in these layouts. The rules of ``vescale.dtensor`` then draw this rank's part, and the result is converted to a
local tensor::

    recording        dropout(DTensor)                       OperatorRecorder notes function, shapes, layouts
    local tensors    dropout(local) -> as DTensor -> local  OperatorMode, only in modules with random operators

Modules without random operators have no overhead. A random operator on tensors that are equal on all ranks runs
unchanged, because all ranks draw the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import extension, random

from .. import _torch
from .._boundary.edges import unwrapped, wrapped
from .._execution.module_hooks import OwnHook
from ..errors import NotLocalFriendlyError
from .parts import describe, ways_out
from .recording.observe import replicated

__all__ = ["OperatorHooks", "OperatorRecorder", "QuietCall", "RandomOperator", "inactive"]

Placements = tuple[Placement, ...]


class Operand(NamedTuple):
    """A tensor operand of a random operator."""

    local_shape: torch.Size
    shape: torch.Size
    placements: Placements


@dataclass
class RandomOperator:
    """One recorded call of a random operator.

    Attributes:
        function: the torch function.
        operands: its tensor operands, in order.
        gradients: layouts of the gradients of its results, in order.
    """

    function: Callable
    operands: list[Operand]
    gradients: list[Placements | None] = field(default_factory=list)

    @property
    def key(self) -> tuple:
        """The identity of the operator on local tensors."""
        return self.function, tuple(operand.local_shape for operand in self.operands)

    def agrees(self, other: RandomOperator) -> bool:
        """Return whether no ambiguity exists: the two operators have different keys or equal operands."""
        return self.key != other.key or self.operands == other.operands

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks draw different parts of the global values."""
        return not all(p.is_replicate() for operand in self.operands for p in operand.placements)

    def __str__(self) -> str:
        operands = ", ".join(f"{tuple(o.shape)} {o.placements}" for o in self.operands)
        return f"{resolve_name(self.function) or self.function}{' on ' * bool(operands)}{operands}"


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


def _random_state() -> list[object]:
    return [v.clone() if isinstance(v, Tensor) else v for v in random.get_state().values()]


def _same_state(one: list[object], other: list[object]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------- recording


class OperatorRecorder(TorchFunctionMode):
    """Record random operators while a module runs in eager mode.

    Args:
        running: returns the name of the running module.
        mesh: of the module.

    Attributes:
        operators: random operators with a DTensor operand, by module.
        plain: random operators on plain tensors only, by module, and all calls with a generator argument.
    """

    def __init__(self, running: Callable[[], str], mesh: DeviceMesh):
        super().__init__()
        self.running, self.mesh = running, mesh
        self.operators: dict[str, list[RandomOperator]] = {}
        self.plain: dict[str, list[RandomOperator]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(leaf, DTensor) for leaf in operands):
            return self._on_plain_tensors(func, args, kwargs, operands)
        before = _random_state()
        described = [_describe(t, self.mesh) for t in operands]
        result = func(*args, **kwargs)
        if _same_state(before, _random_state()):
            return result
        operator = RandomOperator(func, described)
        self.operators.setdefault(self.running(), []).append(operator)
        return _torch.tree_map(lambda leaf: _watched(leaf, operator) if isinstance(leaf, DTensor) else leaf, result)

    def _on_plain_tensors(self, func: Callable, args: tuple, kwargs: dict, operands: list[Tensor]) -> object:
        described = [_describe(t, self.mesh) for t in operands]
        before = extension.random_position(self.mesh.device_type)
        result = func(*args, **kwargs)
        has_generator = isinstance(kwargs.get("generator"), torch.Generator)
        if has_generator or extension.random_position(self.mesh.device_type) != before:
            self.plain.setdefault(self.running(), []).append(RandomOperator(func, described))
        return result

    def all(self) -> dict[str, list[RandomOperator]]:
        """Return the operators on DTensors and on plain tensors, by module."""
        names = [*self.operators, *(name for name in self.plain if name not in self.operators)]
        return {name: [*self.operators.get(name, ()), *self.plain.get(name, ())] for name in names}


def _describe(tensor: Tensor, mesh: DeviceMesh) -> Operand:
    if isinstance(tensor, DTensor):
        return Operand(_torch.local_of(tensor).shape, tensor.shape, tuple(tensor.placements))
    return Operand(tensor.shape, tensor.shape, replicated(mesh))


def _watched(result: DTensor, operator: RandomOperator) -> DTensor:
    position = len(operator.gradients)
    operator.gradients.append(None)
    if not result.requires_grad:
        return result

    def note(grad: Tensor) -> None:
        operator.gradients[position] = tuple(grad.placements) if isinstance(grad, DTensor) else None

    result.register_hook(note)
    return result


# ------------------------------------------------------------------------------------------------- on local tensors


_running: list[OperatorMode | None] = []  # one per running module, innermost last; only the last one is active


@contextlib.contextmanager
def inactive() -> Iterator[None]:
    """Disable every `OperatorMode`, for a compiled block, which runs its random operators itself."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()


class OperatorMode(TorchFunctionMode):
    """Run the random operators of one module on local tensors as they were recorded.

    Args:
        name: of the module.
        operators: recorded in it.
        mesh: of their layouts.
    """

    def __init__(self, name: str, operators: list[RandomOperator], mesh: DeviceMesh):
        super().__init__()
        self.name, self.mesh = name, mesh
        self.functions = {operator.function for operator in operators}
        self.operators = {operator.key: operator for operator in operators}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or func not in self.functions or self is not _running[-1]:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return func(*args, **kwargs)  # a part in eager mode
        operator = self.operators.get((func, tuple(leaf.shape for leaf in leaves)))
        if operator is None:
            self._check_draws_nothing(func, args, kwargs, leaves)
            return func(*args, **kwargs)
        if not operator.is_sharded:
            return func(*args, **kwargs)  # equal on all ranks
        dtensors = {
            id(leaf): wrapped(leaf, self.mesh, operand.placements, shape=operand.shape)
            for leaf, operand in zip(leaves, operator.operands, strict=True)
        }
        args, kwargs = _torch.tree_map(lambda leaf: dtensors.get(id(leaf), leaf), (args, kwargs))
        with _torch.plain_operands_replicated():  # composite operators create plain tensors
            result = func(*args, **kwargs)
        return self._local(result, leaves, dtensors, operator)

    def _check_draws_nothing(self, func: Callable, args: tuple, kwargs: dict, leaves: list[Tensor]) -> None:
        """Refuse random operators that are not recorded.

        Raises:
            NotLocalFriendlyError: naming module, function and shapes.
        """
        before = random.get_state()
        func(*_torch.tree_map(_copied, args), **_torch.tree_map(_copied, kwargs))
        drew = not _same_state(list(before.values()), _random_state())
        random.set_state(before)
        if drew:
            raise NotLocalFriendlyError(
                f"in {describe(self.name)}: {resolve_name(func)} on local shapes {[tuple(t.shape) for t in leaves]} "
                "draws random numbers, but the recorded call did not, so their global positions are unknown; "
                f"{ways_out(self.name, is_random=True)}"
            )

    def _local(
        self, result: object, leaves: list[Tensor], dtensors: dict[int, DTensor], operator: RandomOperator
    ) -> object:
        written = {id(dtensors[id(leaf)]): leaf for leaf in leaves}  # an in-place operator returns its operand
        gradients = iter(operator.gradients)

        def convert(leaf: object) -> object:
            if not isinstance(leaf, DTensor):
                return leaf
            gradient = next(gradients, None)
            if id(leaf) in written and not leaf.requires_grad:
                return written[id(leaf)]
            return unwrapped(leaf, gradient) if leaf.requires_grad else _torch.local_of(leaf)

        return _torch.tree_map(convert, result)


def _copied(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class OperatorHooks:
    """Hooks that run the random operators of a module as recorded, while it runs on local tensors.

    Args:
        name: of the module.
        operators: returns the random operators of the current call; empty if the module runs on DTensors.
        mesh: of the layouts.
    """

    def __init__(self, name: str, operators: Callable[[], list[RandomOperator]], mesh: DeviceMesh):
        self.name, self.operators, self.mesh = name, operators, mesh
        self.entered: list[OperatorMode | None] = []

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Register hooks inside all other hooks, because some of those open and close the program."""
        return [
            module.register_forward_pre_hook(OwnHook(self.enter)),
            module.register_forward_hook(OwnHook(self.leave), prepend=True, always_call=True),
        ]

    def enter(self, _module: nn.Module, _args: tuple) -> None:
        """Enter an `OperatorMode` if the module runs on local tensors."""
        operators = self.operators()
        mode = OperatorMode(self.name, operators, self.mesh) if operators else None
        if mode is not None:
            mode.__enter__()
            _running.append(mode)
        self.entered.append(mode)

    def leave(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        """Exit the mode."""
        mode = self.entered.pop() if self.entered else None
        if mode is not None:
            _running.pop()
            mode.__exit__(None, None, None)
