"""State dicts of the objects of a state: by their own methods, or by parameter names for a torch optimizer."""

from collections.abc import Mapping
from typing import Any

import torch

from .._errors import CheckpointError
from .._format.manifest import Manifest
from .optimizer import NamedOptimizer, class_name, counts_parameters
from .per_rank import PerRank


def held_state(item: Any) -> dict[str, Any]:
    """Return the state dict of an object, with what this rank holds of each value.

    An object whose ``state_dict`` brings values together from ranks has them apart in ``sharded_state_dict``.
    """
    state: dict[str, Any] = getattr(item, "sharded_state_dict", item.state_dict)()
    return state


class Objects:
    """Open the objects of one state for ``flatten`` and close them for ``restore``."""

    def __init__(self, state: Mapping[str, Any], rank: int, size: int, *, manifest: Manifest | None = None) -> None:
        """Store the state, which of how many ranks this one is, and the manifest for a load."""
        self._state = state
        self._rank, self._size = rank, size
        self._manifest = manifest
        self._named: dict[str, NamedOptimizer] = {}
        self.optimizers: dict[str, str] = {}  # class names of the opened optimizers, by path

    def open(self, item: Any, path: str) -> Any:
        """Return the state dict of the object at ``path``."""
        if isinstance(item, PerRank):
            if self._manifest is None:
                return item.to_save(path, self._rank)
            return item.to_load(path, self._rank, self._size, self._manifest)
        state_dict = held_state(item)
        if isinstance(item, torch.optim.Optimizer):
            self.optimizers[path] = class_name(item)
        if not (counts_parameters(state_dict) and hasattr(item, "param_groups")):
            return state_dict
        self._named[path] = named = NamedOptimizer.of(item, path, self._state)
        return named.state_dict() if self._manifest is None else named.layout(self._manifest, path)

    def groups(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Return the names of the parameters in each group of the opened optimizers of torch, by path."""
        return {path: tuple(tuple(group) for group in named.groups()) for path, named in self._named.items()}

    def close(self, item: Any, path: str, filled: Any) -> None:
        """Pass the filled state dict to the object at ``path``.

        Raises:
            CheckpointError: the object refuses it; the text has the path.
        """
        is_own = isinstance(item, PerRank)
        try:
            if is_own:
                item.take(path, self._rank, self._size, filled)
            else:
                self._named.get(path, item).load_state_dict(filled)
        except CheckpointError:
            raise
        except Exception as error:
            what = "PerRank" if is_own else f"{type(item).__name__}.load_state_dict"
            raise CheckpointError(
                f"{path!r}: expected {what} to accept the loaded state, got {error}; "
                "build the object as before the save"
            ) from error
