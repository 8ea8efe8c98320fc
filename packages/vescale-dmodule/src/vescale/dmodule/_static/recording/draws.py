"""Note the random operators of a call that runs on DTensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.dtensor import extension

from ... import _torch
from ...errors import NotLocalFriendlyError
from ..operators import ModuleOperators, Operand, RandomOperator
from ..parts import Parts, describe, is_inside, ways_out
from .names import ModuleCall, Names
from .observe import replicated

__all__ = ["DrawRecorder"]


class DrawRecorder(TorchFunctionMode):
    """Note every call of a torch function, and whether it advances the random stream.

    Args:
        names: the running modules.
        mesh: of the recorded layouts.

    Attributes:
        drawn: all random operators, by module, and all calls with a generator argument.
    """

    def __init__(self, names: Names, mesh: DeviceMesh):
        super().__init__()
        self._names, self._mesh = names, mesh
        self._calls: dict[ModuleCall, list[RandomOperator]] = {}
        self.drawn: dict[str, list[RandomOperator]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        operator = RandomOperator(func, [_describe(tensor, self._mesh) for tensor in operands], draws=False)
        before = extension.random_position(self._mesh.device_type)
        result = func(*args, **kwargs)
        operator.draws = extension.random_position(self._mesh.device_type) != before
        if self._names.path:
            self._calls.setdefault(self._names.path[-1], []).append(operator)
        if operator.draws or isinstance(kwargs.get("generator"), torch.Generator):
            self.drawn.setdefault(self._names.running, []).append(operator)
        if not operator.draws:
            return result
        return _torch.tree_map(lambda leaf: _watched(leaf, operator) if isinstance(leaf, DTensor) else leaf, result)

    def of_local_parts(self, parts: Parts) -> dict[str, ModuleOperators]:
        """Return the operators of the local modules with random operators on shards, and of their parts.

        Raises:
            NotLocalFriendlyError: a recomputed module has calls with different operators.
        """
        functions = {operator.function for found in self.drawn.values() for operator in found if operator.draws}
        sharded = {name for name, found in self.drawn.items() if any(operator.is_sharded for operator in found)}
        sharded = {name for name in sharded if not parts.is_eager(name)}
        calls: dict[str, tuple[list, list]] = {}
        for call in self._names.calls:
            if any(is_inside(call.name, owner) for owner in sharded) and not parts.is_eager(call.name):
                noted = [operator for operator in self._calls.get(call, ()) if operator.function in functions]
                calls.setdefault(call.name, ([], []))[call.is_repeat].append(noted)
        return {name: _joined(name, *both) for name, both in calls.items() if any(map(any, both))}


def _joined(name: str, calls: list[list[RandomOperator]], repeats: list[list[RandomOperator]]) -> ModuleOperators:
    try:
        return ModuleOperators(calls, repeats)
    except ValueError as error:
        raise NotLocalFriendlyError(
            f"{describe(name)}: expected the same random operators in all of its {len(calls)} calls, because "
            f"activation checkpointing recomputes it, got different ones; {ways_out(name, is_random=True)}"
        ) from error


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
