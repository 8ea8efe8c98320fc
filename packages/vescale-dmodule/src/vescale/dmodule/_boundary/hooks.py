"""Module hooks that convert arguments and results at the boundaries of a plan.

All boundaries of a parallelized module share one :class:`Phase`. In eager mode they convert DTensors. In static mode
``phase.convert`` converts local tensors, and arguments that are single tensors take a fast path.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .._plan.inputs import InputPlan
from .._plan.placements import Repeat, is_placements, normalize
from .._report.ranges import Meter, is_watched, watched
from .convert import Convert, bring, place

__all__ = ["InputBoundary", "OutputBoundary", "Phase", "install_inputs", "install_outputs"]


Placements = tuple[Placement, ...]


@dataclass
class Phase:
    """The current conversion of all boundaries of one parallelized module, which share this object.

    Attributes:
        convert: None in eager mode. In static mode it converts local tensors; called like a :data:`Convert`, with
            ``is_result`` in addition.
        local: whether the model runs on local tensors.
        meter: measures every conversion while a report is open, else None.
    """

    convert: Convert | None = None
    local: bool = False
    meter: Meter | None = None

    def __deepcopy__(self, memo: dict) -> Phase:
        del memo  # `copy.deepcopy` remembers the result: one for all boundaries of the copy and its execution
        return Phase()

    def step(self, mesh: DeviceMesh, *, is_result: bool) -> Convert:
        """Return the current conversion, see :func:`place`; watched while a profiler runs or a report is open.

        Args:
            mesh: of the placements.
            is_result: whether it converts results of modules, see :func:`bring`.
        """
        convert = functools.partial(self.convert or functools.partial(_bring, mesh), is_result=is_result)
        if not is_watched(self.meter):
            return convert
        return lambda tensor, placements, where: watched(
            convert, tensor, placements, where, self.meter, is_result=is_result
        )


def _bring(mesh: DeviceMesh, tensor: Tensor, placements: Placements, _where: str, *, is_result: bool) -> Tensor:
    return bring(tensor, placements, mesh, is_result=is_result)


class InputBoundary:
    """Forward pre-hook that converts the arguments of a module."""

    def __init__(self, plan: InputPlan, mesh: DeviceMesh, phase: Phase):
        self.plan, self.mesh, self.phase = plan, mesh, phase
        self.simple = _simple_arguments(plan, mesh)

    def __deepcopy__(self, memo: dict) -> InputBoundary:
        return InputBoundary(self.plan, self.mesh, copy.deepcopy(self.phase, memo))

    def __call__(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        convert = self.phase.step(self.mesh, is_result=False)
        if self.simple is None:
            return self._convert_any(args, kwargs, convert)
        done: list[tuple[object, object, object]] = []
        for position, name, entry, where in self.simple:
            if position < len(args):
                value = self._convert_once(done, args[position], entry, where, convert)
                args = (*args[:position], value, *args[position + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: self._convert_once(done, kwargs[name], entry, where, convert)}
        return args, kwargs

    def _convert_once(
        self, done: list[tuple[object, object, object]], value: object, entry: object, where: str, convert: Convert
    ) -> object:
        """Convert an argument; a tensor that is passed twice stays one object, as code compares arguments with `is`."""
        for before, placements, converted in done:
            if before is value and placements == entry:
                return converted
        converted = self._convert(value, entry, where, convert)
        if isinstance(value, Tensor):
            done.append((value, entry, converted))
        return converted

    def _convert(self, value: object, entry: object, where: str, convert: Convert) -> object:
        if self.phase.local and type(value) is Tensor and type(entry) is tuple:
            return convert(value, entry, where)
        return place(value, entry, self.mesh, where, convert)

    def _convert_any(self, args: tuple, kwargs: dict, convert: Convert) -> tuple[tuple, dict]:
        bound = self.plan.signature.bind(*args, **kwargs)
        for argument, entry in self.plan.arguments.items():
            kind = self.plan.signature.parameters[argument].kind
            if argument in bound.arguments or kind in VARIABLE:  # else the default stays
                value = bound.arguments.get(argument, VARIABLE.get(kind))
                where = f"{self.plan.where} {argument!r}"
                bound.arguments[argument] = place(value, entry, self.mesh, where, convert)
        return bound.args, bound.kwargs


VARIABLE = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}


def _simple_arguments(plan: InputPlan, mesh: DeviceMesh) -> list[tuple[int, str, object, str]] | None:
    """Return position, name, entry and boundary of the planned arguments; None if ``*args`` or ``**kwargs`` is planned.

    A position past all arguments stands for one that is passed by name only.
    """
    parameters = list(plan.signature.parameters.values())
    if any(plan.signature.parameters[argument].kind in VARIABLE for argument in plan.arguments):
        return None
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    far = 1 << 30
    found = []
    for name, entry in plan.arguments.items():
        if entry is not None:
            where = f"{plan.where} {name!r}"
            alone = is_placements(entry) and not isinstance(entry, Repeat)
            entry = normalize(entry, mesh, where) if alone else entry
            found.append((positional.index(name) if name in positional else far, name, entry, where))
    return found


class OutputBoundary:
    """Forward hook that converts the output of a module."""

    def __init__(self, name: str, entry: object, mesh: DeviceMesh, phase: Phase):
        self.entry, self.mesh, self.phase = entry, mesh, phase
        self.where = f"{name}.output" if name else "output"
        alone = entry[0] if isinstance(entry, list) and len(entry) == 1 and not is_placements(entry) else entry
        is_alone = is_placements(alone) and not isinstance(alone, Repeat)
        self.alone = normalize(alone, mesh, self.where) if is_alone else None
        self.name = name

    def __deepcopy__(self, memo: dict) -> OutputBoundary:
        return OutputBoundary(self.name, self.entry, self.mesh, copy.deepcopy(self.phase, memo))

    def __call__(self, _module: nn.Module, _args: tuple, output: object) -> object:
        convert = self.phase.step(self.mesh, is_result=True)
        if type(output) is Tensor and self.phase.local and self.alone is not None:
            return convert(output, self.alone, self.where)
        return place(output, self.entry, self.mesh, self.where, convert)


def install_inputs(module: nn.Module, plan: InputPlan, mesh: DeviceMesh, phase: Phase) -> None:
    """Convert the inputs of ``module`` on every call."""
    module.register_forward_pre_hook(InputBoundary(plan, mesh, phase), with_kwargs=True)


def install_outputs(module: nn.Module, name: str, entry: object, mesh: DeviceMesh, phase: Phase) -> None:
    """Convert the output of ``module`` on every call."""
    module.register_forward_hook(OutputBoundary(name, entry, mesh, phase))
