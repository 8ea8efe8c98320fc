"""Patch of a module for the duration of a call: rows of (owner, key, value).

Static programs, local regions and experts change a module while it runs. Every change is one row of one
:class:`ModulePatch`::

    row of                 owner                     key                     value
    a local parameter      module._parameters        "weight"                plain leaf over the same memory
    a local buffer         module._buffers           "running_mean"          plain tensor over the same memory
    a local attribute      vars(module)              "num_heads"             the value of this rank
    a local forward        vars(module)              "forward"               lookup in the rows of this rank
    a direct call          vars(module)              "_compiled_call_impl"   boundary, forward, boundary
    a compiled block       vars(entry)               "run"                   compiled function
    hooks in such a block  vars(module)              "_forward_hooks"        conversions without names
    local experts          vars(module)              "_modules"              the experts of this rank

Guarantee: :meth:`ModulePatch.restore` leaves every key as :meth:`ModulePatch.apply` found it, absent keys included,
also if ``apply`` raised half way. Patches nest: the last one applied is restored first. A patch may be applied again
while it is applied.

Opening a program is the hot path of static mode, so rows are kept as columns and no Python code runs per row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import contains, is_, setitem
from typing import Self

from torch import nn

from .. import _torch

__all__ = ["ModulePatch", "Row", "attribute_rows", "set_attributes"]

ABSENT = object()

Row = tuple[dict[str, object], str, object]
"""Owner, key, and the value while the patch is applied."""


class ModulePatch:
    """Rows that are applied together and restored together.

    Args:
        rows: in order; if two rows have the same owner and key, the last one wins.

    Example:
        >>> owner = {"a": 1}
        >>> with ModulePatch([(owner, "a", 2), (owner, "b", 3)]):
        ...     dict(owner)
        {'a': 2, 'b': 3}
        >>> owner
        {'a': 1}
    """

    def __init__(self, rows: Iterable[Row] = ()):
        rows = list(rows)
        self._owners, self._keys, self._values = ([row[column] for row in rows] for column in range(3))
        self._before: list[list[object]] = []  # one list of values per application

    def __len__(self) -> int:
        return len(self._keys)

    def adds_only(self) -> bool:
        """Return whether no key is present now, so that :meth:`apply` replaces no value."""
        return not any(map(contains, self._owners, self._keys))

    def apply(self) -> None:
        """Set the values and save the previous ones."""
        self._before.append(list(map(dict.get, self._owners, self._keys, repeat(ABSENT))))
        try:
            _torch.for_each(setitem, self._owners, self._keys, self._values)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Set the values that the last :meth:`apply` saved, and remove the keys that it added."""
        before = self._before.pop()
        _torch.for_each(setitem, self._owners, self._keys, before)
        if any(map(is_, before, repeat(ABSENT))):
            for owner, key, value in zip(self._owners, self._keys, before, strict=True):
                if value is ABSENT:
                    owner.pop(key, None)

    def __enter__(self) -> Self:
        self.apply()
        return self

    def __exit__(self, *_error: object) -> None:
        self.restore()


# ------------------------------------------------------------------------------------------------- attributes


def attribute_rows(module: nn.Module, changes: Mapping[str, object]) -> list[Row]:
    """Return the rows that change attributes of a module.

    Args:
        module: the module.
        changes: dotted path from the module -> value while the patch is applied. The objects along a path are copied,
            because other modules may share them.
    """
    return [(vars(module), name, value) for name, value in _own_attributes(module, changes).items()]


def set_attributes(module: nn.Module, changes: Mapping[str, object]) -> None:
    """Change attributes permanently, in every mode; the objects along a path are copied."""
    for name, value in _own_attributes(module, changes).items():
        setattr(module, name, value)


def _own_attributes(owner: object, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the new values of the direct attributes, by the first name of each dotted path."""
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
