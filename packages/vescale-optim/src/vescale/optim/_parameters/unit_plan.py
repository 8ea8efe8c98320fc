"""Units of ZeRO 3: which parameters are unsharded, used and freed together.

A unit is a module whose own parameters, and those of the modules inside of it, lie in flat buffers of their own. By
default every element of the outermost ``nn.ModuleList`` and ``nn.Sequential`` containers is one; the rest is the
**root unit**, unsharded from the beginning of the forward to the end of the backward:

    Model(embed, layers: ModuleList(Block, Block, Block), norm, head)
    units     layers.0    layers.1    layers.2    root: embed, norm, head

A unit inside of another is cut out of it. A parameter that several units use (a tied weight) goes to the root unit.

Everything here is names and integers: no values and no process group.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from .. import _torch
from .._buckets.plan import Bucket, BucketPlan, ParamInfo, plan_buckets

__all__ = ["ROOT", "UnitSpec", "choose_units", "matching_names", "plan_units"]

#: Name of the root unit: that of the module which is wrapped.
ROOT = ""

#: Containers whose elements are units by default, and which are never called or only call their elements.
_LISTS = (nn.ModuleList, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

#: A unit but the root has one bucket per dtype, whatever its size.
_UNBOUNDED = 2**62


@dataclass(frozen=True)
class UnitSpec:
    """A unit: the name of its module, and the names of its parameters in registration order."""

    name: str
    params: tuple[str, ...]

    def __str__(self) -> str:
        return f"unit {self.name or '(root)'}: {', '.join(self.params) or 'nothing'}"


def choose_units(module: nn.Module, units: Iterable[str | re.Pattern] | None = None) -> list[UnitSpec]:
    """Divide a module's parameters into units, in registration order; the root unit comes last.

    Args:
        module: The module that will be wrapped.
        units: Names of modules, or regular expressions that match full names; None for the default. An empty list
            makes the root unit the only one.

    Raises:
        ValueError: If an entry matches no module, or one that is never called.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> print(*choose_units(model), sep="\\n")
        unit 0: 0.weight, 0.bias
        unit 2: 2.weight, 2.bias
        unit (root): nothing
        >>> print(*choose_units(model, ["2"]), sep="\\n")
        unit 2: 2.weight, 2.bias
        unit (root): 0.weight, 0.bias
    """
    names = _default_names(module) if units is None else matching_names(module, units, setting="units")
    owners = _owners(module, names)
    params: dict[str, list[str]] = {name: [] for name in [*names, ROOT]}
    for fqn, param in module.named_parameters():
        users = owners[id(param)]
        params[users.copy().pop() if len(users) == 1 else ROOT].append(fqn)
    return [UnitSpec(name, tuple(fqns)) for name, fqns in params.items() if fqns or name == ROOT]


def _owners(module: nn.Module, names: Sequence[str]) -> dict[int, set[str]]:
    """Return, by id of a parameter, the units whose modules have it: for each place, the innermost unit around."""
    units: dict[int, str] = {}
    for name in names:
        units.setdefault(id(module.get_submodule(name)), name)  # one module may have several names
    owners: dict[int, set[str]] = {}
    visited: set[tuple[int, str]] = set()

    def visit(part: nn.Module, owner: str) -> None:
        owner = units.get(id(part), owner)
        if (id(part), owner) in visited:
            return
        visited.add((id(part), owner))
        for param in _torch.own_parameters(part).values():
            if param is not None:
                owners.setdefault(id(param), set()).add(owner)
        for child in part.children():
            visit(child, owner)

    visit(module, ROOT)
    return owners


def _default_names(module: nn.Module) -> list[str]:
    elements = {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if not isinstance(part, (*_LISTS, *_NEVER_CALLED)) and _is_in_list(module, name)
    }
    inner = {id(part) for element in elements.values() for part in element.modules() if part is not element}
    return [name for name, part in elements.items() if id(part) not in inner]


def _is_in_list(module: nn.Module, name: str) -> bool:
    return name != ROOT and isinstance(module.get_submodule(name.rpartition(".")[0]), _LISTS)


def matching_names(module: nn.Module, patterns: Iterable[str | re.Pattern], *, setting: str) -> list[str]:
    """Return the names of submodules that a setting lists.

    Raises:
        ValueError: A pattern matches none, one that is never called, or is no regular expression.
    """
    modules = {name: part for name, part in module.named_modules(remove_duplicate=False) if name != ROOT}
    chosen: set[str] = set()
    for pattern in patterns:
        found = [pattern] if pattern in modules else _fullmatches(pattern, modules, setting)
        if not found:
            near = difflib.get_close_matches(str(getattr(pattern, "pattern", pattern)), modules, n=3, cutoff=0.3)
            raise ValueError(f"{setting}: {pattern!r} matches no module of {type(module).__name__}; near names: {near}")
        for name in found:
            if isinstance(modules[name], _NEVER_CALLED):
                elements = re.escape(name) + r"\.[^.]+"
                raise ValueError(
                    f"{setting}: {name!r} is a {type(modules[name]).__name__}, which is never called; name its "
                    f"elements, for example {elements!r}"
                )
        chosen.update(found)
    return [name for name in modules if name in chosen]


def _fullmatches(pattern: str | re.Pattern, names: Iterable[str], setting: str) -> list[str]:
    try:
        return [name for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise ValueError(f"{setting}: {pattern!r} is neither a module nor a regular expression: {error}") from None


def plan_units(
    specs: Sequence[UnitSpec], params: Sequence[ParamInfo], *, num_shards: int, bucket_bytes: int, num_pieces: int = 1
) -> tuple[BucketPlan, list[str]]:
    """Lay out parameters in buckets that do not cross units.

    Args:
        specs: All units.
        params: Parameters in registration order; those of ``specs`` that are not in it are left out.
        num_shards: Size of the mesh axis over which buckets are sharded.
        bucket_bytes: Bucket size of the root unit; another unit has one bucket per dtype.
        num_pieces: Number of equal pieces into which the replicas of a shard can cut it.

    Returns:
        The plan, buckets in the order in which backward completes them; and the unit of each bucket, by name.
    """
    position = {param.fqn: index for index, param in enumerate(params)}
    found: list[tuple[Bucket, str]] = []
    for spec in specs:
        own = [params[position[fqn]] for fqn in spec.params if fqn in position]
        size = bucket_bytes if spec.name == ROOT else _UNBOUNDED
        plan = plan_buckets(own, num_shards=num_shards, bucket_bytes=size, num_pieces=num_pieces)
        found += [(bucket, spec.name) for bucket in plan.buckets]
    # Backward goes through the registration order in reverse: a bucket is complete with its first parameter.
    found.sort(key=lambda item: -min(position[slot.fqn] for slot in item[0].slots))
    buckets = tuple(replace(bucket, index=index) for index, (bucket, _) in enumerate(found))
    return BucketPlan(buckets), [unit for _, unit in found]
