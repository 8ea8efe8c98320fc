"""Attributes that a plan changes: hard-coded sizes that a module reads while it runs on its shard of the work.

An attribute is named by the module that holds it and a dotted path from there, which may lead through plain objects::

    transformer.h.0.attn.split_size                     module "transformer.h.0.attn", path "split_size"
    model.layers.0.self_attn.config.num_key_value_heads     module "...self_attn", path "config.num_key_value_heads"

A plan can change the attributes that exist when it is resolved: those of the module, those of plain objects in it up
to two objects deep, and constants of their classes. Tensors, submodules and functions are not attributes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from vescale.dtensor.extension import checked

from ..errors import PlanError
from .placements import MeshAxes

__all__ = ["Attributes", "Divided", "attribute_names", "attribute_values", "show_value", "tails"]

Attributes = dict[str, dict[str, object]]

MAX_OBJECTS = 2  # how many plain objects a path may lead through
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
CONSTANTS = (bool, int, float, str, tuple, type(None))


@checked
@dataclass(frozen=True)
class Divided:
    """The attribute's own value, or another number, divided by the size of a mesh axis.

    Args:
        axis: name of the mesh axis.
        number: the dividend; the attribute's value by default.

    Example:
        >>> {"local_attribute": {r"transformer\\.h\\.\\d+\\.attn\\.split_size": Divided("tp")}}
        {'local_attribute': {'transformer\\\\.h\\\\.\\\\d+\\\\.attn\\\\.split_size': Divided(axis='tp', number=None)}}
    """

    axis: str
    number: int | None = None


def attribute_names(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, str, object]]:
    """Return ``{full name: (module name, dotted path, value)}`` of every attribute that a plan can change."""
    return {
        f"{name}.{path}" if name else path: (name, path, value)
        for name, module in modules.items()
        for path, value in _attributes(module, MAX_OBJECTS)
    }


def _attributes(owner: object, depth: int) -> Iterator[tuple[str, object]]:
    skipped = OF_EVERY_MODULE if isinstance(owner, nn.Module) else ()
    for name, value in {**_constants(type(owner)), **vars(owner)}.items():
        if name in skipped or isinstance(value, Tensor | nn.Module) or inspect.isroutine(value):
            continue
        yield name, value
        if depth and hasattr(value, "__dict__") and not isinstance(value, type) and not inspect.ismodule(value):
            yield from ((f"{name}.{path}", inner) for path, inner in _attributes(value, depth - 1))


def _constants(kind: type) -> dict[str, object]:
    """Return the plain constants that a class and its bases define, those of torch left out."""
    bases = [base for base in reversed(kind.__mro__) if base is not object and not base.__module__.startswith("torch.")]
    return {
        name: value
        for base in bases
        for name, value in vars(base).items()
        if not name.startswith("__") and isinstance(value, CONSTANTS)
    }


def attribute_values(
    section: str, matched: Mapping[str, object], known: Mapping[str, tuple[str, str, object]], mesh: MeshAxes
) -> Attributes:
    """Return ``{module name: {dotted path: value}}`` with every :class:`Divided` computed for ``mesh``.

    Raises:
        PlanError: the axis of a ``Divided`` is not in the mesh, or does not divide the value.
    """
    values: Attributes = {}
    for full, entry in matched.items():
        name, path, value = known[full]
        if isinstance(entry, Divided):
            entry = _divide(value if entry.number is None else entry.number, entry.axis, mesh, f"{section} {full!r}")
        values.setdefault(name, {})[path] = entry
    return values


def _divide(value: object, axis: str, mesh: MeshAxes, where: str) -> int:
    names = tuple(mesh.mesh_dim_names or ())
    if axis not in names:
        raise PlanError(f"{where}: expected one of the mesh's axes {names}, got {axis!r}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{where}: Divided({axis!r}) needs an integer, got {show_value(value)}")
    size = mesh.size(names.index(axis))
    if value % size:
        raise PlanError(
            f"{where} is {value}, which the {size} ranks of axis {axis!r} do not divide; give the value itself, "
            f"or use a degree that divides {value}"
        )
    return value // size


def show_value(value: object) -> str:
    """Return the repr of a value without addresses, which differ between ranks."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def tails(key: str) -> Iterator[str]:
    """Yield the attribute paths that a key may end in, for modules whose attributes cannot be listed.

    Example:
        >>> list(tails(r"layers\\.\\d+\\.attn\\.num_heads"))
        ['num_heads', 'attn.num_heads']
    """
    parts = key.split(r"\.")
    for start in range(len(parts) - 1, -1, -1):
        if not parts[start].isidentifier():
            return
        yield ".".join(parts[start:])
