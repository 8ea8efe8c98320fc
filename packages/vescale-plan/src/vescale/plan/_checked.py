"""Check arguments of public functions by their annotations, so that a wrong one is named where the user gave it.

    @checked
    def generate_plan(model, cluster: Cluster, *, degree: Count | None = None): ...

    generate_plan(model, None)
    TypeError: generate_plan: expected Cluster for cluster, got None; pass such a value
    generate_plan(model, cluster, degree=0)
    ValueError: generate_plan: expected an integer of 1 or more for degree, got 0; pass such a value

Without it, the call would end in an AttributeError somewhere inside. A parameter without an annotation is not checked.

| annotation | accepts |
|---|---|
| ``bool`` | True and False alone |
| ``int`` | integers that torch can take, of 64 bits with or without a sign; no bool |
| ``float`` | numbers but NaN; no bool |
| ``Sequence[T]``, ``Mapping[K, T]`` | these, with such elements; no string |
| ``tuple[T, ...]``, ``tuple[T, U]`` | these and lists, with such elements |
| ``Iterable[T]`` | containers with such elements, and iterators, whose elements are not checked |
| ``Annotated[T, Condition(...)]`` | values of ``T`` for which the condition holds |
| ``T | U``, ``Literal[...]``, ``type[T]``, ``Callable``, a class | as they say |
| a protocol | objects with its names if it is ``runtime_checkable``, otherwise everything |
| ``CheckedInside[T]``, and anything else | everything |

The packages that do not import each other have a copy of this file. A test compares the copies.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import math
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

__all__ = [
    "CheckedInside",
    "Condition",
    "Count",
    "FilePath",
    "NonNegative",
    "Size",
    "checked",
    "checked_names",
    "one_of",
]

T = TypeVar("T")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_LISTS = (collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1
_KEY = object()  # in place of the key of a key


@dataclass(frozen=True)
class Condition:
    """What must hold of a value besides its type.

    Attributes:
        text: how an error calls such values.
        holds: whether a value of the type is one.
        names: the values that are names, if these are all; an error gives the nearest.
    """

    text: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()


def one_of(*names: str) -> Condition:
    """Return the condition that a string is one of some names."""
    quoted = [repr(name) for name in names]
    text = " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
    return Condition(text, lambda value: value in names, names)


_INSIDE = Condition("", lambda _value: True)
#: The type of a parameter that the function checks itself: with all ranks together, or in better words.
CheckedInside = Annotated[T, _INSIDE]

#: A number of things, at least one.
Count = Annotated[int, Condition("an integer of 1 or more", lambda value: value >= 1)]
#: A number of things, maybe none.
Size = Annotated[int, Condition("an integer of 0 or more", lambda value: value >= 0)]
#: A finite number, 0 or above.
NonNegative = Annotated[float, Condition("a number of 0 or more", lambda value: 0 <= value < math.inf)]
#: The path of a file or folder.
FilePath = Annotated[str | os.PathLike, Condition("a path that is not empty", lambda value: bool(os.fspath(value)))]


@dataclass(frozen=True)
class _Fault:
    """The innermost value that does not fit: its place in the argument, and what was expected there."""

    place: str
    expected: str
    got: Any
    error: type[Exception] = TypeError
    fix: str = "pass such a value"


def checked(function: Decorated) -> Decorated:
    """Return a function or constructor that checks its arguments by their annotations; of a class, its constructor.

    Raises:
        TypeError: in a call, if an argument is of another type; before anything else happens.
        ValueError: if it is of the type, and does not fulfil the condition.
    """
    if isinstance(function, type):
        type.__setattr__(function, "__init__", _check_calls(vars(function)["__init__"]))
        return function
    return typing.cast(Decorated, _check_calls(function))


def checked_names(cls: type[T]) -> type[T]:
    """Return a class whose constructor checks its values itself, and refuses names of other arguments.

    Raises:
        TypeError: in a call, for an argument by a name that no parameter has.
    """
    construct = vars(cls)["__init__"]
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def call(*args: Any, **kwargs: Any) -> None:
        _refuse_unknown(cls.__name__, signature, kwargs)
        construct(*args, **kwargs)

    type.__setattr__(cls, "__init__", call)
    return cls


def _check_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    what = function.__qualname__.removesuffix(".__init__").removeprefix("_")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            _refuse_unknown(what, signature, kwargs)
            return function(*args, **kwargs)  # Python's own error says which function and what it takes
        for name, kind in _kinds(function).items():
            if name in given and (fault := _fault(given[name], kind)) is not None:
                got = reprlib.repr(fault.got)
                raise fault.error(f"{what}: expected {fault.expected} for {name}{fault.place}, got {got}; {fault.fix}")
        return function(*args, **kwargs)

    return call


def _refuse_unknown(what: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Raise `TypeError` for an argument by a name that no parameter has, with the nearest or with all of them."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    known = [name for name in signature.parameters if name != "self"]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"leave it out, or use one of {', '.join(known)}"
            raise TypeError(f"{what}: expected the name of an argument, got {name!r}; {fix}")


@functools.cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of the parameters; that of ``*names: str`` is a sequence of strings."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hints and _INSIDE not in typing.get_args(hints[name]):
            hint = hints[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                hint = types.GenericAlias(tuple, (hint, ...))
            elif parameter.kind is parameter.VAR_KEYWORD:
                hint = types.GenericAlias(dict, (str, hint))
            found[name] = hint
    return found


@functools.cache
def _parts(kind: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a type, the class of which it is an alias, and its arguments; of a type variable those of its bound."""
    kind = (kind.__bound__ or Any) if isinstance(kind, TypeVar) else kind
    return kind, typing.get_origin(kind), typing.get_args(kind)


def _fault(value: Any, kind: Any) -> _Fault | None:
    """Return what is wrong with a value of an annotated type, or None."""
    if type(value) is kind and (kind in (bool, str) or (kind is int and _MIN_INT <= value <= _MAX_INT)):
        return None  # most values, without the rest
    kind, origin, arguments = _parts(kind)
    if origin is Annotated:
        return _fault(value, arguments[0]) or _broken(value, arguments[1:])
    if origin in (typing.Union, types.UnionType):
        faults = [_fault(value, member) for member in arguments]
        if None in faults:
            return None
        inner = [fault for fault in faults if fault is not None and (fault.place or fault.error is ValueError)]
        return inner[0] if inner else _Fault("", _text(kind), value)
    if not _is_instance(value, kind, origin, arguments):
        is_other = origin is Literal and any(type(value) is type(choice) for choice in arguments)
        error = ValueError if is_other else TypeError
        return _Fault("", _text(kind), value, error, _fix(value, arguments))
    if kind in (int, float) and not _is_in_range(value, kind):
        return _Fault("", "an integer of 64 bits" if kind is int else "a number", value, ValueError)
    for key, element, inner_kind in _elements(value, origin, arguments):
        if (fault := _fault(element, inner_kind)) is not None:
            place = " (a key)" if key is _KEY else f"[{key!r}]"
            return _Fault(place + fault.place, fault.expected, fault.got, fault.error, fault.fix)
    return None


def _broken(value: Any, conditions: tuple[Any, ...]) -> _Fault | None:
    for condition in conditions:
        if isinstance(condition, Condition) and not condition.holds(value):
            return _Fault("", condition.text, value, ValueError, _fix(value, condition.names))
    return None


def _fix(value: Any, names: tuple[Any, ...]) -> str:
    known = [name for name in names if isinstance(name, str)]
    near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
    return f"did you mean {near[0]!r}?" if near else "pass such a value"


def _is_instance(value: Any, kind: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is type:
        return isinstance(value, type) and _is_subclass(value, arguments[0])
    if origin is collections.abc.Callable:
        return callable(value)
    kind = origin or kind
    if kind in _LISTS and isinstance(value, str | bytes):
        return False
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if kind is tuple:
        return isinstance(value, list | tuple) and (len(arguments) == len(value) or not arguments or ... in arguments)
    try:
        is_class = isinstance(value, type) and getattr(kind, "_is_protocol", False)
        return isinstance(value, kind) and not is_class if isinstance(kind, type) else True
    except TypeError:  # a protocol that cannot be checked
        return True


def _is_in_range(value: Any, kind: Any) -> bool:
    if kind is int:
        return bool(_MIN_INT <= value <= _MAX_INT)
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def _is_subclass(value: type, kind: Any) -> bool:
    return not isinstance(kind, type) or issubclass(value, kind)


def _elements(value: Any, origin: Any, arguments: tuple[Any, ...]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the key, the value and the annotated type of each element of a container that can be read again."""
    if isinstance(value, Mapping) and len(arguments) == 2:
        for key, element in value.items():
            yield _KEY, key, arguments[0]
            yield key, element, arguments[1]
    elif origin is tuple and ... not in arguments:
        yield from ((i, element, arguments[i]) for i, element in enumerate(value) if i < len(arguments))
    elif origin in (*_LISTS, tuple, list) and arguments and isinstance(value, collections.abc.Collection):
        yield from ((i, element, arguments[0]) for i, element in enumerate(value))


def _text(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_text, arguments)))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is Annotated:
        return next((c.text for c in arguments[1:] if isinstance(c, Condition)), _text(arguments[0]))
    if origin is tuple and arguments and ... not in arguments:
        return f"tuple of {len(arguments)}"
    return "None" if kind is types.NoneType else getattr(origin or kind, "__name__", str(kind))
