"""A flattened state in the form of ``torch.distributed.checkpoint`` (DCP): paths, and values that are no tensors.

The name ``model/embed.weight`` has the path ``("model", "embed.weight")``; indices of lists are integers in paths. DCP
stores each value of a dict under its own key, also inside of lists, so what is one JSON leaf here are several values
there. The groups of an optimizer get the names of their parameters, as in ``get_optimizer_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from .._errors import CheckpointError
from .._state.flat import FlatState, is_stateful

Step = str | int
Path = tuple[Step, ...]


@dataclass(frozen=True)
class Grouped:
    """The names of the parameters in each group of the optimizer at a path."""

    path: tuple[Step, ...]
    groups: tuple[tuple[str, ...], ...]


def paths_of(state: Any, flat: FlatState) -> dict[str, tuple[Path, Any]]:
    """Return the path and the value of every tensor, leaf and object of a state, by name."""
    return {name: (path, node) for name, path, node in _walk(state, "", (), flat)}


def key_of_path(path: Path) -> str:
    """Return the key of a path in a flat state dict of DCP."""
    return ".".join(map(str, path))


def values_of(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values that DCP stores for a leaf, with their paths."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from values_of((*path, str(key)), child)
    elif isinstance(value, list) and _has_dicts(value):
        for index, child in enumerate(value):
            yield from values_of((*path, index), child)
    else:
        yield path, _plain(value)


def int_keyed(node: Any, name: str = "") -> Iterator[str]:
    """Yield the names of the dicts of a state that have integers as keys, as those of schedulers."""
    if isinstance(node, dict) and node and all(type(key) is int for key in node):
        yield name
    elif isinstance(node, dict | list | tuple):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from int_keyed(child, f"{name}/{key}" if name else str(key))
    elif is_stateful(node) and not isinstance(node, torch.nn.Module | torch.optim.Optimizer):
        yield from int_keyed(node.state_dict(), name)


def merge_groups(ranks: Sequence[Sequence[Grouped]]) -> dict[Path, list[list[str]]]:
    """Return the parameters of each group, of all ranks together: stages of a pipeline have some of them each.

    Raises:
        CheckpointError: an optimizer has another number of groups on another rank.
    """
    found: dict[Path, list[dict[str, None]]] = {}
    for own in ranks:
        for each in own:
            known = found.setdefault(each.path, [{} for _ in each.groups])
            if len(known) != len(each.groups):
                raise CheckpointError(
                    f"optimizer {key_of_path(each.path)!r}: expected equal numbers of groups on all ranks, got "
                    f"{len(known)} and {len(each.groups)}; build it with the same groups"
                )
            for names, more in zip(known, each.groups, strict=True):
                names.update(dict.fromkeys(more))
    return {path: [list(names) for names in groups] for path, groups in found.items()}


def _walk(node: Any, name: str, path: Path, flat: FlatState) -> Iterator[tuple[str, Path, Any]]:
    if name in flat.tensors or name in flat.leaves:
        yield name, path, node
        return
    if name in flat.opened:
        yield name, path, node
        node = flat.opened[name]
    if isinstance(node, dict | list | tuple):
        for step, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _walk(child, f"{name}/{step}" if name else str(step), (*path, step), flat)


def _has_dicts(values: list) -> bool:
    return any(isinstance(value, Mapping) or (isinstance(value, list) and _has_dicts(value)) for value in values)


def _plain(value: Any) -> Any:
    """Return a value without scalars of numpy, which ``torch.load(weights_only=True)`` refuses."""
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
