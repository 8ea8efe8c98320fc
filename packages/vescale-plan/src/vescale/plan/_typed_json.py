"""Read JSON into typed values: the one way in which the packages read JSON.

A type declares what is expected, so a text reads to a value of that type or raises the caller's error. Nothing else is
raised, whatever the text is. The error names the place in the tree:

    @dataclass(frozen=True)
    class Stage:
        modules: tuple[str, ...]
        num_bytes: Size = 0

    reader = JsonReader(where="pipeline.json", fix="pass the text of to_json()")
    reader.read(reader.parse('{"stages": [{"modules": ["a", 3]}]}'), Pipeline)
    ValueError: pipeline.json: expected a string at stages[0].modules[1], got 3; pass the text of to_json()

| type | reads |
|---|---|
| ``bool``, ``str``, ``None`` | the same |
| ``int`` | an integer of 64 bits; no bool and no float |
| ``Annotated[int, AtLeast(n)]`` | an integer of 64 bits, >= n |
| ``Annotated[T, ...]`` | a ``T``; what else is said of it is checked by its dataclass |
| ``float`` | a finite number |
| ``Literal[...]`` | one of the values, of the same type |
| ``tuple[T, ...]``, ``Sequence[T]`` | a list, as a tuple |
| ``Mapping[str, T]`` | an object with any keys |
| a dataclass | an object with a key per field; a field with a default may be absent |
| ``A | B`` | the first member that fits |
| ``Any`` | any JSON value, ``NaN`` and ``Infinity`` included |

The packages that read JSON do not import each other, so each has a copy of this file. A test compares the copies.
"""

import dataclasses
import difflib
import functools
import json
import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, cast

T = TypeVar("T")
_Reader = Callable[[Any], Any]
_MAX_INT = 2**63 - 1


@dataclass(frozen=True)
class AtLeast:
    """The lower bound of an integer."""

    low: int


#: A number of elements or bytes, an index, an offset.
Size = Annotated[int, AtLeast(0)]


class _FaultError(Exception):
    """A value that does not fit its type; ``path`` is filled from the inside out while the error passes."""

    def __init__(self, expected: str, got: str, *, fix: str = "", text: str = "") -> None:
        super().__init__(expected)
        self.expected, self.got, self.fix, self.text = expected, got, fix, text
        self.path: list[str | int] = []

    def describe(self, where: str, fix: str) -> str:
        place = "".join(map(_step, reversed(self.path))).removeprefix(".")
        at = f" at {place}" if place else ""
        if self.text:
            return f"{where}: {self.text}{at}"
        return f"{where}: expected {self.expected}{at}, got {self.got}; {self.fix or fix}"


@dataclass(frozen=True)
class JsonReader:
    """Reads one JSON text, and says in its errors what that text is.

    Attributes:
        where: what is read, such as a path; begins the error.
        fix: what the user can do, at the end of the error.
        error: the class of the error.
    """

    where: str
    fix: str
    error: type[ValueError] = ValueError

    def parse(self, text: str) -> Any:
        """Return the tree of a JSON text; it is an error if a key occurs twice in one object.

        Raises:
            ValueError: ``error``, if the text is not JSON.
        """
        if not isinstance(text, str):
            raise self.error(f"{self.where}: expected JSON text, got {type(text).__name__}; {self.fix}")
        try:
            return json.loads(text, object_pairs_hook=_object)
        except (ValueError, RecursionError) as fault:
            raise self.error(f"{self.where}: expected JSON, got other text ({fault}); {self.fix}") from None

    def read(self, tree: Any, kind: type[T]) -> T:
        """Return the value of a tree by its type, usually a dataclass.

        Raises:
            ValueError: ``error``, if the tree does not fit the type.
        """
        return cast(T, self._run(_reader(cast(Any, kind)), tree))

    def expect(self, tree: Any, key: str, value: object, *, fix: str = "") -> None:
        """Raise ``error`` unless ``tree`` is an object with this value of a key: a format, or its version."""
        self._run(functools.partial(_read_key, key, value, fix), tree)

    def _run(self, read: _Reader, tree: Any) -> Any:
        try:
            return read(tree)
        except _FaultError as fault:
            raise self.error(fault.describe(self.where, self.fix)) from None
        except RecursionError:
            raise self.error(f"{self.where}: expected fewer levels of lists and objects; {self.fix}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


def _step(key: str | int) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def _show(value: Any) -> str:
    return f"an object with {len(value)} keys" if isinstance(value, dict) else reprlib.repr(value)


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Return the function that reads values of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin is Annotated:
        is_bounded = isinstance(arguments[1], AtLeast)
        return functools.partial(_read_int, low=arguments[1].low) if is_bounded else _reader(arguments[0])
    if origin is Literal:
        return functools.partial(_read_literal, arguments)
    if origin in (UnionType, typing.Union):
        return functools.partial(_read_union, [_reader(member) for member in arguments])
    if origin in (tuple, Sequence):
        return functools.partial(_read_list, _reader(arguments[0]))
    if origin is Mapping:
        return functools.partial(_read_mapping, _reader(arguments[1]))
    return functools.partial(_read_object, kind, *_fields(kind))


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _FaultError("true or false", _show(value))
    return value


def _read_int(value: Any, low: int = -_MAX_INT - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _FaultError("an integer", _show(value))
    if not low <= value <= _MAX_INT:
        raise _FaultError(f"an integer from {low} to {_MAX_INT}", _show(value))
    return value


def _read_float(value: Any) -> float:
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, float) or not isinstance(value, int) or isinstance(value, bool):
        raise _FaultError("a finite number", _show(value))
    return float(_read_int(value))


def _read_string(value: Any) -> str:
    if not isinstance(value, str):
        raise _FaultError("a string", _show(value))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _FaultError("a string without lone surrogates", _show(value)) from None
    return value


def _read_none(value: Any) -> None:
    if value is not None:
        raise _FaultError("null", _show(value))


_SCALARS: dict[Any, _Reader] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_string,
    NoneType: _read_none,
}


def _read_literal(choices: tuple[Any, ...], value: Any) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _FaultError(" or ".join(map(repr, choices)), _show(value))
    return value


def _read_key(key: str, value: object, fix: str, tree: Any) -> None:
    if not isinstance(tree, dict):
        raise _FaultError(f"an object with {key!r}: {value!r}", _show(tree), fix=fix)
    try:
        _read_part(functools.partial(_read_literal, (value,)), key, tree.get(key))
    except _FaultError as fault:
        fault.fix = fix
        raise


def _read_union(readers: Iterable[_Reader], value: Any) -> Any:
    faults = []
    for reader in readers:
        try:
            return reader(value)
        except _FaultError as fault:
            faults.append(fault)
    last = max(faults, key=lambda fault: [key if isinstance(key, int) else 0 for key in reversed(fault.path)])
    if last.path or last.text:
        raise last  # the member that fits the longest part of the value
    raise _FaultError(" or ".join(dict.fromkeys(fault.expected for fault in faults)), _show(value))


def _read_list(reader: _Reader, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _FaultError("a list", _show(value))
    return tuple(_read_part(reader, index, item) for index, item in enumerate(value))


def _read_mapping(reader: _Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _FaultError("an object", _show(value))
    return {_read_string(key): _read_part(reader, key, item) for key, item in value.items()}


def _read_object(kind: Any, fields: Mapping[str, dataclasses.Field], readers: Mapping[str, _Reader], value: Any) -> Any:
    if not isinstance(value, dict):
        raise _FaultError(f"an object with the keys {', '.join(fields)}", _show(value))
    for name in value:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise _FaultError(
                f"one of the keys {', '.join(fields)}",
                repr(name),
                fix=f"did you mean {near[0]!r}?" if near else "remove it",
            )
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise _FaultError(f"the key {name!r}", "no such key", fix="add it")
    found = {name: _read_part(readers[name], name, item) for name, item in value.items()}
    try:
        return kind(**found)
    except ValueError as error:
        raise _FaultError("", "", text=str(error)) from None


def _read_part(reader: _Reader, key: str | int, value: Any) -> Any:
    try:
        return reader(value)
    except _FaultError as fault:
        fault.path.append(key)
        raise


def _fields(kind: Any) -> tuple[dict[str, dataclasses.Field], dict[str, _Reader]]:
    types = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    return fields, {name: _reader(types[name]) for name in fields}
