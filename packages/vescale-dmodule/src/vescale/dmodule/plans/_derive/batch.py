"""Which values of a run carry the batch, and where it ends: from a second run, with twice as many rows.

Ranks that spread experts share a batch, which lies over them from the arguments of the module to its end::

    input_ids [rows] --> embedding [rows] --> ... --> lm_head.output [whole again] --> a loss, a mean over the batch
    labels ------------------------------------------------------------------------------^

A value carries the batch if its dim 0 is twice as long in the second run. The end is the last output of a module inside
that does; what follows is code of the module itself, which may mix rows, such as a loss. An argument is cut over the
batch if the end is computed from it, so targets stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ... import _torch
from ...errors import PlanError
from .graph import Boundary, Graph, Op, Path
from .trace import shadow, trace
from .trial import without_values

__all__ = ["Batch", "find_batch"]

Key = tuple[str, str, Path]


@dataclass
class Batch:
    """Where the batch is in a module.

    Attributes:
        carried: boundaries whose values carry it in dim 0, in every call.
        arguments: those of the module among them from which an end is computed.
        ends: outputs of modules where it becomes whole.
    """

    carried: set[Key] = field(default_factory=set)
    arguments: list[Key] = field(default_factory=list)
    ends: list[Key] = field(default_factory=list)


def find_batch(module: nn.Module, inputs: Mapping[str, object], graph: Graph, whole: set[str]) -> Batch:
    """Return where the batch is.

    Args:
        module: the module.
        inputs: of its recorded run. Tensors as long as the first one, in dim 0, have the rows there.
        graph: of that run.
        whole: modules that are taken as one operator.

    Raises:
        PlanError: no value at the end of the module carries the batch.
    """
    mode = _torch.fake_tensors()
    longer = trace(shadow(module, mode), without_values(_longer(inputs), mode), mode, whole)
    other = {op.boundary: longer.shape(op.inputs[0]) for op in longer.ops if op.boundary is not None}
    calls: dict[Key, list[bool]] = {}
    for op in graph.ops:
        if op.boundary is not None:
            calls.setdefault(op.boundary.key, []).append(_grows(graph.shape(op.inputs[0]), other.get(op.boundary)))
    batch = Batch({key for key, grows in calls.items() if all(grows)})
    ends = _ends(graph, batch.carried)
    above = _ancestors(graph, {op.inputs[0] for op in ends})
    for op in graph.ops:
        if _is_argument(op) and op.outputs[0] in above and op.boundary.key in batch.carried:
            batch.arguments.append(op.boundary.key)
    batch.ends = list(dict.fromkeys(op.boundary.key for op in ends))
    if not batch.ends or not batch.arguments:
        raise PlanError(
            f"derive: expected a module in {type(module).__name__} whose result has the rows of the batch in dim 0, "
            "for batch_axis, got none; leave it out, or write a plan"
        )
    return batch


def _longer(inputs: Mapping[str, object]) -> dict[str, object]:
    rows = next((value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 0)

    def doubled(value: object) -> object:
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != rows:
            return value
        return torch.empty((2 * rows, *value.shape[1:]), dtype=value.dtype, device="meta")

    return {name: doubled(value) for name, value in inputs.items()}


def _grows(shape: tuple[int, ...], longer: tuple[int, ...] | None) -> bool:
    return bool(shape) and longer == (2 * shape[0], *shape[1:])


def _ends(graph: Graph, carried: set[Key]) -> list[Op]:
    """Return the last outputs of modules inside that carry the batch, on the way to each result."""
    results = _ancestors(graph, set(graph.results))
    below: set[int] = set()  # tensors from which such an output is computed
    found = []
    for op in reversed(graph.ops):
        leads = any(tensor in below for tensor in op.outputs)
        boundary: Boundary | None = op.boundary
        if boundary is not None and boundary.module and boundary.side == "output" and boundary.key in carried:
            if not leads and op.outputs[0] in results:
                found.append(op)
            leads = True
        if leads:
            below.update(op.inputs)
    return found[::-1]


def _ancestors(graph: Graph, tensors: set[int]) -> set[int]:
    """Return some tensors and all from which they are computed."""
    found = set(tensors)
    for op in reversed(graph.ops):
        if any(tensor in found for tensor in op.outputs):
            found.update(op.inputs)
    return found


def _is_argument(op: Op) -> bool:
    return op.boundary is not None and (op.boundary.module, op.boundary.side) == ("", "input")
