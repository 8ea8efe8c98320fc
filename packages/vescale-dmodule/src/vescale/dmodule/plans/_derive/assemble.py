"""From chosen groups to a plan: entries of parameters and boundaries, by names that are alike.

Names that differ in numbers only, and have one entry, become one regular expression, if it matches no other name::

    layers.0.mlp.up.weight, layers.1.mlp.up.weight, ...      layers\\.\\d+\\.mlp\\.up\\.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from ..._plan.attributes import Divided, attribute_names
from ..._plan.placements import Repeat
from .._build import Plan
from .batch import Batch
from .graph import Boundary, Graph, Op, Path, Sections, kind_of
from .spread import Group

__all__ = ["Draft", "draft_of", "keyed"]


@dataclass
class Draft:
    """A plan by full names.

    Attributes:
        parameters: placement of each sharded parameter or buffer.
        boundaries: placement of each value that a plan moves, by module, side and path.
        experts: modules whose experts are spread.
        repeats: boundaries whose heads are repeated before they are placed.
        changes: new values of attributes that go with it.
        attributes: names of attributes that hold a part of their value on local tensors.
        eager: modules that run in eager mode inside a static model.
        batch: where the batch is, if it lies over an axis, too.
    """

    parameters: dict[str, Placement] = field(default_factory=dict)
    boundaries: dict[tuple[str, str, Path], Placement] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    repeats: dict[tuple[str, str, Path], Sections] = field(default_factory=dict)
    changes: dict[str, object] = field(default_factory=dict)
    attributes: list[str] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)
    batch: Batch | None = None

    def plan(self, module: nn.Module, axis: str, expert_axis: str | None = None, batch_axis: str | None = None) -> Plan:
        """Return the plan that :func:`parallelize_module` takes."""
        modules = dict(module.named_modules(remove_duplicate=False))
        tensors = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        tensors += [name for name, _ in module.named_buffers(remove_duplicate=False)]
        sides = [f"{name}.{side}".lstrip(".") for name in modules for side in ("input", "output")]
        plan: Plan = {
            "parameter": keyed({name: {axis: p} for name, p in self.parameters.items()}, tensors),
            "forward": keyed(self._forward(axis, batch_axis), sides),
        }
        if self.experts:
            plan["expert"] = keyed({name: {expert_axis or axis: Shard(0)} for name in self.experts}, modules)
        known = attribute_names(modules) if self.attributes or self.changes else {}
        if self.changes:
            plan["attribute"] = keyed(self.changes, known)
        if self.attributes:
            divided = {name: Divided(axis, self.changes.get(name)) for name in self.attributes}
            plan["local_attribute"] = keyed(divided, known)
        if self.eager:
            plan["eager"] = list(keyed(dict.fromkeys(self.eager, True), modules))
        return plan

    def _forward(self, axis: str, batch_axis: str | None) -> dict[str, object]:
        by_side: dict[str, dict[Path, object]] = {}
        placements = {key: {axis: placement} for key, placement in self.boundaries.items()}
        if self.batch is not None and batch_axis is not None:
            for key in (*self.batch.arguments, *self.batch.ends):
                placements.setdefault(key, {})
            for key in self.batch.carried & placements.keys():
                placements[key][batch_axis] = Replicate() if key in self.batch.ends else Shard(0)
        for (name, side, path), placed in placements.items():
            entry: object = placed
            if (name, side, path) in self.repeats:
                entry = _repeat(self.repeats[name, side, path], placed, axis)
            by_side.setdefault(f"{name}.{side}".lstrip("."), {})[path] = entry
        return {name: _entry(paths) for name, paths in by_side.items()}


def _repeat(sections: Sections, placements: Mapping[str, Placement], axis: str) -> Repeat:
    dim = placements[axis].dim
    parts, times = zip(*sections, strict=True)
    if len(sections) == 1:
        return Repeat(placements, dim=dim, parts=parts[0], times=times[0])
    return Repeat(placements, dim=dim, parts=parts, times=times)


def _entry(paths: Mapping[Path, object]) -> object:
    """Return the entry of a boundary, nested as its values are."""
    if set(paths) == {()}:
        return [paths[()]]
    return _nested(paths)


def _nested(paths: Mapping[Path, object]) -> object:
    if () in paths:
        return paths[()]
    inner: dict[object, dict[Path, object]] = {}
    for path, entry in paths.items():
        inner.setdefault(path[0], {})[path[1:]] = entry
    if all(isinstance(key, int) for key in inner):
        return [_nested(inner[i]) if i in inner else None for i in range(max(inner) + 1)]
    return {key: _nested(of_key) for key, of_key in inner.items()}


def draft_of(graph: Graph, groups: Sequence[Group], pins: Iterable[Op], degree: int) -> Draft:
    """Return the plan of some groups; of two entries for one boundary the later one counts."""
    draft = Draft()
    for group in groups:
        for tensor, placement in group.parameters.items():
            draft.parameters |= dict.fromkeys(graph.tensors[tensor].names, placement)
        for op in (*group.reduced, *group.gathered):
            draft.boundaries |= dict.fromkeys(_keys(graph, op), Replicate())
        for op in group.sliced:
            if placement := group.slice_of(graph, op, degree):
                draft.boundaries |= dict.fromkeys(_keys(graph, op), placement)
                draft.repeats |= {key: sections for key, sections in graph.repeats.items() if key == _key(op)}
    for op in pins:
        draft.boundaries |= dict.fromkeys(_keys(graph, op), Replicate())
    return draft


def _keys(graph: Graph, op: Op) -> list[tuple[str, str, Path]]:
    """Return the boundary of an operator, once for each path of its tensor: entries of one tensor are equal."""
    module, side, _ = key = _key(op)
    return [key, *((module, side, path) for path in sorted(graph.paths.get(key, ()), key=str))]


def _key(op: Op) -> tuple[str, str, Path]:
    boundary: Boundary = op.boundary
    return boundary.key


# ------------------------------------------------------------------------------------------------- names


def keyed(entries: Mapping[str, object], names: Iterable[str]) -> dict[str, object]:
    """Return entries by regular expressions, each of which matches only names with that entry."""
    by_kind: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_kind.setdefault(kind_of(name), []).append(name)
    found: dict[str, object] = {}
    for name, entry in entries.items():
        kind = kind_of(name)
        is_shared = all(other in entries and entries[other] == entry for other in by_kind.get(kind, [name]))
        found[kind if is_shared else re.escape(name)] = entry
    return _alternatives(found)


def _ascending(options: list[str]) -> list[str]:
    return sorted(options, key=int) if all(option.isdigit() for option in options) else options


def _alternatives(entries: Mapping[str, object]) -> dict[str, object]:
    """Return entries in which regular expressions that differ in one part, and have equal entries, are one."""
    rows = [(key.split(r"\."), entry) for key, entry in entries.items()]
    depth = max((len(parts) for parts, _ in rows), default=0)
    for place in reversed(range(depth)):
        merged: list[tuple[list[str], object, list[str]]] = []
        for parts, entry in rows:
            if place >= len(parts):
                merged.append((parts, entry, []))
                continue
            rest = parts[:place], parts[place + 1 :]
            like = next(
                (m for m in merged if m[2] and (m[0][:place], m[0][place + 1 :]) == rest and m[1] == entry), None
            )
            if like is None:
                merged.append((parts, entry, [parts[place]]))
            elif parts[place] not in like[2]:
                like[2].append(parts[place])
        rows = [
            ([*parts[:place], f"({'|'.join(_ascending(options))})", *parts[place + 1 :]], entry)
            if len(options) > 1
            else (parts, entry)
            for parts, entry, options in merged
        ]
    return {r"\.".join(parts): entry for parts, entry in rows}
