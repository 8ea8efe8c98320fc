"""Where parameters may be cut: the user's rules for names, converted to numbers of elements.

    "tensor"         nowhere
    "rows"           between indices of dim 0
    ("dim0", n)      between groups of n indices of dim 0, for example the rows of a quantization block
    "expert"         between indices of dim 0 of a stack of matrices (three dims)
    n                between blocks of n elements, in row-major order

All values apply to a rank's local tensor: for a tensor-parallel parameter, to its shard. An uneven shard is larger on
some ranks, and an error must be the same on all. So a granularity is checked against the local shapes of all ranks
(`local_shapes`), which every rank computes without communication.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import chunk

from .. import _torch
from .plan import Bucket, ParamInfo

__all__ = ["check_granularity", "is_even", "local_shapes", "param_info", "resolve_blocks", "warn_of_padding"]

#: A buffer larger than its parameters by more than this factor gets a warning.
_WORTH_A_WARNING = 1.5

_FORMS = '"tensor", "rows", "expert", ("dim0", number of indices) or a number of elements'


def check_granularity(zero: int, granularity: object) -> None:
    """Reject an invalid granularity, or one that has no meaning for the ZeRO stage.

    Raises:
        ValueError: With the expected values.
        TypeError: If it is not a mapping, or a key is neither a name nor a regular expression.
    """
    if granularity is None:
        return
    if not isinstance(granularity, Mapping):
        raise TypeError(
            f"granularity must map names of parameters, or regular expressions, to {_FORMS}; got {granularity!r}"
        )
    if zero == 0:
        raise ValueError("granularity= says where parameters may be cut, which needs zero=1, 2 or 3, got zero=0")
    for key, value in granularity.items():
        if not isinstance(key, (str, re.Pattern)):
            raise TypeError(f"granularity: a key must be a name of a parameter or a regular expression, got {key!r}")
        if not _is_form(value):
            raise ValueError(f"granularity of {_shown(key)!r} must be {_FORMS}, got {value!r}")


def _is_form(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and value[0] == "dim0" and _is_count(value[1])
    return value in ("tensor", "rows", "expert") if isinstance(value, str) else _is_count(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def resolve_blocks(module: nn.Module, granularity: Mapping[str | re.Pattern, Any] | None) -> dict[str, int]:
    """Return the number of elements of a block, by name of the parameter, for those that have a granularity.

    It is the same on all ranks, also where tensor-parallel shards differ in size.

    Args:
        module: The module; only names and shapes are read.
        granularity: As `check_granularity` accepts it. A key is a name, also a second one of a tied parameter, or a
            regular expression for full names. A name takes precedence over an expression. Names of parts on other
            pipeline stages are accepted, and have no effect here.

    Raises:
        ValueError: If a key matches no parameter, two keys have different values for one parameter, or blocks do not
            fit a shape that the parameter has on any rank: the same error on all.
    """
    if not granularity:
        return {}
    aliases, absent = _aliases(module), _absent(module)
    chosen: dict[str, tuple[bool, str, Any]] = {}
    for key, value in granularity.items():
        exact = isinstance(key, str) and key in aliases
        value = tuple(value) if isinstance(value, list) else value
        for name in [key] if exact else _matches(key, aliases, absent, module):
            _choose(chosen, aliases[name], (exact, _shown(key), value))
    params = dict(module.named_parameters())
    return {fqn: _block(fqn, params[fqn], value) for fqn, (_, _, value) in chosen.items()}


def _choose(chosen: dict[str, tuple[bool, str, Any]], fqn: str, new: tuple[bool, str, Any]) -> None:
    old = chosen.get(fqn, new)
    if old[0] == new[0] and old[2] != new[2]:
        raise ValueError(
            f"granularity: {old[1]!r} says {old[2]!r} and {new[1]!r} says {new[2]!r} of the parameter {fqn!r}; "
            "give its name, which counts more than a regular expression, or let one of them match fewer"
        )
    if new[0] >= old[0]:
        chosen[fqn] = new


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return all names of parameters, each with the first one of the same parameter."""
    first: dict[int, str] = {}
    return {fqn: first.setdefault(id(p), fqn) for fqn, p in module.named_parameters(remove_duplicate=False)}


def _absent(module: nn.Module) -> list[str]:
    """Return the names of parameters on other pipeline stages: the module in their place lists them."""
    return [
        ".".join(filter(None, (prefix, name)))
        for prefix, part in module.named_modules()
        for name in getattr(part, "absent_fqns", ())
    ]


def _matches(key: str | re.Pattern, names: Mapping[str, str], absent: Iterable[str], module: nn.Module) -> list[str]:
    try:
        found = [name for name in names if re.fullmatch(key, name)]
        known = found or any(key == name or re.fullmatch(key, name) for name in absent)
    except re.error as error:
        raise ValueError(f"granularity: {key!r} is neither a parameter nor a regular expression: {error}") from None
    if not known:
        near = difflib.get_close_matches(_shown(key), names, n=3, cutoff=0.3)
        raise ValueError(
            f"granularity: {_shown(key)!r} matches no parameter of {type(module).__name__}; near in the module: {near}"
        )
    return found


def _shown(key: object) -> str:
    return str(getattr(key, "pattern", key))


def _block(fqn: str, param: Tensor, value: Any) -> int:
    if value == "expert" and param.ndim != 3:
        raise ValueError(
            f"granularity of {fqn!r}: 'expert' is for a stack of matrices, which has three dims, and its shape is "
            f"{tuple(param.shape)}; use 'rows' or 'tensor'"
        )
    shapes, found = local_shapes(param), set()
    for shape in shapes:
        block, what = _elements(shape, value)
        found.add(block)
        if math.prod(shape) % block:
            where = f"its shape {shape}" if shape == tuple(param.shape) else f"its shape {shape} on some rank"
            raise ValueError(f"granularity of {fqn!r}: {what} do not divide {where} of {math.prod(shape)} elements")
    # All ranks cut at the same positions. Blocks of several sizes (rows that tensor parallelism cuts unevenly)
    # have no common size, so such a parameter is not cut.
    return found.pop() if len(found) == 1 else max(1, *map(math.prod, shapes))


def _elements(shape: tuple[int, ...], value: Any) -> tuple[int, str]:
    """Return the elements of a block, and the name of blocks in messages."""
    if value == "tensor":
        return max(math.prod(shape), 1), "full tensors"
    if isinstance(value, int):
        return value, f"blocks of {value} elements"
    count = value[1] if isinstance(value, tuple) else 1
    return max(math.prod(shape[1:]), 1) * (count if shape else 1), f"blocks of {count} indices of dim 0"


def warn_of_padding(buckets: Iterable[Bucket], blocks: Mapping[str, int]) -> None:
    """Warn of buffers that blocks make much larger than the parameters in them.

    Args:
        buckets: All buckets.
        blocks: The result of `resolve_blocks`.
    """
    sizes = [(bucket, sum(slot.numel for slot in bucket.slots)) for bucket in buckets]
    large = [(b, held) for b, held in sizes if b.numel > _WORTH_A_WARNING * held and _has_blocks(b, blocks)]
    if not large or sum(b.numel for b, _ in sizes) <= _WORTH_A_WARNING * sum(held for _, held in sizes):
        return
    worst, held = max(large, key=lambda item: item[0].numel - item[1])
    fqn = max((slot.fqn for slot in worst.slots), key=lambda fqn: blocks.get(fqn, 0))
    warnings.warn(
        f"granularity makes the buffer of {held} elements {worst.numel} large: no shard can be smaller "
        f"than a block of {fqn!r} ({blocks[fqn]} elements), and there are {worst.num_shards} shards of equal size; let "
        "it be cut (granularity 'rows'), shard over fewer ranks, or (zero=3) choose larger units",
        stacklevel=4,  # the caller of DDP
    )


def param_info(fqn: str, param: Tensor, blocks: Mapping[str, int]) -> ParamInfo:
    """Return the input of the bucket plan for a parameter."""
    room = max(map(math.prod, local_shapes(param)))
    return ParamInfo(fqn, _torch.local_tensor(param).numel(), param.dtype, blocks.get(fqn, 1), room)


def _has_blocks(bucket: Bucket, blocks: Mapping[str, int]) -> bool:
    return any(slot.fqn in blocks for slot in bucket.slots)


def local_shapes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return every shape that a local tensor of ``tensor`` has on some rank of its mesh; a plain tensor has one.

    Example:
        >>> import torch
        >>> local_shapes(torch.zeros(3, 2))
        [(3, 2)]
    """
    sizes = [{size} for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                num_parts = getattr(placement, "split_factor", 1)
                num_ranks = tensor.device_mesh.size(axis)
                sizes[dim] = {part for size in sizes[dim] for part in _cut(size, num_parts, num_ranks)}
    return sorted(itertools.product(*map(sorted, sizes)))


def _cut(size: int, num_parts: int, num_ranks: int) -> set[int]:
    """Return the sizes of a dim on all ranks, if each gets its chunk of every part."""
    parts = [chunk(size, num_parts, part)[1] for part in range(num_parts)]
    return {sum(chunk(part, num_ranks, index)[1] for part in parts) for index in range(num_ranks)}


def is_even(tensor: Tensor) -> bool:
    """Return whether the local tensors of all ranks have the same shape."""
    return len(local_shapes(tensor)) == 1
