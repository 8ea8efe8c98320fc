"""Layers that are alike: a module is derived with a few of each kind, and those that are left out are placed as these.

    layers.0   layers.1   layers.2   layers.3 ... layers.30   layers.31
    kept       kept       kept       left out, as layers.1     kept

The first and the last layer of a kind may have neighbors of their own, such as an embedding or a norm. The second one
stands for those that are left out if the third one is placed as it is; otherwise the whole module is derived.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import nn

from .assemble import Draft
from .graph import Graph

__all__ = ["Shortened", "shorten"]

KEPT = (0, 1, 2, -1)
"""The layers of a kind that are kept; the second one stands for the rest."""

Key = TypeVar("Key", bound=Hashable)
"""A full name, or a boundary: name of a module, side and path."""


@dataclass
class Shortened:
    """A module without some of its layers.

    Attributes:
        module: a copy with the tensors of the module.
        like: name of each layer that is left out -> of the one that stands for it.
        pairs: names of layers that must be placed alike.
    """

    module: nn.Module
    like: dict[str, str] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)

    def stands(self, graph: Graph, draft: Draft) -> bool:
        """Return whether layers that are left out would be placed as those that stand for them.

        The plan places no item of a sequence that may have one for each layer.
        """
        called = {op.boundary.module for op in graph.ops if op.boundary is not None}
        items = [step for _, _, path in draft.boundaries for step in path if isinstance(step, int)]
        return max(items, default=0) < len(KEPT) - 1 and all(
            {one, other} <= called and _entries(draft, one) == _entries(draft, other) for one, other in self.pairs
        )

    def with_all(self, entries: Mapping[Key, object]) -> dict[Key, object]:
        """Return entries by names, or by boundaries, with those of the layers that are left out."""
        found = dict(entries)
        for layer, kept in self.like.items():
            found |= {_renamed(key, kept, layer): value for key, value in entries.items() if _is_in(key, kept)}
        return found

    def names(self, names: Iterable[Key]) -> list[Key]:
        """Return names, or boundaries, with those of the layers that are left out."""
        return list(self.with_all(dict.fromkeys(names)))

    def draft(self, short: Draft) -> Draft:
        """Return the plan of the whole module, without a batch."""
        return replace(
            short,
            parameters=self.with_all(short.parameters),
            boundaries=self.with_all(short.boundaries),
            repeats=self.with_all(short.repeats),
            changes=self.with_all(short.changes),
            experts=self.names(short.experts),
            attributes=self.names(short.attributes),
            eager=self.names(short.eager),
        )

    def reasons(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Return reasons by names, which may name layers, with those of the layers that are left out."""
        found = dict(reasons)
        for layer, kept in self.like.items():
            for name, reason in reasons.items():
                if _is_in(name, kept):
                    found[_renamed(name, kept, layer)] = reason.replace(f"'{kept}.", f"'{layer}.")
        return found

    def total(self, sizes: Mapping[str, int]) -> int:
        """Return the sum of sizes by module, with those of the layers that are left out."""
        return sum(self.with_all(sizes).values())


def shorten(module: nn.Module) -> Shortened | None:
    """Return a module without layers of which there are many; None if it has none."""
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    short = Shortened(module)
    left_out: dict[str, list[str]] = {}  # of each list that is in no other one, as lists of experts are
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or any(name.startswith(f"{owner}.") for owner in left_out):
            continue
        left_out[name] = []
        kinds: dict[Hashable, list[str]] = {}
        for key, kind in _kinds(part, uses).items():
            kinds.setdefault(kind, []).append(key)
        for keys in kinds.values():
            kept = {keys[place] for place in KEPT if place < len(keys)}
            rest = [key for key in keys if key not in kept]
            if rest:
                left_out[name] += rest
                short.like |= dict.fromkeys((f"{name}.{key}" for key in rest), f"{name}.{keys[1]}")
                short.pairs.append((f"{name}.{keys[1]}", f"{name}.{keys[2]}"))
    if not short.like:
        return None
    memo: dict[int, object] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo |= {id(module.get_submodule(layer)): nn.Module() for layer in short.like}
    short.module = copy.deepcopy(module, memo)
    for name, keys in left_out.items():
        for key in keys:
            del short.module.get_submodule(name)._modules[key]
    return short


def _kinds(layers: nn.ModuleList, uses: Mapping[int, int]) -> dict[str, Hashable]:
    """Return the kind of each layer of a list: modules, tensors, and values of attributes, without the layer's place.

    Args:
        layers: the list.
        uses: number of names of each parameter in the whole module, by identity.
    """
    values = {key: _values(layer) for key, layer in layers.named_children()}
    names = {name for each in values.values() for name in each}
    places = {
        name
        for name in names
        if all(type(each.get(name)) is int and each[name] == place for place, each in enumerate(values.values()))
    }
    kinds: dict[str, Hashable] = {}
    for place, (key, layer) in enumerate(layers.named_children()):
        own = Counter(id(tensor) for _, tensor in layer.named_parameters(remove_duplicate=False))
        is_alone = all(count == uses[tensor] for tensor, count in own.items())
        tensors = [(n, tuple(t.shape), t.dtype) for n, t in (*layer.named_parameters(), *layer.named_buffers())]
        known = [(name, value) for name, value in values[key].items() if name not in places]
        kinds[key] = (*tensors, *known, "" if is_alone else place)
    return kinds


def _values(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Return the types of the modules of a layer, and their attributes that are numbers or texts."""
    found: dict[tuple[str, str], object] = {}
    for name, part in layer.named_modules(remove_duplicate=False):
        found[name, ""] = type(part)
        for key, value in vars(part).items():
            if not key.startswith("_") and isinstance(value, bool | int | float | str | None):
                found[name, key] = value
    return found


# ------------------------------------------------------------------------------------------------- names


def _is_in(key: Hashable, layer: str) -> bool:
    name = key if isinstance(key, str) else key[0]
    return name == layer or name.startswith(f"{layer}.")


def _renamed(key: Key, layer: str, other: str) -> Key:
    if isinstance(key, str):
        return other + key[len(layer) :]
    return (other + key[0][len(layer) :], *key[1:])


def _entries(draft: Draft, layer: str) -> list[dict[Hashable, object]]:
    """Return what a plan says of a layer."""
    tables = [draft.parameters, draft.boundaries, draft.repeats, draft.changes]
    tables += [dict.fromkeys(names) for names in (draft.experts, draft.attributes, draft.eager)]
    return [{_renamed(key, layer, ""): table[key] for key in table if _is_in(key, layer)} for table in tables]
