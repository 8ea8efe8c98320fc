"""How the objects of a state give and take their state dicts: their own methods, or by name for a torch optimizer."""

from collections.abc import Mapping
from typing import Any

from ._errors import CheckpointError
from ._manifest import Manifest
from ._optimizer import NamedOptimizer, counts_parameters


class Objects:
    """Open the objects of one state for ``_state.flatten`` and close them for ``_state.restore``."""

    def __init__(self, state: Mapping[str, Any], *, manifest: Manifest | None = None) -> None:
        """Remember the state; a manifest is given when it is to be loaded."""
        self._state = state
        self._manifest = manifest
        self._named: dict[str, NamedOptimizer] = {}

    def open(self, item: Any, path: str) -> Any:
        """Return the state dict of the object at ``path``."""
        state_dict = item.state_dict()
        if not (counts_parameters(state_dict) and hasattr(item, "param_groups")):
            return state_dict
        self._named[path] = named = NamedOptimizer.of(item, path, self._state)
        return named.state_dict() if self._manifest is None else named.layout(self._manifest, path)

    def close(self, item: Any, path: str, filled: Any) -> None:
        """Give the object at ``path`` its state dict with everything loaded.

        Raises:
            CheckpointError: naming the path, if the object refuses it.
        """
        try:
            self._named.get(path, item).load_state_dict(filled)
        except Exception as error:
            raise CheckpointError(
                f"{path!r}: {type(item).__name__}.load_state_dict refused the loaded state: {error}"
            ) from error
