"""The tensors of a module, and which names share one: files have such a tensor once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._state.flat import is_tensor
from .._state.objects import held_state

Ties = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModuleState:
    """The state of a module.

    Attributes:
        module: the module.
        state: its state dict.
        tensors: the tensors of it, by name.
    """

    module: Any
    state: dict[str, Any]
    tensors: dict[str, Any]

    @classmethod
    def of(cls, module: Any) -> ModuleState:
        """Return the state of a module; what is no tensor, and extra state, is not exchanged."""
        state = held_state(module)
        tensors = {
            name: value
            for name, value in state.items()
            if is_tensor(value) and name.rpartition(".")[2] != "_extra_state"
        }
        return cls(module, state, tensors)

    def ties(self) -> Ties:
        """Return groups of names that share a tensor: one parameter, or the same memory."""
        groups: dict[tuple, list[str]] = {}
        for name, value in self.module.named_parameters(remove_duplicate=False):
            if name in self.tensors:
                groups.setdefault(("parameter", id(value)), []).append(name)
        for name, value in self.tensors.items():
            if memory := _memory_of(value):
                groups.setdefault(memory, []).append(name)
        return merged_ties([tuple(names) for names in groups.values() if len(names) > 1])

    def put_back(self, replaced: Mapping[str, str]) -> None:
        """Pass the filled state to the module; ``replaced`` has the names that take the value of another one."""
        for name, other in replaced.items():
            if name in self.state and other in self.state:
                self.state[name] = self.state[other]
        self.module.load_state_dict(self.state)


def merged_ties(groups: Iterable[tuple[str, ...]]) -> Ties:
    """Return the groups with names in common as one, in the order of their names."""
    found: list[dict[str, None]] = []
    of: dict[str, dict[str, None]] = {}
    for group in groups:
        known = list({id(of[name]): of[name] for name in group if name in of}.values())
        union: dict[str, None] = {}
        for each in known:
            union |= each
            found.remove(each)
        union |= dict.fromkeys(group)
        found.append(union)
        of |= dict.fromkeys(union, union)
    return tuple(tuple(group) for group in found)


def names_to_drop(ties: Ties, secondary: Collection[str]) -> list[str]:
    """Return all names of groups but one each: the first that is not ``secondary``, if there is one."""
    dropped = []
    for group in ties:
        kept = next((name for name in group if name not in secondary), group[0])
        dropped += [name for name in group if name != kept]
    return dropped


def _memory_of(value: Any) -> tuple | None:
    """Return what is equal for tensors in the same memory; None for one without elements here."""
    if hasattr(value, "__boxes__"):
        views = [view for _, view in value.__boxes__()]
        shape: tuple = tuple(value.__global_shape__)
    else:
        with torch.no_grad():
            views = [value.to_local() if isinstance(value, DTensor) else value]
        shape = tuple(value.shape)
    strided = [view for view in views if view.numel() and view.layout == torch.strided and not view.is_meta]
    places = tuple((view.data_ptr(), view.dtype, tuple(view.shape), view.stride()) for view in strided)
    return (shape, places) if places else None
