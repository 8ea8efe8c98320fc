"""Split the inputs of a step into micro-batches, and compute the input signature of a recorded program."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor, Shard

from .tree import flatten


def split_inputs(args: tuple, kwargs: dict, count: int) -> list[tuple[tuple, dict]]:
    """Return ``count`` pairs (args, kwargs), with tensors split along dim 0 into equal chunks.

    All other arguments, including 0-dim tensors, are the same in every pair.

    Raises:
        ValueError: a tensor's dim 0 is not divisible or differs from another tensor's, or a tensor requires a gradient.
    """
    leaves, structure = flatten((args, kwargs))
    names = _leaf_names(args, kwargs)
    batch: tuple[str, int] | None = None
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        _check_input(name, leaf, count)
        if leaf.dim() == 0:
            continue
        batch = batch or (name, leaf.shape[0])
        if leaf.shape[0] != batch[1]:
            raise ValueError(
                f"input {name}: expected {batch[1]} rows (dim 0), as in {batch[0]}, got {leaf.shape[0]}; expand it to "
                "the batch's rows, or register it as a buffer of the model"
            )
    chunks = [
        leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else [leaf] * count for leaf in leaves
    ]
    return [structure.rebuild([chunk[m] for chunk in chunks]) for m in range(count)]


def num_rows(args: tuple, kwargs: dict) -> int | None:
    """Return the number of rows of the inputs; None if they have none."""
    leaves, _ = flatten((args, kwargs))
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)


def _check_input(name: str, tensor: torch.Tensor, count: int) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"input {name}: expected a tensor without gradient, got requires_grad=True; pass {name}.detach(), because "
            "PipelineEngine computes no gradients of inputs"
        )
    if tensor.dim() == 0:
        return
    if tensor.shape[0] == 0 or tensor.shape[0] % count:
        raise ValueError(
            f"input {name}: expected a multiple of num_microbatches={count} rows, got {tensor.shape[0]} (shape "
            f"{list(tensor.shape)}); change the batch size or num_microbatches"
        )
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if count > 1 and any(isinstance(p, Shard) and p.dim == 0 for p in placements):
        raise ValueError(
            f"input {name}: expected rows that are not sharded, got a DTensor with placements {placements}; pass the "
            "rank's local rows"
        )


def _leaf_names(args: tuple, kwargs: dict) -> list[str]:
    names: list[str] = []
    for name, item in [*((f"#{i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        count = len(flatten(item)[0])
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
