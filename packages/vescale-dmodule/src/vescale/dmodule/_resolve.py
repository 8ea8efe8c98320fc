"""From regular expressions to names: which parameter, boundary and expert module a plan means.

Pure: looks at names, shapes and signatures, never at values, and communicates nothing, so that every mistake is
reported before the first collective, alike on every rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from ._boundary import InputPlan, plan_inputs
from ._experts import check_experts
from ._params import check_ties
from ._placements import MeshAxes, check_entry, normalize, on_shape
from .errors import PlanError

__all__ = ["ResolvedPlan", "resolve"]

SECTIONS = ("parameter", "forward", "expert")
SIDES = ("input", "output")


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan whose keys are fully qualified names of this module.

    Attributes:
        tensors: placements, one per mesh axis, of every parameter and of the buffers that the plan names.
        inputs: module name -> what the plan says of its arguments.
        outputs: module name -> what the plan says of its outputs, as written.
        experts: module name -> placements of its expert dim.
    """

    tensors: dict[str, tuple[Placement, ...]] = field(default_factory=dict)
    inputs: dict[str, InputPlan] = field(default_factory=dict)
    outputs: dict[str, object] = field(default_factory=dict)
    experts: dict[str, tuple[Placement, ...]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield one line per entry, the same on every rank that resolved the same plan."""
        yield from (f"parameter {name}: {placements}" for name, placements in self.tensors.items())
        yield from (f"forward {plan.where}: {plan.arguments}" for plan in self.inputs.values())
        yield from (f"forward {name}.output: {entry}" for name, entry in self.outputs.items())
        yield from (f"expert {name}: {placements}" for name, placements in self.experts.items())


def resolve(module: nn.Module, mesh: MeshAxes, plan: Mapping[str, Mapping[str, object]]) -> ResolvedPlan:
    """Match every key of ``plan`` against the names in ``module``.

    Names of parts that live on other pipeline stages (listed in ``absent_fqns`` of the stub that took their place)
    count as known, so that one plan serves all stages.

    Raises:
        PlanError: unknown section, key that matches nothing (with the nearest names), two keys that disagree about one
            tensor or boundary, axis, dim or argument that does not exist, ties placed in two ways.
    """
    unknown = [section for section in plan if section not in SECTIONS]
    if unknown:
        raise PlanError(f"unknown section {unknown[0]!r} in the plan; sections are {', '.join(SECTIONS)}")
    absent = _absent_names(module)
    modules = {name: part for name, part in module.named_modules(remove_duplicate=False) if name not in absent}

    experts = {}
    for name, entry in _match("expert", plan.get("expert", {}), modules, absent).items():
        experts[name] = normalize(entry, mesh, f"expert {name!r}")
        check_experts(name, modules[name], experts[name], mesh)
    tensors = _resolve_tensors(module, mesh, plan.get("parameter", {}), absent, experts)
    check_ties(module, tensors)
    inputs, outputs = (_resolve_side(side, mesh, plan.get("forward", {}), modules, absent) for side in SIDES)
    inputs = {name: plan_inputs(modules[name], name, entry) for name, entry in inputs.items()}
    return ResolvedPlan(tensors, inputs, outputs, experts)


def _resolve_tensors(
    module: nn.Module,
    mesh: MeshAxes,
    keys: Mapping[str, object],
    absent: set[str],
    experts: Mapping[str, tuple[Placement, ...]],
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
    for owner, placements in experts.items():
        for name in (_join(owner, leaf) for leaf, _ in module.get_submodule(owner).named_parameters()):
            if tensors.setdefault(name, placements) != placements:
                raise PlanError(
                    f"parameter {name!r} is placed as {tensors[name]}, but its experts are placed as {placements}; "
                    "leave it to the expert section"
                )
    replicated = (Replicate(),) * mesh.ndim
    tensors.update({name: replicated for name in parameters if name not in tensors})
    return {name: on_shape(p, known[name].shape, f"parameter {name!r}") for name, p in tensors.items()}


def _resolve_side(
    side: str, mesh: MeshAxes, keys: Mapping[str, object], modules: Mapping[str, nn.Module], absent: set[str]
) -> dict[str, object]:
    """Return ``{module name: entry}`` for the keys that end in ``side``."""
    for key in keys:
        if not key.endswith(SIDES):
            raise PlanError(f"forward key {key!r} must end in '.input' or '.output'")
    names = {_join(name, side): name for name in modules}
    absent_names = {_join(name, side) for name in absent}
    matched = _match("forward", {k: e for k, e in keys.items() if k.endswith(side)}, names, absent_names)
    for boundary, entry in matched.items():
        check_entry(entry, mesh, boundary)
    return {names[boundary]: entry for boundary, entry in matched.items()}


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
            raise PlanError(f"{section} key {key!r} is no regular expression: {error}") from error
        names = [name for name in known if pattern.fullmatch(name)]
        if not names and not any(pattern.fullmatch(name) for name in absent):
            raise PlanError(
                f"{section} key {key!r} matches nothing in the module; nearest names: {_nearest(key, known)}"
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
