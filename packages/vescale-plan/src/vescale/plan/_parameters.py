"""The parameters of a model: names, shapes, and their positions in the chain of blocks, from names of modules."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterInfo:
    """Name, shape and position of one parameter.

    Attributes:
        fqn: first name under which the model lists it.
        shape: global shape.
        dtype: name of the dtype, such as ``"float32"``.
        positions: positions of its uses: -1 before the blocks, ``i`` in block ``i``, ``num_blocks`` after them.
        sharded: whether tensor parallelism shards it over the ``tp`` axis.
        trainable: whether it needs a gradient and optimizer state.
        expert: whether it belongs to an expert, or to a stack of them, which expert parallelism spreads over ranks.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    positions: tuple[int, ...]
    sharded: bool
    trainable: bool = True
    expert: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)


def find_parameters(
    model: nn.Module, blocks: Sequence[str], sizes: dict[str, int], tp_sharded: Sequence[str] | None
) -> Iterable[ParameterInfo]:
    """Yield every parameter once, with the positions of all its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
        parameters[id(parameter)] = parameter
    _check_patterns(tp_sharded, [fqn for aliases in names.values() for fqn in aliases])
    front = _modules_in_front(model, blocks)
    for key, parameter in parameters.items():
        positions = sorted({_position(fqn, blocks, front) for fqn in names[key]})
        if tp_sharded is None:
            is_router = parameter.dim() == 2 and parameter.shape[0] == sizes["experts"]
            inside = all(0 <= position < len(blocks) for position in positions)
            is_vocabulary = parameter.shape[:1] == (sizes["vocab"],)
            sharded = parameter.dim() >= 2 and (is_vocabulary or (inside and not is_router))
        else:
            sharded = any(re.fullmatch(pattern, fqn) for pattern in tp_sharded for fqn in names[key])
        yield ParameterInfo(
            fqn=names[key][0],
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            positions=tuple(positions),
            sharded=sharded,
            trainable=parameter.requires_grad,
        )


def _check_patterns(tp_sharded: Sequence[str] | None, fqns: Sequence[str]) -> None:
    for pattern in tp_sharded or ():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"profile: expected regular expressions in tp_sharded, got {pattern!r} ({error}); use re.escape"
            ) from None
        if not any(re.fullmatch(pattern, fqn) for fqn in fqns):
            raise ValueError(
                f"profile: expected a parameter of the model for every pattern of tp_sharded, got none for "
                f"{pattern!r}; write a regular expression of full names such as {fqns[:3]}"
            )


def _modules_in_front(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Return the FQNs of the modules before the first block."""
    fqns = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    return set(itertools.takewhile(lambda fqn: fqn != blocks[0], fqns)) if blocks else set(fqns)


def _position(fqn: str, blocks: Sequence[str], front: set[str]) -> int:
    if not blocks:
        return 0
    owner = fqn.rpartition(".")[0]
    for position, block in enumerate(blocks):
        if f"{owner}.".startswith(f"{block}."):
            return position
    return -1 if owner in front else len(blocks)
