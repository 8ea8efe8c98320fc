"""Optimizers of ``torch.optim`` by parameter name.

The state dict of a torch optimizer counts parameters (0, 1, 2, ...), and the counts change with the layout. This module
replaces each count by the name of the parameter in the state dict of a module of the same state. The state of one
optimizer of the full model then fits the optimizers of pipeline stages, and vice versa:

    {"state": {0: {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": [0, 1]}]}
    {"state": {"embed.weight": {"exp_avg": ...}}, "param_groups": [{"lr": ...}]}

A fresh optimizer has no state to load into, so a load allocates it by the checkpoint. A stored tensor of the
parameter's shape becomes a tensor like the parameter, with its placements and device. All others become plain CPU
tensors. Optimizers with names in their ``state_dict()`` (``vescale.optim.DistributedOptimizer``) do not use this
module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import CheckpointError
from .._format.manifest import Json, Manifest, StoredTensor
from .flat import find_objects

_NOT_HYPERPARAMETERS = ("params", "param_names")


def counts_parameters(state_dict: Any) -> bool:
    """Return whether a state dict is one of a torch optimizer, with parameter counts in its groups."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    return isinstance(groups, list) and bool(groups) and all(isinstance(g, dict) and "params" in g for g in groups)


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class; a wrapper names the class inside it, as ``optimizer_class``."""
    kind = getattr(optimizer, "optimizer_class", None)
    return (kind if isinstance(kind, type) else type(optimizer)).__name__


@dataclass(frozen=True)
class NamedOptimizer:
    """A torch optimizer with parameter names.

    Attributes:
        optimizer: a ``torch.optim.Optimizer``, or an object with its ``state_dict`` and ``param_groups``.
        names: name by parameter count, over all groups.
    """

    optimizer: Any
    names: Mapping[int, str]

    @classmethod
    def of(cls, optimizer: Any, path: str, state: Mapping[str, Any]) -> "NamedOptimizer":
        """Name the parameters of ``optimizer``, at ``path`` of ``state``, by the modules of ``state``.

        Raises:
            CheckpointError: a parameter is in no module of the state, or two parameters have the same name.
        """
        known = _parameter_names(state)
        names: dict[int, str] = {}
        groups = zip(optimizer.state_dict()["param_groups"], optimizer.param_groups, strict=True)
        for index, (counted, group) in enumerate(groups):
            for count, parameter in zip(counted["params"], group["params"], strict=True):
                name = known.get(id(parameter))
                if name is None:
                    raise CheckpointError(
                        f"{path!r}: expected parameter {count} (param_groups[{index}], shape {tuple(parameter.shape)}) "
                        f"of {type(optimizer).__name__} in a module of the state, got it in none; save and load the "
                        'optimizer together with its module: {"model": model, "optimizer": optimizer}'
                    )
                if name in names.values():
                    raise CheckpointError(
                        f"{path!r}: expected distinct parameter names, got {name!r} twice; put the modules of this "
                        "optimizer into one module"
                    )
                names[count] = name
        return cls(optimizer, names)

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        counted = self.optimizer.state_dict()["param_groups"]
        return [[self.names[count] for count in group["params"]] for group in counted]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with names in place of counts, and only hyperparameters in its groups."""
        counted = self.optimizer.state_dict()
        state = {self.names[count]: entry for count, entry in counted["state"].items()}
        for name, entry in state.items():
            nested = [key for key, value in entry.items() if isinstance(value, dict | list | tuple)]
            if nested:
                raise CheckpointError(
                    f"parameter {name!r}: expected tensors and plain values in the state of "
                    f"{type(self.optimizer).__name__}, got a container in {nested[0]!r}; leave this optimizer out of "
                    "the state"
                )
        return {"state": state, "param_groups": [_hyperparameters(group) for group in counted["param_groups"]]}

    def layout(self, manifest: Manifest, path: str) -> dict[str, Any]:
        """Return a state dict to load into, with the checkpoint's entries of this optimizer's parameters."""
        counted = self.optimizer.state_dict()
        parameters = self._parameters()
        stored = _entries_by_parameter(manifest, f"{path}/state/")
        state = {}
        for count, name in self.names.items():
            own = counted["state"].get(count, {})
            entries = stored.get(name, {})
            if entries:
                state[name] = {
                    key: _target(key, item, own.get(key), parameters[count]) for key, item in entries.items()
                }
        return {"state": state, "param_groups": [_hyperparameters(group) for group in counted["param_groups"]]}

    def load_state_dict(self, filled: Mapping[str, Any]) -> None:
        """Load a filled layout into the optimizer, by counts."""
        counts = {name: count for count, name in self.names.items()}
        groups = [
            {**new, **{key: old[key] for key in _NOT_HYPERPARAMETERS if key in old}}
            for new, old in zip(filled["param_groups"], self.optimizer.state_dict()["param_groups"], strict=True)
        ]
        state = {counts[name]: entry for name, entry in filled["state"].items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _parameters(self) -> dict[int, torch.Tensor]:
        groups = zip(self.optimizer.state_dict()["param_groups"], self.optimizer.param_groups, strict=True)
        return {
            count: p for counted, group in groups for count, p in zip(counted["params"], group["params"], strict=True)
        }


def _parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    """Return the first name of every parameter in the state dict of a module of the state, by id."""
    names: dict[int, str] = {}
    for _, module in find_objects(state):
        if isinstance(module, torch.nn.Module):
            for name, tensor in module.state_dict(keep_vars=True).items():
                names.setdefault(id(tensor), name)
    return names


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}


def _entries_by_parameter(manifest: Manifest, prefix: str) -> dict[str, dict[str, StoredTensor | Json]]:
    entries: dict[str, dict[str, Any]] = {}
    for table in (manifest.tensors, manifest.leaves):
        for name, item in table.items():
            if name.startswith(prefix):
                parameter, _, key = name.removeprefix(prefix).rpartition("/")
                entries.setdefault(parameter, {})[key] = item
    return entries


def _target(key: str, stored: Any, own: Any, parameter: torch.Tensor) -> Any:
    """Return the target of a stored entry: the optimizer's own tensor, if any, else a new one."""
    if not isinstance(stored, StoredTensor):
        return None
    if isinstance(own, torch.Tensor):
        return own
    dtype = getattr(torch, stored.meta.dtype)
    # "step" is not like the parameter: torch keeps it on the CPU, or load_state_dict moves it.
    if key != "step" and stored.meta.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(stored.meta.shape, dtype=dtype)
