"""From regular expressions to names: which parameter, boundary and expert module a plan means.

Pure: looks at names and shapes, never at values, and communicates nothing, so that every mistake is reported before the
first collective, alike on every rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from ._placements import check_dims, normalize
from .errors import PlanError

__all__ = ["ResolvedPlan", "resolve"]

SECTIONS = ("parameter", "forward", "expert")

# what a stub for modules of another pipeline stage carries: the names that it replaced, relative to its own
STUB_MARK = "absent_fqns"


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan whose keys are fully qualified names of this module.

    Attributes:
        tensors: placements, one per mesh axis, of every parameter and of the buffers that the plan names.
        inputs: module name -> what the plan says of its inputs, as written.
        outputs: module name -> what the plan says of its outputs, as written.
        experts: module name -> placements of its expert dim.
    """

    tensors: dict[str, tuple[Placement, ...]] = field(default_factory=dict)
    inputs: dict[str, object] = field(default_factory=dict)
    outputs: dict[str, object] = field(default_factory=dict)
    experts: dict[str, tuple[Placement, ...]] = field(default_factory=dict)


def resolve(module: nn.Module, axes: Mapping[str, int], plan: Mapping[str, Mapping[str, object]]) -> ResolvedPlan:
    """Match every key of ``plan`` against the names in ``module``, for a mesh of ``axes`` (name -> size, in mesh order).

    Names of parts that live on other pipeline stages (listed in ``absent_fqns`` of the stub that took their place) count
    as known, so that one plan serves all stages.

    Raises:
        PlanError: unknown section, key that matches nothing (with the nearest names), two keys that disagree about one
            tensor or boundary, axis or dim that does not exist.
    """
    unknown = [section for section in plan if section not in SECTIONS]
    if unknown:
        raise PlanError(f"unknown section {unknown[0]!r} in the plan; sections are {', '.join(SECTIONS)}")
    absent = _absent_names(module)
    modules = {n: m for n, m in module.named_modules(remove_duplicate=False) if not hasattr(m, STUB_MARK)}
    shapes = {name: tuple(t.shape) for name, t in module.named_parameters(remove_duplicate=False)}
    buffers = {name: tuple(t.shape) for name, t in module.named_buffers(remove_duplicate=False)}

    experts = {
        name: normalize(spec, list(axes), f"expert {name!r}")
        for name, spec in _match("expert", plan.get("expert", {}), modules, absent).items()
    }
    named = _match("parameter", plan.get("parameter", {}), {**shapes, **buffers}, absent)
    tensors = {name: normalize(spec, list(axes), f"parameter {name!r}") for name, spec in named.items()}
    for name in shapes:
        tensors.setdefault(name, tuple(Replicate() for _ in axes))
    for owner, placements in experts.items():
        tensors.update(_expert_tensors(owner, modules[owner], placements, list(axes.values())))
    for name, placements in tensors.items():
        check_dims(placements, {**buffers, **shapes}[name], f"parameter {name!r}")

    sides = {}
    for side in ("input", "output"):
        known = {_join(name, side): name for name in modules}
        absent_sides = {_join(name, side) for name in absent}
        keys = {key: spec for key, spec in plan.get("forward", {}).items() if key.endswith(side)}
        sides[side] = {known[k]: spec for k, spec in _match("forward", keys, known, absent_sides).items()}
    odd = [key for key in plan.get("forward", {}) if not key.endswith(("input", "output"))]
    if odd:
        raise PlanError(f"forward key {odd[0]!r} must end in '.input' or '.output'")
    return ResolvedPlan(tensors, sides["input"], sides["output"], experts)


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _absent_names(module: nn.Module) -> set[str]:
    """Return the names that exist on other pipeline stages."""
    names = set()
    for owner, part in module.named_modules():
        for name in getattr(part, STUB_MARK, ()):
            names.add(_join(owner, name) if name else owner)
    return names


def _match(section: str, keys: Mapping[str, object], known: Iterable[str], absent: set[str]) -> dict[str, object]:
    """Return ``{name: spec}`` for every known name that a key matches in full."""
    found: dict[str, object] = {}
    source: dict[str, str] = {}
    known = list(known)
    for key, spec in keys.items():
        pattern = re.compile(key)
        names = [name for name in known if pattern.fullmatch(name)]
        if not names and not any(pattern.fullmatch(name) for name in absent):
            raise PlanError(
                f"{section} key {key!r} matches nothing in the module; nearest names: {_nearest(key, known)}"
            )
        for name in names:
            if name in found and found[name] != spec:
                raise PlanError(
                    f"{section} keys {source[name]!r} and {key!r} both match {name!r} with different placements: "
                    f"{found[name]!r} and {spec!r}; make one of them narrower"
                )
            found[name], source[name] = spec, key
    return found


def _nearest(key: str, names: list[str], count: int = 3) -> str:
    plain = key.replace("\\.", ".").replace("\\d+", "0").replace("\\", "")
    close = difflib.get_close_matches(plain, names, n=count, cutoff=0.0)
    return ", ".join(repr(name) for name in close) or "(the module has none)"


def _expert_tensors(
    owner: str, module: nn.Module, placements: tuple[Placement, ...], sizes: list[int]
) -> dict[str, tuple[Placement, ...]]:
    """Return the placements of the stacked tensors of an experts module and check that they divide."""
    sharded = [axis for axis, p in enumerate(placements) if isinstance(p, Shard)]
    if len(sharded) != 1 or placements[sharded[0]] != Shard(0):
        raise PlanError(f"expert {owner!r}: exactly one axis must hold Shard(0), the expert dim; got {placements}")
    num_experts, ranks = getattr(module, "num_experts", None), sizes[sharded[0]]
    if not isinstance(num_experts, int):
        raise PlanError(
            f"expert {owner!r}: {type(module).__name__} has no attribute num_experts, so it is no stack of experts"
        )
    if num_experts % ranks:
        raise PlanError(
            f"expert {owner!r}: {num_experts} experts do not divide over {ranks} ranks of the axis; "
            f"use a degree that divides {num_experts}"
        )
    tensors = {}
    for name, tensor in module.named_parameters():
        if tensor.ndim == 0 or tensor.shape[0] != num_experts:
            raise PlanError(
                f"expert {owner!r}: parameter {name!r} of shape {tuple(tensor.shape)} has no leading expert dim"
            )
        tensors[_join(owner, name)] = placements
    return tensors
