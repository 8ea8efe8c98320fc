"""Random operators on local tensors draw the numbers that one device draws.

A random operator is a call of a torch function that advances the random stream. The recording notes every random
operator, with the layouts of all operands. On local tensors the same call, by its position in the call of its module
(see ``operators``), gets its operands as DTensors in these layouts. The rules of ``vescale.dtensor`` then draw this
rank's part, and the result is converted to a local tensor::

    recording        dropout(DTensor)                       DrawRecorder notes function, shapes, layouts
    local tensors    dropout(local) -> as DTensor -> local  OperatorMode, only in modules with random operators

Modules without random operators have no overhead. A random operator on tensors that are equal on all ranks runs
unchanged, because all ranks draw the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import extension

from .. import _torch
from .._boundary.edges import unwrapped, wrapped
from .._execution.module_hooks import OwnHook
from ..errors import NotLocalFriendlyError
from .call import Call
from .operators import ModuleOperators, RandomOperator
from .parts import describe, ways_out

__all__ = ["OperatorHooks", "QuietCall", "inactive"]


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
    """Run the random operators of one call of a module on local tensors as they were recorded.

    Args:
        name: of the module.
        operators: recorded in it.
        number: of the call among the calls of the module in a call of the program.
        mesh: of the layouts.
    """

    def __init__(self, name: str, operators: ModuleOperators, number: int, mesh: DeviceMesh):
        super().__init__()
        self.name, self.operators, self.number, self.mesh = name, operators, number, mesh
        self.position = 0
        self.uses_order = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or func not in self.operators.functions or self is not _running[-1]:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shapes = tuple(leaf.shape for leaf in leaves)
        operator = self.operators.by_shape(func, shapes)
        if operator is None:
            self.uses_order = True
            operator = self.operators.by_order(self.number, self.position, func, shapes, self.mesh)
        self.position += 1
        if operator is None or not operator.draws:
            return self._run_quietly(func, args, kwargs, shapes)
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

    def check_order(self) -> None:
        """Check that the module made as many calls as recorded, if their order was used.

        Raises:
            NotLocalFriendlyError: it made fewer or more.
        """
        expected = len(self.operators.sequence(self.number))
        if self.uses_order and self.position != expected:
            names = ", ".join(sorted(resolve_name(function) or str(function) for function in self.operators.functions))
            raise NotLocalFriendlyError(
                f"in {describe(self.name)}: expected {expected} calls of {names}, as when static mode recorded this "
                f"call, got {self.position}; only their order tells apart random operators of equal local shapes, so "
                f"{ways_out(self.name, is_random=True)}"
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
                f"{ways_out(self.name, is_random=True)}"
            )
        return result

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


class OperatorHooks:
    """Hooks that run the random operators of a module as recorded, while it runs on local tensors.

    Args:
        call: of the program.
        name: of the module.
    """

    def __init__(self, call: Call, name: str):
        self.call, self.name = call, name
        self.entered: list[OperatorMode | None] = []
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
        operators = call.layouts.operators.get(self.name) if call.is_open else None
        if operators is None:
            self.entered.append(None)
            return
        self._number, self._of = 0 if self._of != call.number else self._number + 1, call.number
        mode = OperatorMode(self.name, operators, self._number, call.mesh)
        mode.__enter__()
        _running.append(mode)
        self.entered.append(mode)

    def leave(self, _module: nn.Module, _args: tuple, output: object) -> None:
        """Exit the mode."""
        mode = self.entered.pop() if self.entered else None
        if mode is not None:
            _running.pop()
            mode.__exit__(None, None, None)
            if output is not None:
                mode.check_order()
