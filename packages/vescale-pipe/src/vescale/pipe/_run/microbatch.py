"""Split the inputs of a step into micro-batches, and compute the input signature of a recorded program."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor, Shard

from .tree import flatten, is_flat

Inputs = tuple[tuple, dict]  # positional and keyword arguments of a call


@dataclass(frozen=True)
class Share:
    """What a micro-batch is of its batch: parts ``index`` to ``index + size`` of ``count`` equal parts."""

    index: int
    count: int
    size: int = 1

    @classmethod
    def of_rows(cls, start: int, num_rows: int, total: int) -> Share:
        """Return the share of ``num_rows`` rows from ``start`` on, of ``total`` rows, in the fewest parts."""
        unit = math.gcd(start, num_rows, total)
        return cls(start // unit, total // unit, num_rows // unit)


def equal_shares(count: int) -> list[Share]:
    """Return the shares of ``count`` micro-batches that are alike."""
    return [Share(index, count) for index in range(count)]


def shares_of(sizes: Sequence[int]) -> list[Share]:
    """Return the share of each micro-batch by its number of rows."""
    total, starts = sum(sizes), accumulate(sizes, initial=0)
    return [Share.of_rows(start, size, total) for start, size in zip(starts, sizes, strict=False)]


def split_sizes(args: tuple, kwargs: dict, count: int) -> list[int]:
    """Return the number of rows of each micro-batch of ``split_inputs``; 1 if the inputs have no rows."""
    least, rest = divmod(num_rows(args, kwargs) or count, count)
    return [least + (index < rest) for index in range(count)]


def split_inputs(args: tuple, kwargs: dict, count: int) -> list[Inputs]:
    """Return ``count`` pairs (args, kwargs), with tensors split along dim 0 into chunks of equally many rows.

    If ``count`` does not divide the number of rows, the first chunks have one row more than the others. All other
    arguments, including 0-dim tensors, are the same in every pair.

    Raises:
        ValueError: a tensor's dim 0 is shorter than ``count`` or differs from another tensor's, or a tensor requires a
            gradient.
    """
    leaves, structure = flatten((args, kwargs))
    batch: tuple[int, int] | None = None
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        _check_input(functools.partial(_leaf_name, args, kwargs, place), leaf, count)
        if leaf.dim() == 0:
            continue
        batch = batch or (place, leaf.shape[0])
        if leaf.shape[0] != batch[1]:
            raise ValueError(
                f"input {_leaf_name(args, kwargs, place)}: expected {batch[1]} rows (dim 0), as in "
                f"{_leaf_name(args, kwargs, batch[0])}, got {leaf.shape[0]}; expand it to the batch's rows, or "
                "register it as a buffer of the model"
            )
    chunks = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else [leaf] * count
        for leaf in leaves
    ]
    if is_flat(args, kwargs, leaves):
        rows = zip(*chunks, strict=True) if chunks else [()] * count
        return [(row[: len(args)], dict(zip(kwargs, row[len(args) :], strict=True))) for row in rows]
    return [structure.rebuild([chunk[m] for chunk in chunks]) for m in range(count)]


def num_rows(args: tuple, kwargs: dict) -> int | None:
    """Return the number of rows of the inputs; None if they have none."""
    leaves, _ = flatten((args, kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)


def _check_input(name: Callable[[], str], tensor: torch.Tensor, count: int) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"input {name()}: expected a tensor without gradient, got requires_grad=True; pass {name()}.detach(), "
            "because PipelineEngine computes no gradients of inputs"
        )
    if tensor.dim() == 0:
        return
    if tensor.shape[0] < count:
        raise ValueError(
            f"input {name()}: expected a row for each of num_microbatches={count}, got {tensor.shape[0]} (shape "
            f"{list(tensor.shape)}); change the batch size or num_microbatches"
        )
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if count > 1 and any(isinstance(p, Shard) and p.dim == 0 for p in placements):
        raise ValueError(
            f"input {name()}: expected rows that are not sharded, got a DTensor with placements {placements}; pass the "
            "rank's local rows"
        )


def _leaf_name(args: tuple, kwargs: dict, place: int) -> str:
    return _leaf_names(args, kwargs)[place]


def _leaf_names(args: tuple, kwargs: dict) -> list[str]:
    names: list[str] = []
    for name, item in [*((f"#{i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        count = 1 if isinstance(item, torch.Tensor) else len(flatten(item)[0])
        names += [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
    return names


def describe_inputs(args: tuple, kwargs: dict) -> str:
    """Return the signature of a micro-batch's inputs as text: names, shapes, dtypes and plain values."""
    leaves, _ = flatten((args, kwargs))
    parts = []
    for name, leaf in zip(_leaf_names(args, kwargs), leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{name}={str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        elif isinstance(leaf, bool | int | float | str | type(None)):
            parts.append(f"{name}={leaf!r}")
        else:
            parts.append(f"{name}: {type(leaf).__name__}")
    return ", ".join(parts)


def digest(text: str) -> int:
    """Return a 63-bit hash of a text, equal in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(args: tuple, kwargs: dict) -> int:
    """Return a 63-bit hash of the elements of the input tensors."""
    total = hashlib.sha256()
    for leaf in flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            plain = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            total.update(plain.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(total.digest()[:8], "big") >> 1
