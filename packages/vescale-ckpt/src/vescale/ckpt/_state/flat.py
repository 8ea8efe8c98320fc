"""Flatten a nested state to names, and restore it.

    {"model": model, "optimizer": optimizer, "step": 7}

becomes tensors ``model/embed.weight``, ``optimizer/state/embed.weight/exp_avg``, ... and JSON leaves
``optimizer/param_groups``, ``step``. Names are path components joined with "/". The type of a node selects its form:

    tensor, DTensor, value with __boxes__,     a tensor, in boxes (see ``Held``)
      array of numpy
    None, bool, int, float, str, bytes, and    one JSON leaf
      lists, tuples and int-keyed dicts of them
    dict with str keys                         one component per key
    other list or tuple                        one component per index
    object with state_dict, load_state_dict    its ``state_dict()``, taken once
    PerRank                                    a tensor for each rank (``per_rank.py``)

Tensors are live views of the state, and a load writes into them. ``restore`` then sets the loaded JSON leaves and
passes each object's filled state dict to ``load_state_dict``.
"""

import base64
import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor

from .._errors import CheckpointError, format_some
from .._format.boxes import Box
from .._format.dtypes import ITEM_BYTES, dtype_name
from .._format.manifest import Json, TensorMeta
from .._torch import dtensor_box
from .per_rank import PerRank

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ITEMS = "__items__"  # tag of an int-keyed dict in JSON: {"__items__": [[30, 1], [80, 1]]}
_BYTES = "__bytes__"  # tag of bytes in JSON: {"__bytes__": "AAEC"}, by base64


@dataclass(frozen=True)
class Held:
    """A tensor of the state on this rank.

    Attributes:
        meta: dtype and global shape.
        boxes: this rank's boxes with a live view of each; none for an empty shard.
    """

    meta: TensorMeta
    boxes: tuple[tuple[Box, torch.Tensor], ...]


@dataclass
class FlatState:
    """A flattened state.

    Attributes:
        tensors: tensors by name.
        leaves: JSON values by name.
        opened: state dicts of objects, by path.
        own: names of tensors that this rank alone has.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    leaves: dict[str, Json] = field(default_factory=dict)
    opened: dict[str, Any] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)


def flatten(state: Mapping[str, Any], *, open_object: Callable[[Any, str], Any]) -> FlatState:
    """Flatten a state to names.

    Args:
        state: nested dict, see the module's table.
        open_object: takes an object and its path and returns its state dict.

    Raises:
        CheckpointError: a value is not supported, or two paths have one name; the text has the path.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"expected a dict of names to models, optimizers, tensors, ... as state, got "
            f'{type(state).__name__}; pass {{"model": model}}'
        )
    flat = FlatState()
    _read(state, "", flat, open_object)
    return flat


def restore(state: dict[str, Any], flat: FlatState, leaves: Mapping[str, Json], *, close_object: Callable) -> None:
    """Set the loaded JSON leaves of ``state``, and pass every object its filled state dict.

    Args:
        state: the argument of ``flatten``; its own dicts and lists are modified in place.
        flat: the result of ``flatten``, with filled tensors.
        leaves: loaded JSON values by name; absent names keep their values.
        close_object: takes an object, its path and its filled state dict.
    """
    _put(state, "", flat, leaves, close_object, in_place=True)


def is_stateful(node: Any) -> bool:
    """Return whether a value has ``state_dict`` and ``load_state_dict`` methods."""
    return not isinstance(node, type) and all(
        callable(getattr(node, method, None)) for method in ("state_dict", "load_state_dict")
    )


def is_tensor(node: Any) -> bool:
    """Return whether a value of a state dict is a tensor of any kind."""
    return isinstance(node, torch.Tensor) or hasattr(node, "__boxes__")


def find_objects(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, object)`` for every object with a state dict in a nested state."""
    if is_stateful(node):
        yield path, node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from find_objects(child, _join(path, key))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from find_objects(child, _join(path, index))


def to_json(node: Any) -> Json:
    """Return the JSON form of a plain value: tuples as lists, int-keyed dicts and bytes tagged."""
    if isinstance(node, list | tuple):
        return [to_json(item) for item in node]
    if isinstance(node, dict):
        if any(isinstance(key, int) for key in node):
            return {_ITEMS: [[key, to_json(item)] for key, item in node.items()]}
        if list(node) in ([_ITEMS], [_BYTES]):
            raise CheckpointError(f"expected another key than {next(iter(node))!r}, which marks a type; rename it")
        return {key: to_json(item) for key, item in node.items()}
    if isinstance(node, bytes):
        return {_BYTES: base64.b64encode(node).decode()}
    scalar: bool | int | float | str | None = node.item() if isinstance(node, numpy.generic) else node
    return scalar


def from_json(value: Json, *, like: Any) -> Any:
    """Return a plain value from its JSON form, with the tuples and dict classes of ``like``, if any."""
    if isinstance(value, list):
        olds = like if isinstance(like, list | tuple) else ()
        items = [from_json(v, like=olds[i] if i < len(olds) else None) for i, v in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(value, dict) and list(value) == [_BYTES]:
        return _bytes(value[_BYTES])
    if isinstance(value, dict):
        old = like if isinstance(like, dict) else {}
        entries = {key: from_json(item, like=old.get(key)) for key, item in _items(value)}
        return type(like)(entries) if isinstance(like, dict) else entries
    return type(like)(value) if isinstance(like, numpy.generic) and isinstance(value, bool | int | float) else value


def _bytes(text: Json) -> bytes:
    try:
        return base64.b64decode(text, validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"expected base64 under {_BYTES!r}, got {text!r} ({error}); rename this key") from None


def _items(value: dict[str, Json]) -> Iterable[tuple[Any, Any]]:
    """Return the items of a JSON object, or of the int-keyed dict that it stands for."""
    pairs: Any = value[_ITEMS] if list(value) == [_ITEMS] else list(value.items())
    if not isinstance(pairs, list) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise CheckpointError(f"expected a list of [key, value] under {_ITEMS!r}, got {pairs!r}; rename this key")
    if not all(isinstance(key, str | int) for key, _ in pairs):
        raise CheckpointError(f"expected integers as keys under {_ITEMS!r}, got {pairs!r}; use another checkpoint")
    return [(key, item) for key, item in pairs]


def _read(node: Any, path: str, flat: FlatState, open_object: Callable | None) -> None:
    held = _read_tensor(node, path)
    if held is not None:
        _add(flat.tensors, path, held, flat)
    elif _is_leaf(node):
        _add(flat.leaves, path, to_json(node), flat)
    elif isinstance(node, dict | list | tuple):
        for key, child in _children(node, path):
            _read(child, _join(path, key), flat, open_object)
    elif open_object is not None and (is_stateful(node) or isinstance(node, PerRank)):
        flat.opened[path] = open_object(node, path)
        known = set(flat.tensors)
        _read(flat.opened[path], path, flat, None)
        if isinstance(node, PerRank):
            flat.own |= flat.tensors.keys() - known
    else:
        raise CheckpointError(
            f"{path!r}: expected a tensor, an array of numpy, a value with __global_shape__ and __boxes__(), bytes, a "
            f"JSON value, or an object with state_dict() and load_state_dict(), got {type(node)}; convert it, "
            "or leave it out of the state"
        )


def _read_tensor(node: Any, path: str) -> Held | None:
    """Return a tensor-like node with its boxes, or None for any other node."""
    if hasattr(node, "__boxes__"):
        shape = tuple(node.__global_shape__)
        views = [(Box(tuple(offsets), tuple(view.shape)), view) for offsets, view in node.__boxes__()]
        dtype = getattr(node, "dtype", None) or (views[0][1].dtype if views else None)
    elif isinstance(node, DTensor):
        try:
            found = dtensor_box(node)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {path!r}: {error}") from error
        shape, dtype, views = tuple(node.shape), node.dtype, [found] if found else []
    elif isinstance(node, numpy.ndarray):
        view = _view_of(node, path)
        shape, dtype, views = tuple(view.shape), view.dtype, [(Box.full(view.shape), view)]
    elif isinstance(node, torch.Tensor):
        if type(node) not in _PLAIN_TENSORS or node.layout != torch.strided:
            raise CheckpointError(
                f"tensor {path!r}: expected a plain strided tensor, a DTensor, or a value with __global_shape__ and "
                f"__boxes__(), got {type(node).__name__} with layout {node.layout}; convert it first"
            )
        shape, dtype, views = tuple(node.shape), node.dtype, [(Box.full(node.shape), node)]
    else:
        return None
    views = [(box, view) for box, view in views if box.num_elements]
    _check_views(path, dtype, views)
    return Held(TensorMeta("" if dtype is None else dtype_name(dtype), shape), tuple(views))


def _view_of(array: numpy.ndarray, path: str) -> torch.Tensor:
    """Return a tensor that shares an array's memory, so that a load fills the array."""
    try:
        if not array.flags.writeable:
            raise ValueError("one that may not be written")
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"array {path!r}: expected an array that a tensor can share, got dtype {array.dtype} and {error}; pass a "
            "copy of numbers"
        ) from None


def _check_views(path: str, dtype: torch.dtype | None, views: list[tuple[Box, torch.Tensor]]) -> None:
    if dtype is not None and dtype_name(dtype) not in ITEM_BYTES:
        raise CheckpointError(
            f"tensor {path!r}: expected a dtype of {', '.join(ITEM_BYTES)}, got {dtype}; cast it first"
        )
    if len({box for box, _ in views}) != len(views):
        raise CheckpointError(
            f"tensor {path!r}: expected distinct boxes on a rank, got one box twice; return it once from __boxes__()"
        )
    for box, view in views:
        if view.dtype != dtype:
            raise CheckpointError(
                f"tensor {path!r}: expected dtype {dtype} in box {box}, got {view.dtype}; return views of one dtype"
            )
        if view.is_meta:
            raise CheckpointError(f"tensor {path!r}: expected values, got the meta device; materialize it first")


def _add(table: dict[str, Any], path: str, value: Any, flat: FlatState) -> None:
    if path in flat.tensors or path in flat.leaves:
        raise CheckpointError(f"expected distinct names, got {path!r} twice: a key contains '/'; rename it")
    table[path] = value


def _children(node: dict | list | tuple, path: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(node, dict):
        yield from enumerate(node)
        return
    odd = [key for key in node if not isinstance(key, str)]
    if odd:
        raise CheckpointError(
            f"{path!r}: expected str keys, got {format_some(map(repr, odd))}; for the state dict of an optimizer, put "
            "the optimizer itself into the state, next to its model"
        )
    yield from node.items()


def _is_leaf(node: Any) -> bool:
    """Return whether a node is one JSON leaf; each value of a dict with str keys is its own leaf."""
    if isinstance(node, dict):
        return bool(node) and all(type(key) is int for key in node) and all(map(_is_plain, node.values()))
    return _is_plain(node)


def _is_plain(node: Any) -> bool:
    if isinstance(node, list | tuple):
        return all(map(_is_plain, node))
    if isinstance(node, dict):
        same_kind = all(isinstance(key, str) for key in node) or all(type(key) is int for key in node)
        return same_kind and all(map(_is_plain, node.values()))
    if isinstance(node, numpy.generic):
        return isinstance(node.item(), bool | int | float | str)
    return node is None or isinstance(node, bool | int | float | str | bytes)


def _put(
    node: Any, path: str, flat: FlatState, leaves: Mapping[str, Json], close_object: Callable, *, in_place: bool
) -> Any:
    """Return ``node`` with loaded leaves; the user's own containers are modified in place, state dicts are copied."""
    if path in flat.leaves:
        return from_json(leaves[path], like=node) if path in leaves else node
    if path in flat.opened and in_place:
        close_object(node, path, _put(flat.opened[path], path, flat, leaves, close_object, in_place=False))
        return node
    if path in flat.tensors or not isinstance(node, dict | list | tuple):
        return node
    filled = {key: _put(child, _join(path, key), flat, leaves, close_object, in_place=in_place)
              for key, child in _children(node, path)}  # fmt: skip
    if isinstance(node, tuple):
        return type(node)(filled.values()) if type(node) is tuple else type(node)(*filled.values())
    # copy.copy keeps attributes: nn.Module.load_state_dict reads ``_metadata`` of the dict.
    result = node if in_place else copy.copy(node)
    for key, child in filled.items():
        result[key] = child
    return result


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def leaves_as_text(leaves: Mapping[str, Json]) -> dict[str, str]:
    """Return JSON leaves as text, in which ``nan`` equals itself."""
    return {name: json.dumps(value, sort_keys=True) for name, value in leaves.items()}
