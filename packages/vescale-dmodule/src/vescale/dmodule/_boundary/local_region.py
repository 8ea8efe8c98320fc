"""Local regions: modules that run on local tensors in every mode, with declared layouts at both ends.

For code that DTensor rules cannot express, such as routing by data. The plan declares the placements of inputs and
outputs. In between, the module's own code runs on this rank's shards and on local parameters::

    "local": {r"layers\\.\\d+\\.router": {"input": {"x": {"tp": Shard(0)}}, "output": [{"tp": Shard(0)}]}}

The placements imply those of the gradients, axis by axis:

    outputs         input or parameter      its local gradient is
    Replicate       any                     placed as itself: all ranks compute the same, or the region communicates
    Shard, Partial  Shard                   of its own shard
    Shard, Partial  Replicate               partial: every rank has the gradient of its own part of the output

A sharded output has the global size of an input that is sharded alike and has the same local size; without such an
input, all ranks hold equal parts. Random operators are refused: a local tensor has no global position.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale.dtensor import UnsupportedOperator, random
from vescale.dtensor.extension import exact_num_blocks

from .. import _torch
from .._execution.patch import ModulePatch, Row, attribute_rows
from .._plan.inputs import InputPlan
from .._plan.placements import is_placements, normalize
from ..errors import PlanError
from .convert import place
from .edges import depend_on, local_shards, unwrapped, wrapped
from .hooks import Phase, install_inputs
from .values import map_tensors

__all__ = ["LocalRegion", "install_local", "refuse_exact"]

Placements = tuple[Placement, ...]
RANDOM = "it is a local region; move the random operator out of it"


def install_local(
    module: nn.Module,
    name: str,
    plan: tuple[InputPlan | None, object],
    mesh: DeviceMesh,
    phase: Phase,
    attributes: Mapping[str, object],
) -> None:
    """Run ``module`` as a local region.

    Args:
        module: the module.
        name: its name in the model.
        plan: the planned placements of its arguments, and of its outputs.
        mesh: the mesh of the plan.
        phase: of the model.
        attributes: values of its attributes while it runs.

    Raises:
        PlanError: outputs that are replicated and outputs that are not, on one axis.
    """
    inputs, output = plan
    if inputs is not None:
        inputs = dataclasses.replace(inputs, where=f"local {inputs.where}")  # the forward section may name it, too
        install_inputs(module, inputs, mesh, phase)
    region = LocalRegion(name, output, mesh, phase, attributes)
    module.register_forward_pre_hook(region.enter, with_kwargs=True)
    module.register_forward_hook(region.leave, always_call=True)


class LocalRegion:
    """Hooks of a local region. Copies of the module share the region's plan, and nothing else."""

    def __init__(self, name: str, output: object, mesh: DeviceMesh, phase: Phase, attributes: Mapping[str, object]):
        self.name, self.output, self.mesh, self.phase, self.attributes = name, output, mesh, phase, attributes
        self.where = f"local {name or 'region'!r} output"
        self.axes = _cut_axes(output, mesh, self.where)
        self.running: list[tuple[contextlib.ExitStack, list[Tensor], list[DTensor]]] = []

    def __deepcopy__(self, memo: dict) -> LocalRegion:
        return LocalRegion(self.name, self.output, self.mesh, copy.deepcopy(self.phase, memo), self.attributes)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Turn arguments and parameters into local tensors.

        Raises:
            UnsupportedOperator: inside of ``exact``.
        """
        refuse_exact(self.name)
        operands: list[Tensor] = []
        inputs: list[DTensor] = []

        def localize(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                inputs.append(tensor)
                tensor = unwrapped(tensor, self._gradient(tensor.placements))
            operands.append(tensor)
            return tensor

        args, kwargs = map_tensors(localize, args), map_tensors(localize, kwargs)
        rows = self._local_rows(module)
        operands += [shard for _, _, shard in rows]
        if not self.phase.local:  # else the static program has set the attributes
            rows += attribute_rows(module, self.attributes)
        undo = contextlib.ExitStack()
        undo.enter_context(ModulePatch(rows))
        undo.enter_context(random.forbidden(RANDOM))
        self.running.append((undo, [t for t in operands if t.requires_grad], inputs))
        return args, kwargs

    def leave(self, _module: nn.Module, _args: tuple, output: object) -> object:
        """Turn outputs into DTensors again, where the model runs on DTensors."""
        if not self.running:  # an earlier hook raised
            return None
        undo, operands, inputs = self.running.pop()
        undo.close()
        if output is None:
            return None
        output = map_tensors(lambda t: depend_on(t, *operands) if t.is_floating_point() else t, output)
        if self.phase.local:
            return output
        return place(output, self.output, self.mesh, self.where, lambda t, p, _where: self._wrap(t, p, inputs))

    def _gradient(self, placements: Placements) -> Placements:
        """Return the layout of the local gradient of an input or parameter with these placements."""
        return tuple(
            Partial() if axis in self.axes and p.is_replicate() else Replicate() if p.is_partial() else p
            for axis, p in enumerate(placements)
        )

    def _local_rows(self, module: nn.Module) -> list[Row]:
        """Return the rows that put the local shards of parameters and buffers into the module."""
        tables = [table for part in module.modules() for table in _torch.tensor_tables(part)]
        places = [(table, key) for table in tables for key, t in table.items() if isinstance(t, nn.Parameter | DTensor)]
        tensors = [table[key] for table, key in places]
        gradients = [self._gradient(t.placements) if isinstance(t, DTensor) else None for t in tensors]
        shards = local_shards(tensors, gradients)
        return [(table, key, shard) for (table, key), shard in zip(places, shards, strict=True)]

    def _wrap(self, local: Tensor, placements: Placements, inputs: list[DTensor]) -> DTensor:
        gradient = tuple(Replicate() if p.is_partial() else p for p in placements)
        shape = _global_shape(local, placements, self.mesh, inputs)
        return wrapped(local, self.mesh, placements, shape=shape, gradient=gradient)


def refuse_exact(name: str) -> None:
    """Refuse code on local tensors inside of ``exact``.

    Raises:
        UnsupportedOperator: it is active.
    """
    if exact_num_blocks() is not None:
        raise UnsupportedOperator(
            f"module {name!r} inside of vescale.dtensor.exact: expected a module that runs on DTensors, got one that "
            "the plan runs on local tensors, whose operators see the shards of a rank alone; take it out of the plan "
            "for the exact run, or leave the context"
        )


def _cut_axes(output: object, mesh: DeviceMesh, where: str) -> frozenset[int]:
    """Return the axes on which outputs are sharded or partial.

    Raises:
        PlanError: the outputs disagree.
    """
    found = [normalize(entry, mesh, where) for entry in _entries(output)]
    axes = [frozenset(axis for axis, p in enumerate(placements) if not p.is_replicate()) for placements in found]
    if len(set(axes)) > 1:
        raise PlanError(
            f"{where}: outputs {found} are replicated and not replicated on one axis, so the gradients of "
            "replicated inputs are ambiguous; return the replicated one from a module of its own"
        )
    return axes[0] if axes else frozenset()


def _entries(output: object) -> list[object]:
    if output is None:
        return []
    if is_placements(output):
        return [output]
    inner = output.values() if isinstance(output, Mapping) else output
    return [leaf for entry in inner for leaf in _entries(entry)]


def _global_shape(local: Tensor, placements: Placements, mesh: DeviceMesh, inputs: list[DTensor]) -> tuple[int, ...]:
    shape = list(local.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            like = (t.shape[dim] for t in inputs if _shards_alike(t, axis, placement, local.shape[dim]))
            shape[dim] = next(like, shape[dim] * mesh.size(axis))
    return tuple(shape)


def _shards_alike(tensor: DTensor, axis: int, placement: Shard, size: int) -> bool:
    return tensor.placements[axis] == placement and _torch.local_of(tensor).shape[placement.dim] == size
