"""From the keys of a DCP folder to names of this package.

DCP stores the path of each key of its flat state dict: ``model.embed.weight`` has the path ``("model",
"embed.weight")`` and the name ``model/embed.weight``. The paths make a nested dict again, which is
flattened as any state is. The state dicts of optimizers have three forms there:

    by names     state/<parameter>/exp_avg, param_groups/0/lr, param_groups/0/params = ["embed.weight", ...]
                 what ``get_optimizer_state_dict`` returns; the names are ours, and ``params`` is left out
    flat         "state.<parameter>.exp_avg", "param_groups.<parameter>.lr"
                 with ``flatten_optimizer_state_dict=True``; the groups are those of the optimizer to load into
    by numbers   state/0/exp_avg, param_groups/0/params = [0, 1, ...]
                 what ``optimizer.state_dict()`` returns; the numbers change with the layout, so they are refused
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._errors import CheckpointError
from .._format.boxes import Box
from .._format.dtypes import ITEM_BYTES, dtype_name
from .._format.manifest import Json
from .._state.flat import flatten, leaves_as_text
from .dcp_metadata import Item

#: Returns the parameters of each group of the optimizer at a path, if there is one.
Groups = Callable[[str], Sequence[Sequence[str]] | None]
#: Returns whether the value at a path is a dict with integers as keys; DCP makes strings of them.
HasIntegers = Callable[[str], bool]
_NOT_HYPERPARAMETERS = ("params", "param_names")


@dataclass
class Named:
    """The items of a folder by names of this package.

    Attributes:
        tensors: items of tensors.
        leaves: JSON values.
        faults: why an item cannot be loaded, by its name.
    """

    tensors: dict[str, Item] = field(default_factory=dict)
    leaves: dict[str, Json] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def name_items(items: Sequence[Item], values: Mapping[str, Any], groups_of: Groups, has_integers: HasIntegers) -> Named:
    """Name the items of a folder.

    Args:
        items: of the folder.
        values: what is stored under the keys that are no tensors, or a `CheckpointError`.
        groups_of: the groups of the optimizers that are loaded.
        has_integers: what is loaded into dicts with integers as keys.

    Raises:
        CheckpointError: two items have one name.
    """
    named, root = Named(), _Node()
    for item in items:
        value = _Tensor(item) if item.place is None else values[item.key]
        fault = _fault_of(value)
        if fault is None:
            _insert(root, item, value)
        else:
            named.faults["/".join(map(str, item.path))] = fault
    tree = _with_optimizers(_finished(root, "", has_integers), "", groups_of, named.faults)
    flat = flatten(tree, open_object=lambda _item, _path: None)
    _add_tensors(tree, "", named.tensors)
    named.leaves.update(flat.leaves)
    return named


class _Node(dict):
    """A dict of the state, by keys and indices."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the folder as a value of a state."""

    item: Item

    @property
    def __global_shape__(self) -> tuple[int, ...]:
        return self.item.shape

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the tensor."""
        return self.item.dtype

    def __boxes__(self) -> list[tuple[Box, torch.Tensor]]:
        return []


def _fault_of(value: Any) -> str | None:
    if isinstance(value, CheckpointError):
        return str(value)
    if isinstance(value, _Tensor):
        name = dtype_name(value.item.dtype) if value.item.dtype is not None else ""
        return None if name in ITEM_BYTES else f"expected a dtype of {', '.join(ITEM_BYTES)}, got {name}"
    try:
        flat = flatten({"value": value}, open_object=lambda _item, _path: None)
        leaves_as_text(flat.leaves)
    except (CheckpointError, TypeError, ValueError, RecursionError):
        return f"expected a value that JSON knows, got {type(value).__name__}"
    return "expected a plain value, got tensors inside of one" if flat.tensors else None


def _insert(root: _Node, item: Item, value: Any) -> None:
    node: Any = root
    for step in item.path[:-1]:
        node = node.setdefault(step, _Node()) if isinstance(node, _Node) else None
    if not isinstance(node, _Node) or item.path[-1] in node:
        raise CheckpointError(f"expected distinct paths, got {item.path} of {item.key!r} twice; use another checkpoint")
    node[item.path[-1]] = value


def _finished(node: Any, path: str, has_integers: HasIntegers) -> Any:
    """Return dicts and lists in place of nodes: a list has all indices from 0 on."""
    if not isinstance(node, _Node):
        return node
    children = {step: _finished(child, f"{path}/{step}".lstrip("/"), has_integers) for step, child in node.items()}
    if all(re.fullmatch("-?[0-9]{1,18}", str(step)) for step in children) and has_integers(path):
        return {int(step): child for step, child in children.items()}
    if all(isinstance(step, int) for step in children) and set(children) == set(range(len(children))):
        return [children[step] for step in range(len(children))]
    texts = {str(step): child for step, child in children.items()}
    if len(texts) < len(children):
        raise CheckpointError(f"expected distinct names, got {list(children)}; use another checkpoint")
    return texts


def _add_tensors(node: Any, path: str, found: dict[str, Item]) -> None:
    if isinstance(node, _Tensor):
        found[path] = node.item
    elif isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            _add_tensors(child, f"{path}/{key}" if path else str(key), found)


# --- optimizers ---


def _with_optimizers(node: Any, path: str, groups_of: Groups, faults: dict[str, str]) -> Any:
    """Return a state with the state dicts of optimizers in the form of this package."""
    if isinstance(node, list):
        return [_with_optimizers(child, f"{path}/{i}", groups_of, faults) for i, child in enumerate(node)]
    if not isinstance(node, dict) or not all(isinstance(key, str) for key in node):
        return node
    groups = node.get("param_groups")
    if isinstance(groups, list) and groups and all(map(_is_group, groups)):
        if any(isinstance(name, int) for group in groups for name in group["params"]):
            faults[f"{path}/param_groups".lstrip("/")] = (
                "expected parameters by name, got numbers, which change with the layout; save what "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) returns"
            )
            return {key: child for key, child in node.items() if key not in ("state", "param_groups")}
        return {**node, "param_groups": [_hyperparameters(group) for group in groups]}
    sections = {key.partition(".")[0] for key in node if "." in key}
    if "param_groups" in sections <= {"state", "param_groups"} and all("." in key for key in node):
        return _unflattened(node, path, groups_of(path), faults)
    return {key: _with_optimizers(child, f"{path}/{key}".lstrip("/"), groups_of, faults) for key, child in node.items()}


def _is_group(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("params"), list)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}


def _unflattened(
    flat: dict[str, Any], path: str, groups: Sequence[Sequence[str]] | None, faults: dict[str, str]
) -> dict[str, Any]:
    """Return the nested form of a flat state dict, with these groups of parameters or those that are alike."""
    state: dict[str, dict[str, Any]] = {}
    of_parameter: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        section, _, rest = name.partition(".")
        parameter, _, key = rest.rpartition(".")
        table = state if section == "state" else of_parameter
        table.setdefault(parameter, {})[key] = value
    of_parameter = {name: _hyperparameters(own) for name, own in of_parameter.items()}
    if groups is None:
        alike: list[dict[str, Any]] = []
        for own in of_parameter.values():
            if own not in alike:
                alike.append(own)
        return {"state": state, "param_groups": alike}
    result = []
    for number, group in enumerate(groups):
        found = [(name, of_parameter[name]) for name in group if name in of_parameter]
        if not found:
            faults[f"{path}/param_groups"] = f"expected parameters of group {number} ({group[:3]}), got none of them"
            return {"state": state}
        other = next((name for name, own in found if own != found[0][1]), None)
        if other is not None:
            faults[f"{path}/param_groups"] = (
                f"expected equal hyperparameters in group {number}, got others of {found[0][0]!r} and {other!r}; build "
                "the optimizer with the groups of the one that was saved"
            )
            return {"state": state}
        result.append(found[0][1])
    return {"state": state, "param_groups": result}
