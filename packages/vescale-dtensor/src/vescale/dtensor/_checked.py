"""Check arguments of public functions by their annotations, so that a wrong one is named where the user gave it.

    @checked("cluster", "constraints")
    def generate_plan(model, cluster: Cluster, constraints: Constraints): ...

    generate_plan(model, None, run)
    TypeError: generate_plan: expected Cluster for cluster, got None; pass such a value

Without it, the call would end in an AttributeError somewhere inside. Elements of containers are not checked. A string
is no list of strings, and True is no number.

The packages that do not import each other have a copy of this file. A test compares the copies.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["checked"]

Function = TypeVar("Function", bound=Callable[..., Any])
_LISTS = (collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)


def checked(*names: str) -> Callable[[Function], Function]:
    """Return a decorator that checks the arguments ``names`` of a function or constructor by their annotations.

    Raises:
        TypeError: in a call, if an argument does not fit; before anything else happens.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        what = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # Python's own error says which function and what it takes
            hints = _hints(function)
            for name in names:
                if name in given and not _fits(given[name], hints[name]):
                    expected, got = _text(hints[name]), reprlib.repr(given[name])
                    raise TypeError(f"{what}: expected {expected} for {name}, got {got}; pass such a value")
            return function(*args, **kwargs)

        return typing.cast(Function, call)

    return decorate


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is type:
        return isinstance(value, type)
    if origin is collections.abc.Callable:
        return callable(value)
    kind = origin or kind
    if kind in _LISTS and isinstance(value, str | bytes):
        return False
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _text(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(map(_text, typing.get_args(kind)))
    return "None" if kind is types.NoneType else getattr(typing.get_origin(kind) or kind, "__name__", str(kind))
