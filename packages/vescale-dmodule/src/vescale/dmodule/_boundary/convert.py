"""Boundaries: what enters or leaves a module is brought to the placements that the plan names.

A plan entry mirrors the structure of the values (see ``_placements``). A plain tensor at a boundary is taken as equal
on all ranks of the mesh, as everything outside the parallel module is.

The conversions are differentiable; the backward of each one is its conjugate (all-gather against reduce-scatter,
all-reduce against identity), so a boundary fixes the layout of gradients too.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.overrides import handle_torch_function, has_torch_function

from .. import _torch
from .._plan.placements import Repeat, is_placements, normalize, on_shape
from .._report.ranges import Meter, is_watched, watched
from ..errors import PlanError

__all__ = [
    "InputPlan",
    "Phase",
    "as_dtensor",
    "bring",
    "fields_of",
    "install_inputs",
    "install_outputs",
    "is_plain",
    "map_tensors",
    "place",
    "plan_inputs",
    "rebuild_fields",
    "rebuild_sequence",
    "to_plain",
]


Convert = Callable[[Tensor, tuple[Placement, ...], str], Tensor]
"""Brings a tensor to placements; the third argument names the place."""


def is_plain(value: object) -> bool:
    """Tell whether a value is a tensor of torch's own type, not of a subclass."""
    return type(value) in (Tensor, nn.Parameter)


def as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a plain tensor that is equal on all ranks as a replicated DTensor; gradients come back reduced."""
    with _torch.no_function_modes():  # what DTensor does inside is no call of the user's program
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def bring(tensor: Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> DTensor:
    """Return ``tensor`` in ``placements``, differentiably.

    Note [boundaries are torch functions]: like an operator of torch, this and :func:`to_plain` offer themselves to
    function modes and tensor subclasses first. A pipeline that stands in for values of other stages sees one call,
    whatever communication it takes, and its stand-in needs not know DTensor.
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(bring, (tensor,), tensor, placements, mesh)
    tensor = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, mesh)
    moved = tuple(tensor.placements) != placements
    summed = any(p.is_partial() for p in tensor.placements)
    if moved:
        tensor = tensor.redistribute(placements=placements)
    # A redistribution from Replicate or Shard brings its gradient back to that layout by itself.
    return tensor if moved and not summed else _PinGradient.apply(tensor)


def to_plain(tensor: Tensor) -> Tensor:
    """Return a replicated DTensor as a plain tensor, a partial one reduced; sharded and plain ones stay as they are.

    See Note [boundaries are torch functions].
    """
    if has_torch_function((tensor,)):
        return handle_torch_function(to_plain, (tensor,), tensor)
    if not isinstance(tensor, DTensor) or any(p.is_shard() for p in tensor.placements):
        return tensor
    if any(p.is_partial() for p in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return tensor.to_local()


# ------------------------------------------------------------------------------------------------- values


def place(value: object, entry: object, mesh: DeviceMesh, where: str, convert: Convert | None = None) -> object:
    """Return ``value`` with its tensors in the placements of ``entry``.

    Args:
        value: a tensor, or a structure of them.
        entry: placements in the same structure.
        mesh: the mesh of the placements.
        where: the boundary's name; a tensor inside of a structure has its path appended.
        convert: what brings one tensor to its placements, :func:`bring` unless given.

    Raises:
        PlanError: the structure of ``entry`` does not fit the value, naming the boundary.
    """
    if entry is None or value is None:
        return value
    if isinstance(entry, Repeat):
        return place(map_tensors(entry.apply, value), entry.entry, mesh, where, convert)
    if is_placements(entry):
        return _place_tensor(value, normalize(entry, mesh, where), mesh, where, convert)
    if isinstance(entry, Mapping):
        return _place_fields(value, entry, mesh, where, convert)
    if not isinstance(value, tuple | list):
        if len(entry) == 1:  # a module with one output may be written as a list of one
            return place(value, entry[0], mesh, where, convert)
        raise PlanError(f"{where}: the plan has {len(entry)} entries, but the value is one {type(value).__name__}")
    if len(entry) > len(value):
        raise PlanError(f"{where}: the plan has {len(entry)} entries, but there are {len(value)} values")
    pairs = enumerate(zip(value, entry, strict=False))
    placed = [place(v, e, mesh, f"{where} [{i}]", convert) for i, (v, e) in pairs]
    return rebuild_sequence(value, [*placed, *value[len(entry) :]])


def _place_tensor(
    value: object, placements: tuple[Placement, ...], mesh: DeviceMesh, where: str, convert: Convert | None
) -> Tensor:
    if not isinstance(value, Tensor):
        raise PlanError(f"{where}: the plan gives placements {placements}, but the value is a {type(value).__name__}")
    placements = on_shape(placements, value.shape, where)
    return bring(value, placements, mesh) if convert is None else convert(value, placements, where)


class _PinGradient(torch.autograd.Function):
    """Identity whose gradient has the placements of the value; partial sums from both sides never meet further up."""

    @staticmethod
    def forward(ctx, tensor: DTensor) -> DTensor:
        ctx.placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


def _place_fields(value: object, entry: Mapping, mesh: DeviceMesh, where: str, convert: Convert | None) -> object:
    fields = fields_of(value)
    if fields is None:
        raise PlanError(f"{where}: the plan names {sorted(entry)}, but the value is a {type(value).__name__}")
    missing = [name for name in entry if name not in fields]
    if missing:
        raise PlanError(f"{where}: no field {missing[0]!r}; fields are {sorted(map(str, fields))}")
    placed = {name: place(fields[name], inner, mesh, f"{where} {name!r}", convert) for name, inner in entry.items()}
    return rebuild_fields(value, placed)


def map_tensors(fn: Callable[[Tensor], Tensor], value: object) -> object:
    """Return ``value`` with ``fn`` applied to its tensors, in tuples, lists, dicts and dataclasses of any depth.

    Containers without a changed tensor stay the same objects; objects of other classes are left alone.

    Example:
        >>> map_tensors(lambda t: t + 1, {"x": (torch.zeros(2), "y")})
        {'x': (tensor([1., 1.]), 'y')}
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        mapped = [map_tensors(fn, item) for item in value]
        changed = any(new is not old for new, old in zip(mapped, value, strict=True))
        return rebuild_sequence(value, mapped) if changed else value
    new_fields = {name: map_tensors(fn, field) for name, field in (fields_of(value) or {}).items()}
    changed_fields = {name: new for name, new in new_fields.items() if new is not fields_of(value)[name]}
    return rebuild_fields(value, changed_fields) if changed_fields else value


def fields_of(value: object) -> Mapping | None:
    """Return the named parts of a dataclass or a dict; a class that is both (Hugging Face's outputs) is a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return value if isinstance(value, Mapping) else None


def rebuild_fields(value: object, changed: Mapping) -> object:
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **changed)
    new = copy.copy(value)
    new.update(changed)
    return new


def rebuild_sequence(value: Sequence, items: list) -> Sequence:
    return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)  # a named tuple takes them apart


# ------------------------------------------------------------------------------------------------- modules


@dataclass(frozen=True)
class InputPlan:
    """What a plan says about the arguments of one module.

    Attributes:
        where: the boundary's name in errors.
        signature: of the module's forward.
        arguments: argument name -> entry. The name of ``*args`` has a list, that of ``**kwargs`` a dict.
    """

    where: str
    signature: inspect.Signature
    arguments: dict[str, object]


def plan_inputs(module: nn.Module, name: str, entry: object) -> InputPlan:
    """Match an ``.input`` entry, a list by position or a dict by name, with the signature of a module's forward.

    Raises:
        PlanError: more positions than the forward has, or an argument that it does not take.
    """
    where = f"{name}.input" if name else "input"
    signature = inspect.signature(module.forward)
    if is_placements(entry):
        entry = [entry]
    match = _by_name if isinstance(entry, Mapping) else _by_position
    return InputPlan(where, signature, match(where, signature, entry or {}))


def _names(signature: inspect.Signature, *kinds: object) -> list[str]:
    return [parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds]


def _by_position(where: str, signature: inspect.Signature, entries: Sequence) -> dict[str, object]:
    positional = _names(signature, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variable = _names(signature, inspect.Parameter.VAR_POSITIONAL)
    rest = list(entries)[len(positional) :]
    if rest and not variable:
        raise PlanError(f"{where}: the plan has {len(entries)} entries, forward takes {positional} by position")
    return dict(zip(positional, entries, strict=False)) | ({variable[0]: rest} if rest else {})


def _by_name(where: str, signature: inspect.Signature, entries: Mapping[str, object]) -> dict[str, object]:
    variable = _names(signature, inspect.Parameter.VAR_KEYWORD)
    named = [name for name in signature.parameters if name not in variable]
    extra = {argument: entry for argument, entry in entries.items() if argument not in named}
    if extra and not variable:
        raise PlanError(f"{where}: forward has no argument {next(iter(extra))!r}; its arguments are {named}")
    known = {argument: entry for argument, entry in entries.items() if argument in named}
    return known | ({variable[0]: extra} if extra else {})


@dataclass
class Phase:
    """How boundaries convert at the moment. All boundaries of a parallelized module share one.

    Attributes:
        convert: None in eager mode, see :func:`place`. In static mode what converts local tensors.
        local: whether the model runs on local tensors.
        meter: hears of every conversion while a report is open.
    """

    convert: Convert | None = None
    local: bool = False
    meter: Meter | None = None

    def __deepcopy__(self, memo: dict) -> Phase:
        del memo  # `copy.deepcopy` remembers the result: one for all boundaries of the copy and its execution
        return Phase()

    def step(self, mesh: DeviceMesh) -> Convert | None:
        """Return what converts a tensor now, see :func:`place`; watched while a profiler runs or a report is open."""
        if not is_watched(self.meter):
            return self.convert
        convert = self.convert or (lambda tensor, placements, _where: bring(tensor, placements, mesh))
        return lambda tensor, placements, where: watched(convert, tensor, placements, where, self.meter)


class InputBoundary:
    """Forward pre-hook that converts the arguments of a module."""

    def __init__(self, plan: InputPlan, mesh: DeviceMesh, phase: Phase):
        self.plan, self.mesh, self.phase = plan, mesh, phase
        self.simple = _simple_arguments(plan, mesh)

    def __deepcopy__(self, memo: dict) -> InputBoundary:
        return InputBoundary(self.plan, self.mesh, copy.deepcopy(self.phase, memo))

    def __call__(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        convert = self.phase.step(self.mesh)
        if not self.phase.local or self.simple is None:
            return self._convert_any(args, kwargs, convert)
        for position, name, entry, where in self.simple:
            if position < len(args):
                value = self._convert(args[position], entry, where, convert)
                args = (*args[:position], value, *args[position + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: self._convert(kwargs[name], entry, where, convert)}
        return args, kwargs

    def _convert(self, value: object, entry: object, where: str, convert: Convert) -> object:
        if type(value) is Tensor and type(entry) is tuple:
            return convert(value, entry, where)
        return place(value, entry, self.mesh, where, convert)

    def _convert_any(self, args: tuple, kwargs: dict, convert: Convert | None) -> tuple[tuple, dict]:
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
    """Return position, name, entry and place of the planned arguments; None where ``*args`` or ``**kwargs`` is planned.

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
    """Forward hook that converts what a module returns."""

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
        convert = self.phase.step(self.mesh)
        if type(output) is Tensor and self.phase.local and self.alone is not None:
            return convert(output, self.alone, self.where)
        return place(output, self.entry, self.mesh, self.where, convert)


def install_inputs(module: nn.Module, plan: InputPlan, mesh: DeviceMesh, phase: Phase) -> None:
    """Convert the inputs of ``module`` on every call."""
    module.register_forward_pre_hook(InputBoundary(plan, mesh, phase), with_kwargs=True)


def install_outputs(module: nn.Module, name: str, entry: object, mesh: DeviceMesh, phase: Phase) -> None:
    """Convert what ``module`` returns on every call."""
    module.register_forward_hook(OutputBoundary(name, entry, mesh, phase))
