"""Names of tied weights in state dicts: the rank that owns a weight has all of its names, the others have none.

So the state dicts of all ranks together are that of one process, and none has a value that is out of date.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .placement import Placement
from .split import Tie


def name_ties(model: nn.Module, ties: Iterable[Tie], placement: Placement) -> None:
    """Let the state dicts of a model, with stubs in place of other stages, name its tied weights so."""
    added: dict[str, str] = {}  # a name of another rank: the weight's first name
    borrowed: list[str] = []
    for tie in ties:
        others = [name for stage, own in tie.names.items() if not placement.is_here(stage) for name in own]
        if placement.is_here(tie.home):
            added.update(dict.fromkeys(others, tie.names[tie.home][0]))
        else:
            borrowed += [name for stage, own in tie.names.items() if placement.is_here(stage) for name in own]
    if added or borrowed:
        model.register_state_dict_post_hook(functools.partial(_name, added, borrowed))
        model.register_load_state_dict_pre_hook(functools.partial(_read_names, added))
        model.register_load_state_dict_post_hook(functools.partial(_miss_nothing, borrowed))


def _name(
    added: Mapping[str, str], borrowed: Iterable[str], _model: nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    for name, first in added.items():
        state[prefix + name] = state[prefix + first]
    for name in borrowed:
        state.pop(prefix + name, None)


def _read_names(added: Mapping[str, str], _model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, first in added.items():
        value = state.pop(prefix + name, None)
        if value is not None:
            state.setdefault(prefix + first, value)


def _miss_nothing(borrowed: Iterable[str], _model: nn.Module, found: Any) -> None:
    """The next step brings the values of borrowed weights."""
    ends = tuple(f".{name}" for name in borrowed)
    found.missing_keys[:] = [key for key in found.missing_keys if key not in borrowed and not key.endswith(ends)]
