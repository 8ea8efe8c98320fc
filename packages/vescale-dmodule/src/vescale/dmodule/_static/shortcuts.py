"""Parameters and children of modules as plain attributes, while a program is open.

``nn.Module`` keeps parameters and children in tables that ``self.weight`` reaches only after an ordinary lookup has
failed, in a method written in Python; a layer does that some thirty times in a forward. While a program runs, the same
objects also stand where the ordinary lookup finds them, in the module's ``__dict__``::

    self.weight    ->  vars(self)["weight"]    instead of    AttributeError, __getattr__, _parameters["weight"]

What stands there is read from the tables at every call, so a replaced parameter or child is seen. A module that assigns
one in its forward removes the shortcut by that (``nn.Module.__setattr__``). Names that the class defines, modules that
look up attributes in a way of their own, and parts that see other parameters than the program's have no shortcuts.
"""

from __future__ import annotations

from itertools import repeat
from operator import getitem, setitem
from typing import TYPE_CHECKING

from torch import nn

from .. import _torch
from .names import is_inside

if TYPE_CHECKING:
    from .program import StaticProgram

__all__ = ["Shortcuts"]


class Shortcuts:
    """The shortcuts of the parts of a program.

    Args:
        program: the program, while it is open: what its modules hold themselves then has no shortcut.
    """

    def __init__(self, program: StaticProgram):
        self._owners: list[dict[str, object]] = []
        self._tables: list[dict[str, object]] = []
        self._keys: list[str] = []
        self._is_put = False
        opaque = program.opaque
        for name, module in program.modules.items():
            if not any(is_inside(name, other) for other in opaque) and _looks_up_as_usual(module):
                for table in (_torch.tensor_tables(module)[0], _torch.module_table(module)):
                    self._add(module, table)

    def _add(self, module: nn.Module, table: dict[str, object]) -> None:
        for key in table:
            if key not in vars(module) and not hasattr(type(module), key):
                self._owners.append(vars(module))
                self._tables.append(table)
                self._keys.append(key)

    def put(self) -> None:
        """Set them."""
        self._is_put = True
        try:
            _torch.for_each(setitem, self._owners, self._keys, map(getitem, self._tables, self._keys))
        except KeyError:  # one has been deleted from its module: do without
            self.take_back()
            self._owners, self._tables, self._keys = [], [], []

    def take_back(self) -> None:
        """Remove them; nothing if they are not set."""
        if self._is_put:
            self._is_put = False
            _torch.for_each(dict.pop, self._owners, self._keys, repeat(None))


def _looks_up_as_usual(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.__getattr__ is nn.Module.__getattr__
        and kind.__setattr__ is nn.Module.__setattr__
        and (kind.__getattribute__ is nn.Module.__getattribute__)
    )
