"""Resolve a plan: match the regexes of all sections with the names in a module.

Pure functions of names, shapes and signatures. They read no values and communicate nothing, so every mistake is
reported before the first collective, alike on every rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from .._experts import ExpertLayout, plan_experts
from ..errors import PlanError
from .attributes import Attributes, attribute_names, attribute_values, show_value, tails
from .inputs import InputPlan, plan_inputs
from .parameters import check_ties
from .placements import MeshAxes, check_entry, check_shards, normalize, on_shape

__all__ = ["ResolvedPlan", "resolve"]

ATTRIBUTE_SECTIONS = ("attribute", "local_attribute")
SECTIONS = ("parameter", "forward", "expert", *ATTRIBUTE_SECTIONS, "eager", "local")
SIDES = ("input", "output")


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan whose keys are fully qualified names of this module.

    Attributes:
        tensors: placements, one per mesh axis, of every parameter and of the buffers that the plan names.
        inputs: module name -> its planned arguments.
        outputs: module name -> the entry of its outputs, as written.
        experts: module name -> the layout of its experts.
        attributes: module name -> attribute path -> the value that the module sees in every mode.
        local_attributes: the same, seen only while the module runs on local tensors.
        eager: names of the modules that run in eager mode inside a static model.
        local: module name of a local region -> its planned arguments and the entry of its outputs; None for a side
            that the plan leaves out.
    """

    tensors: dict[str, tuple[Placement, ...]] = field(default_factory=dict)
    inputs: dict[str, InputPlan] = field(default_factory=dict)
    outputs: dict[str, object] = field(default_factory=dict)
    experts: dict[str, ExpertLayout] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    local_attributes: Attributes = field(default_factory=dict)
    eager: tuple[str, ...] = ()
    local: dict[str, tuple[InputPlan | None, object]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield one line per entry, the same on every rank that resolved the same plan."""
        yield from (f"parameter {name}: {placements}" for name, placements in self.tensors.items())
        yield from (f"forward {plan.where}: {plan.arguments}" for plan in self.inputs.values())
        yield from (f"forward {name}.output: {entry}" for name, entry in self.outputs.items())
        yield from (f"expert {name}: {layout}" for name, layout in self.experts.items())
        for section, values in zip(ATTRIBUTE_SECTIONS, (self.attributes, self.local_attributes), strict=True):
            for name, paths in values.items():
                yield from (f"{section} {_join(name, path)}: {show_value(value)}" for path, value in paths.items())
        yield from (f"eager {name}" for name in self.eager)
        for name, (inputs, output) in self.local.items():
            yield f"local {name}: input {inputs and inputs.arguments}, output {output}"


def resolve(
    module: nn.Module, mesh: MeshAxes, plan: Mapping[str, object], *, allow_empty: bool = False
) -> ResolvedPlan:
    """Match every key of ``plan`` against the names in ``module``.

    Names of parts that live on other pipeline stages (listed in ``absent_fqns`` of the stub that took their place)
    count as known, so that one plan serves all stages.

    Args:
        module: real or deferred, of plain tensors.
        mesh: its axes and their sizes.
        plan: as for :func:`parallelize_module`.
        allow_empty: accept shards of a parameter that leave a rank without any of it.

    Raises:
        PlanError: unknown section, key that matches nothing (with the nearest names), two keys that disagree about one
            tensor, boundary or attribute, axis, dim or argument that does not exist, a parameter that cannot be cut as
            planned or not without empty shards, ties placed in two ways, boundaries inside a local region.
    """
    unknown = [section for section in plan if section not in SECTIONS]
    if unknown:
        raise PlanError(f"expected a plan of the sections {', '.join(SECTIONS)}, got {unknown[0]!r}; use one of these")
    for section, entries in plan.items():
        if section != "eager" and not isinstance(entries, Mapping):
            raise PlanError(
                f"expected a dict of patterns in section {section!r} of the plan, got {entries!r}; write one"
            )
        odd = [key for key in entries if not isinstance(key, str)] if section != "eager" else []
        if odd:
            raise PlanError(
                f"expected regexes as keys of section {section!r} of the plan, got {odd[0]!r}; write a string"
            )
    absent = _absent_names(module)
    modules = {name: part for name, part in module.named_modules(remove_duplicate=False) if name not in absent}

    experts = _match("expert", plan.get("expert", {}), modules, absent)
    experts = {name: plan_experts(name, modules[name], entry, mesh) for name, entry in experts.items()}
    tensors = _resolve_tensors(module, mesh, plan.get("parameter", {}), absent, experts, allow_empty=allow_empty)
    check_ties(module, tensors)
    inputs, outputs = (_resolve_side(side, mesh, plan.get("forward", {}), modules, absent) for side in SIDES)
    inputs = {name: plan_inputs(modules[name], name, entry) for name, entry in inputs.items()}
    attributes, local_attributes = (
        _resolve_attributes(section, mesh, plan.get(section, {}), modules, absent) for section in ATTRIBUTE_SECTIONS
    )
    eager = _resolve_eager(plan.get("eager", ()), modules, absent)
    local = _resolve_local(mesh, plan.get("local", {}), modules, absent)
    _check_regions(local, {"expert": experts, "forward": [*inputs, *outputs], "eager": eager, "local": local})
    return ResolvedPlan(tensors, inputs, outputs, experts, attributes, local_attributes, eager, local)


def _resolve_tensors(
    module: nn.Module,
    mesh: MeshAxes,
    keys: Mapping[str, object],
    absent: set[str],
    experts: Mapping[str, ExpertLayout],
    *,
    allow_empty: bool,
) -> dict[str, tuple[Placement, ...]]:
    """Return the placements of every parameter, and of the buffers that a key names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known = {**dict(module.named_buffers(remove_duplicate=False)), **parameters}
    placed = next((name for name, tensor in known.items() if isinstance(tensor, DTensor)), None)
    if placed is not None:
        raise PlanError(f"{placed!r} is a DTensor already; give parallelize_module a module of plain tensors")
    tensors = {
        name: normalize(entry, mesh, f"parameter {name!r}")
        for name, entry in _match("parameter", keys, known, absent).items()
    }
    for owner, layout in experts.items():
        for name, placements in ((_join(owner, leaf), placements) for leaf, placements in layout.parameters.items()):
            if tensors.setdefault(name, placements) != placements:
                raise PlanError(
                    f"parameter {name!r} is placed as {tensors[name]}, but its experts are placed as {placements}; "
                    "leave it to the expert section"
                )
    replicated = (Replicate(),) * mesh.ndim
    tensors.update({name: replicated for name in parameters if name not in tensors})
    for name, placements in tensors.items():
        shape, where = known[name].shape, f"parameter {name!r}"
        tensors[name] = on_shape(placements, shape, where)
        check_shards(tensors[name], shape, mesh, where, allow_empty=allow_empty)
    return tensors


def _resolve_side(
    side: str, mesh: MeshAxes, keys: Mapping[str, object], modules: Mapping[str, nn.Module], absent: set[str]
) -> dict[str, object]:
    """Return ``{module name: entry}`` for the keys that end in ``side``."""
    for key in keys:
        if not key.endswith(SIDES):
            raise PlanError(f"expected forward keys that end in '.input' or '.output', got {key!r}; say which side")
    names = {_join(name, side): name for name in modules}
    absent_names = {_join(name, side) for name in absent}
    matched = _match("forward", {k: e for k, e in keys.items() if k.endswith(side)}, names, absent_names)
    for boundary, entry in matched.items():
        check_entry(entry, mesh, boundary)
    return {names[boundary]: entry for boundary, entry in matched.items()}


def _resolve_attributes(
    section: str, mesh: MeshAxes, keys: Mapping[str, object], modules: Mapping[str, nn.Module], absent: set[str]
) -> Attributes:
    """Return the values of a section of attributes, by module and path."""
    if not keys:
        return {}
    known = attribute_names(modules)
    absent_names = {_join(name, tail) for key in keys for tail in tails(key) for name in absent}
    return attribute_values(section, _match(section, keys, known, absent_names), known, mesh)


def _resolve_eager(keys: object, modules: Mapping[str, nn.Module], absent: set[str]) -> tuple[str, ...]:
    """Return the names of the modules that stay in eager mode, in the order of the module."""
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise PlanError(
            f"expected regexes of module names in section 'eager' of the plan, got {keys!r}; write a list such as "
            "['layers.0.moe']"
        )
    matched = _match("eager", dict.fromkeys(keys), modules, absent)
    return tuple(name for name in modules if name in matched)


def _resolve_local(
    mesh: MeshAxes, keys: Mapping[str, object], modules: Mapping[str, nn.Module], absent: set[str]
) -> dict[str, tuple[InputPlan | None, object]]:
    """Return ``{module name: (input plan, output entry)}`` of the local regions."""
    local = {}
    for name, entry in _match("local", keys, modules, absent).items():
        if not isinstance(entry, Mapping) or not entry or not entry.keys() <= set(SIDES):
            raise PlanError(f"local {name!r}: expected {{'input': entry, 'output': entry}}, got {entry!r}")
        for side in entry:
            check_entry(entry[side], mesh, f"local {_join(name, side)}")
        given = entry.get("input")
        local[name] = (None if given is None else plan_inputs(modules[name], name, given), entry.get("output"))
    return local


def _check_regions(local: Mapping[str, object], sections: Mapping[str, Iterable[str]]) -> None:
    """Refuse entries inside a local region, whose tensors have no placements."""
    for region in local:
        prefix = f"{region}." if region else ""
        for section, names in sections.items():
            inside = next((name for name in names if name != region and name.startswith(prefix)), None)
            if inside is not None:
                raise PlanError(
                    f"{section} entry for {inside!r} lies inside the local region {region!r}, which runs on local "
                    "tensors; move the entry out of it, or make the region smaller"
                )


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _absent_names(module: nn.Module) -> set[str]:
    """Return the names that exist on other pipeline stages."""
    names = set()
    for owner, part in module.named_modules(remove_duplicate=False):
        for name in getattr(part, "absent_fqns", ()):
            names.add(_join(owner, name) if name else owner)
    return names


def _match(section: str, keys: Mapping[str, object], known: Iterable[str], absent: set[str]) -> dict[str, object]:
    """Return ``{name: entry}`` for every known name that a key matches in full."""
    found: dict[str, object] = {}
    source: dict[str, str] = {}
    known = list(known)
    for key, entry in keys.items():
        try:
            pattern = re.compile(key)
        except re.error as error:
            raise PlanError(f"expected regular expressions as {section} keys, got {key!r}: {error}") from error
        names = [name for name in known if pattern.fullmatch(name)]
        if not names and not any(pattern.fullmatch(name) for name in absent):
            raise PlanError(
                f"expected {section} keys that match names of the module, got {key!r}; nearest names: "
                f"{_nearest(key, known)}"
            )
        for name in names:
            if name in found and found[name] != entry:
                raise PlanError(
                    f"{section} keys {source[name]!r} and {key!r} both match {name!r} with different placements: "
                    f"{found[name]!r} and {entry!r}; make one of them narrower"
                )
            found[name], source[name] = entry, key
    return found


def _nearest(key: str, names: list[str], count: int = 3) -> str:
    plain = key.replace("\\.", ".").replace("\\d+", "0").replace("\\", "")
    close = difflib.get_close_matches(plain, names, n=count, cutoff=0.0)
    return ", ".join(repr(name) for name in close) or "(the module has none)"
