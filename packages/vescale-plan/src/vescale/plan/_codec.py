"""Convert frozen dataclasses to JSON and back, with tuples as tuples and nested dataclasses as their classes.

An unknown field is refused with the nearest field name, so a plan never changes its meaning between releases.
"""

import dataclasses
import difflib
import typing
from types import NoneType, UnionType
from typing import Any, TypeVar, cast

T = TypeVar("T")


def to_data(value: Any) -> Any:
    """Return ``value`` as dicts, lists and JSON scalars."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    return value


def from_data(cls: type[T], data: Any, *, where: str) -> T:
    """Build dataclass ``cls`` from `to_data`'s output.

    Raises:
        ValueError: ``data`` is not an object, has an unknown field or lacks a required one; the text begins with
            ``where``.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with the fields of {cls.__name__}, got {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    for name in data:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(fields)}"
            raise ValueError(f"{where}: expected a field of {cls.__name__}, got {name!r}; {hint}")
    missing = [
        name
        for name, field in fields.items()
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: expected field {missing[0]!r} of {cls.__name__}, got none; add it")
    types = typing.get_type_hints(cls)
    return cls(**{name: _value(types[name], item, where=f"{where}.{name}") for name, item in data.items()})


def _value(annotation: Any, item: Any, *, where: str) -> Any:
    """Convert lists and objects by the annotation; the class itself checks scalars."""
    if typing.get_origin(annotation) in (UnionType, typing.Union):
        members = [member for member in typing.get_args(annotation) if member is not NoneType]
        nested = [
            member for member in members if dataclasses.is_dataclass(member) or typing.get_origin(member) is tuple
        ]
        annotation = nested[0] if nested and isinstance(item, dict | list) else None
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return from_data(annotation, item, where=where)
    if isinstance(item, list):
        inner = (typing.get_args(annotation) or (None,))[0]
        return tuple(_value(inner, element, where=f"{where}[{index}]") for index, element in enumerate(item))
    return item
