"""What code outside of units reads other than its arguments and attributes of modules: variables.

While a tape is taken down, the profiler of Python tells of every function that runs outside of units. Its code names
the global variables that it uses, and its closure holds others. From then on their values are known to be as they were,
or not::

    WEIGHT = 0.5

    def loss_fn(output):                     reads  WEIGHT, and config.scale
        return output.mean() * WEIGHT * config.scale

Of an object the attributes count that the code names; of a list, a tuple or a dict the elements.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import nn

from .._stages.attributes import PLAIN

_DEPTH = 3  # of objects within objects
_OTHERS = ("torch", "vescale")  # packages whose code is no one's program, and Python's own library:
_PYTHON, *_INSTALLED = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
_MISSING = object()


@dataclass(frozen=True)
class _Binding:
    """A name, or a place in a container, and the value that it had.

    Attributes:
        label: for messages.
        get: returns the present value, given the key and a default, as the method of a dict does.
        key: the name.
        value: what it had.
    """

    label: str
    get: Callable[[Any, Any], Any]
    key: Any
    value: Any

    def holds(self) -> bool:
        """Return whether the value is what it was."""
        value = self.get(self.key, _MISSING)
        if value is self.value:
            return True
        return type(value) is type(self.value) and isinstance(value, PLAIN) and value == self.value


class Sources:
    """The variables that functions read. Collects them in ``watching``, but not between ``pause`` and ``resume``.

    Attributes:
        changed: a variable that had another value when it was looked at again; None if there is none.
    """

    def __init__(self) -> None:
        self.changed: str | None = None
        self._is_on = self._collects_garbage = False
        self._seen: set[tuple[CodeType, int]] = set()
        self._inner: set[CodeType] = set()  # of functions that are made in each forward
        self._bindings: dict[tuple[int, Any], _Binding] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Collect what functions read that are called in this context. No other profiler may run."""
        self._is_on = True
        self.resume()
        try:
            yield
        finally:
            self.pause()
            self._is_on = False
            self._inner.clear()

    def pause(self) -> None:
        """Collect nothing until ``resume``, and look for changes."""
        if self._is_on:
            sys.setprofile(None)
            if self._collects_garbage:
                gc.enable()
            self.look()

    def resume(self) -> None:
        """Go on after ``pause``. No garbage is collected until the next: the code does not call what that calls."""
        if self._is_on:
            self._collects_garbage = gc.isenabled()
            gc.disable()
            sys.setprofile(self._on_event)

    def look(self) -> bool:
        """Return whether all variables have the values that they had when they were found."""
        if self.changed is None:
            self.changed = next((each.label for each in self._bindings.values() if not each.holds()), None)
        return self.changed is None

    def _on_event(self, frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            self._note(frame.f_code, frame.f_globals)

    def _note(self, code: CodeType, variables: dict[str, Any]) -> None:
        key = (code, id(variables))
        if key in self._seen:
            return
        self._seen.add(key)
        if _is_of_others(variables.get("__name__")) or _is_of_python(code):
            return
        names = frozenset(code.co_names)
        for name in names & variables.keys():
            self._bind(name, variables, variables.get, name, names)
        self._inner.update(each for each in code.co_consts if isinstance(each, CodeType))
        if code.co_freevars and code not in self._inner:
            functions = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType) and f.__code__ is code]
            for function in functions:
                for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                    self._bind(name, cell, functools.partial(_attribute, cell), "cell_contents", names)

    def _bind(
        self, label: str, holder: Any, get: Callable[[Any, Any], Any], key: Any, names: frozenset[str], depth: int = 0
    ) -> None:
        """Keep a value, and what code that uses these names can read of it."""
        value = get(key, _MISSING)
        place = (id(holder), key)
        if place not in self._bindings:
            self._bindings[place] = _Binding(label, get, key, value)
        if depth == _DEPTH or isinstance(value, (*PLAIN, torch.Tensor, nn.Module, FunctionType)):
            return
        if _is_of_others(getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", "")):
            return
        bind = functools.partial(self._bind, label, value, names=names, depth=depth + 1)
        if isinstance(value, dict):
            self._bind_size(label, value)
            for each in list(dict.keys(value)):
                bind(functools.partial(dict.get, value), each)
        elif isinstance(value, list | tuple):
            self._bind_size(label, value)
            for index in range(len(value)):
                bind(functools.partial(_item, value), index)
        elif isinstance(value, set | frozenset) or value is os.environ:
            as_it_was = dict(value) if value is os.environ else set(value)
            self._bindings[id(value), None] = _Binding(label, lambda _, __: value == as_it_was, None, True)
        else:
            attributes = getattr(value, "__dict__", {})
            for name in names & attributes.keys():
                bind(attributes.get, name)
            for name in names:
                if isinstance(getattr(type(value), name, None), MemberDescriptorType):  # of __slots__
                    bind(functools.partial(_attribute, value), name)

    def _bind_size(self, label: str, value: Any) -> None:
        self._bindings[id(value), "__len__"] = _Binding(label, lambda _, __: len(value), "__len__", len(value))


def _is_of_others(name: Any) -> bool:
    return str(name).partition(".")[0] in _OTHERS


def _is_of_python(code: CodeType) -> bool:
    """Return whether it is code of Python's library, whose variables change as threads come and go."""
    path = code.co_filename
    return path.startswith(_PYTHON) and not path.startswith(tuple(_INSTALLED))


def _attribute(value: Any, name: str, default: Any) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):  # an empty slot, an empty cell
        return default


def _item(value: Any, index: int, default: Any) -> Any:
    return value[index] if index < len(value) else default
