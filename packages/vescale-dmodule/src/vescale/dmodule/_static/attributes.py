"""Attributes that a module sees only while it runs on local tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

__all__ = ["Swaps", "set_attributes"]

ABSENT = object()


@dataclass
class Swaps:
    """Attributes of modules, with the value inside of a call and the one outside.

    Attributes:
        places: a module's own attributes, the name of one, and the value that it has inside.
        outside: the values outside, while those of the inside are set; else None.
    """

    places: list[tuple[dict[str, object], str, object]] = field(default_factory=list)
    outside: list[object] | None = None

    @classmethod
    def of(
        cls,
        modules: Mapping[str, nn.Module],
        attributes: Mapping[str, Mapping[str, object]],
        forward: Callable[[nn.Module], Callable | None],
    ) -> Swaps:
        """Collect what changes.

        Args:
            modules: name -> module.
            attributes: module name -> dotted attribute -> value inside.
            forward: gives the forward of a module on local tensors, None for its own.
        """
        self = cls()
        for name, module in modules.items():
            for attribute, value in _own_attributes(module, attributes.get(name, {})).items():
                self.places.append((vars(module), attribute, value))
            if (local := forward(module)) is not None:
                self.places.append((vars(module), "forward", local))
        return self

    def put(self) -> None:
        """Set the values of the inside."""
        self.outside = [table.get(name, ABSENT) for table, name, _ in self.places]
        for table, name, value in self.places:
            table[name] = value

    def take_back(self) -> None:
        """Set the values of the outside again; nothing if those of the inside are not set."""
        outside, self.outside = self.outside, None
        for (table, name, _), value in zip(self.places, outside, strict=True) if outside is not None else ():
            if value is ABSENT:
                table.pop(name, None)
            else:
                table[name] = value


def _own_attributes(owner: object, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the first names of dotted paths with their values; an object on the way is copied, others may share it."""
    own: dict[str, object] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            inner = own.setdefault(name, copy.copy(getattr(owner, name)))
            for key, changed in _own_attributes(inner, {rest: value}).items():
                setattr(inner, key, changed)
        else:
            own[name] = value
    return own


def set_attributes(module: nn.Module, changes: Mapping[str, object]) -> None:
    """Change attributes for good, in every mode; objects that other modules share are copied."""
    for name, value in _own_attributes(module, changes).items():
        setattr(module, name, value)
