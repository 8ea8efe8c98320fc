"""Turn a nested state into flat names and back.

    {"model": model, "optimizer": optimizer, "step": 7}

becomes tensors ``model/embed.weight``, ``optimizer/state/embed.weight/exp_avg`` ... and JSON leaves
``optimizer/param_groups``, ``step``. Names are path components joined with "/". What a node is decides how it is read:

    tensor, DTensor, value with __boxes__      a tensor, in boxes (see ``Held``)
    None, bool, int, float, str, and           one JSON leaf
      lists, tuples and int-keyed dicts of them
    dict with str keys                         one component per key
    other list or tuple                        one component per index
    object with state_dict, load_state_dict    its ``state_dict()``, taken once

Tensors are live views into the state, so a load writes into them; ``restore`` then puts loaded JSON leaves in place and
hands each object the state dict that was taken from it.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._boxes import Box
from ._errors import CheckpointError, format_some
from ._formats import ITEM_BYTES, dtype_name
from ._manifest import Json, TensorMeta
from ._torch import dtensor_box

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ITEMS = "__items__"  # tag of an int-keyed dict in JSON: {"__items__": [[30, 1], [80, 1]]}


@dataclass(frozen=True)
class Held:
    """A tensor of the state as this rank holds it.

    Attributes:
        meta: dtype and global shape.
        boxes: the boxes it holds with a live view of each; none where the shard is empty.
    """

    meta: TensorMeta
    boxes: tuple[tuple[Box, torch.Tensor], ...]


@dataclass
class FlatState:
    """A state read into names.

    Attributes:
        tensors: by name.
        leaves: JSON values by name.
        opened: the state dict that was taken from the object at a path.
    """

    tensors: dict[str, Held] = field(default_factory=dict)
    leaves: dict[str, Json] = field(default_factory=dict)
    opened: dict[str, Any] = field(default_factory=dict)


def flatten(state: Mapping[str, Any], *, open_object: Callable[[Any, str], Any]) -> FlatState:
    """Read a state into names.

    Args:
        state: nested dict, see the module's table.
        open_object: takes an object and its path and returns its state dict.

    Raises:
        CheckpointError: naming the path of a value that a checkpoint cannot hold, or two paths with one name.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"state must be a dict of names to models, optimizers, tensors …, got {type(state)}")
    flat = FlatState()
    _read(state, "", flat, open_object)
    return flat


def restore(state: dict[str, Any], flat: FlatState, leaves: Mapping[str, Json], *, close_object: Callable) -> None:
    """Put loaded JSON leaves into ``state`` and give every object its filled state dict.

    Args:
        state: what was given to ``flatten``; its own dicts and lists are changed in place.
        flat: the result of ``flatten``; its tensors are filled by now.
        leaves: loaded JSON values by name; a name that is absent keeps its value.
        close_object: takes an object, its path and its state dict with everything loaded.
    """
    _put(state, "", flat, leaves, close_object, in_place=True)


def is_stateful(node: Any) -> bool:
    """Tell whether a value gives its state by ``state_dict`` and takes it by ``load_state_dict``."""
    return not isinstance(node, type) and all(
        callable(getattr(node, method, None)) for method in ("state_dict", "load_state_dict")
    )


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
    """Return the JSON form of a plain value: tuples as lists, int-keyed dicts tagged."""
    if isinstance(node, list | tuple):
        return [to_json(item) for item in node]
    if isinstance(node, dict):
        if any(isinstance(key, int) for key in node):
            return {_ITEMS: [[key, to_json(item)] for key, item in node.items()]}
        return {key: to_json(item) for key, item in node.items()}
    return node


def from_json(value: Json, *, like: Any) -> Any:
    """Return a plain value from its JSON form, with the tuples and dict classes of ``like`` where it has them."""
    if isinstance(value, list):
        olds = like if isinstance(like, list | tuple) else ()
        items = [from_json(v, like=olds[i] if i < len(olds) else None) for i, v in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(value, dict):
        old = like if isinstance(like, dict) else {}
        pairs: Any = value[_ITEMS] if list(value) == [_ITEMS] else value.items()
        entries = {key: from_json(item, like=old.get(key)) for key, item in pairs}
        return type(like)(entries) if isinstance(like, dict) else entries
    return value


def _read(node: Any, path: str, flat: FlatState, open_object: Callable | None) -> None:
    held = _read_tensor(node, path)
    if held is not None:
        _add(flat.tensors, path, held, flat)
    elif _is_leaf(node):
        _add(flat.leaves, path, to_json(node), flat)
    elif isinstance(node, dict | list | tuple):
        for key, child in _children(node, path):
            _read(child, _join(path, key), flat, open_object)
    elif open_object is not None and is_stateful(node):
        flat.opened[path] = open_object(node, path)
        _read(flat.opened[path], path, flat, None)
    else:
        raise CheckpointError(
            f"{path!r} is of {type(node)}: a checkpoint holds tensors, values with __global_shape__ and __boxes__(), "
            "JSON values, and objects with state_dict() and load_state_dict()"
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
    elif isinstance(node, torch.Tensor):
        if type(node) not in _PLAIN_TENSORS or node.layout != torch.strided:
            raise CheckpointError(
                f"tensor {path!r} is a {type(node).__name__} with layout {node.layout}: only plain strided tensors and "
                "DTensors are stored as they are; others must offer __global_shape__ and __boxes__()"
            )
        shape, dtype, views = tuple(node.shape), node.dtype, [(Box.whole(node.shape), node)]
    else:
        return None
    views = [(box, view) for box, view in views if box.num_elements]
    _check_views(path, dtype, views)
    return Held(TensorMeta("" if dtype is None else dtype_name(dtype), shape), tuple(views))


def _check_views(path: str, dtype: torch.dtype | None, views: list[tuple[Box, torch.Tensor]]) -> None:
    if dtype is not None and dtype_name(dtype) not in ITEM_BYTES:
        raise CheckpointError(f"tensor {path!r} has dtype {dtype}; a checkpoint holds {', '.join(ITEM_BYTES)}")
    if len({box for box, _ in views}) != len(views):
        raise CheckpointError(f"tensor {path!r} lists a box twice on one rank")
    for box, view in views:
        if view.dtype != dtype:
            raise CheckpointError(f"tensor {path!r} has dtype {dtype}, its box {box} has {view.dtype}")
        if view.is_meta:
            raise CheckpointError(f"tensor {path!r} is on the meta device, without values: materialize it first")


def _add(table: dict[str, Any], path: str, value: Any, flat: FlatState) -> None:
    if path in flat.tensors or path in flat.leaves:
        raise CheckpointError(f"two values of the state have the name {path!r}: a key contains '/'; rename it")
    table[path] = value


def _children(node: dict | list | tuple, path: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(node, dict):
        yield from enumerate(node)
        return
    odd = [key for key in node if not isinstance(key, str)]
    if odd:
        raise CheckpointError(
            f"{path!r} is a dict with keys {format_some(map(repr, odd))}: the keys of a state must be str. If it is "
            "the state dict of an optimizer, put the optimizer itself into the state, next to its model"
        )
    yield from node.items()


def _is_leaf(node: Any) -> bool:
    """Tell whether a node is one JSON leaf. A dict with str keys is not: each of its values is one."""
    if isinstance(node, dict):
        return bool(node) and all(type(key) is int for key in node) and all(map(_is_plain, node.values()))
    return _is_plain(node)


def _is_plain(node: Any) -> bool:
    if isinstance(node, list | tuple):
        return all(map(_is_plain, node))
    if isinstance(node, dict):
        same_kind = all(isinstance(key, str) for key in node) or all(type(key) is int for key in node)
        return same_kind and all(map(_is_plain, node.values()))
    return node is None or isinstance(node, bool | int | float | str)


def _put(
    node: Any, path: str, flat: FlatState, leaves: Mapping[str, Json], close_object: Callable, *, in_place: bool
) -> Any:
    """Return ``node`` with loaded leaves; the user's own containers are changed in place, state dicts are copied."""
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
    """Return JSON leaves as text, which compares ``nan`` equal to itself."""
    return {name: json.dumps(value, sort_keys=True) for name, value in leaves.items()}
