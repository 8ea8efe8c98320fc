"""Splitting the inputs of a step into micro-batches, and the form of inputs that a recorded program is valid for."""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.tensor import DTensor, Shard

from ._tree import flatten


def split_inputs(args: tuple, kwargs: dict, count: int) -> list[tuple[tuple, dict]]:
    """Return ``count`` pairs (args, kwargs): tensors are cut along dim 0 into equal chunks, the rest is passed on.

    Scalars (0-dim tensors) are passed on too.

    Raises:
        ValueError: a tensor's dim 0 is not divisible, differs from another tensor's, or a tensor requires a gradient.
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
                f"inputs are split along dim 0, but {batch[0]} has {batch[1]} rows and {name} has {leaf.shape[0]}; "
                "give every tensor the batch's rows (expand what is shared), or hold it in the model as a buffer"
            )
    chunks = [
        leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else [leaf] * count for leaf in leaves
    ]
    return [structure.rebuild([chunk[m] for chunk in chunks]) for m in range(count)]


def _check_input(name: str, tensor: torch.Tensor, count: int) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"input {name} requires a gradient, which a PipelineEngine does not deliver; pass {name}.detach()"
        )
    if tensor.dim() == 0:
        return
    if tensor.shape[0] == 0 or tensor.shape[0] % count:
        raise ValueError(
            f"input {name} has {tensor.shape[0]} rows (shape {list(tensor.shape)}), which cannot be split into "
            f"{count} equal micro-batches; use a batch size that is a multiple of {count}, or change num_microbatches"
        )
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if count > 1 and any(isinstance(p, Shard) and p.dim == 0 for p in placements):
        raise ValueError(
            f"input {name} is a DTensor with placements {placements}: its rows are spread over ranks and cannot be "
            "split into micro-batches; pass the rank's local rows"
        )


def _leaf_names(args: tuple, kwargs: dict) -> list[str]:
    names: list[str] = []
    for name, item in [*((f"#{i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        count = len(flatten(item)[0])
        names += [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
    return names


def describe_inputs(args: tuple, kwargs: dict) -> str:
    """Return the form of a micro-batch's inputs as text: what control flow outside of units may depend on."""
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
    """Return a 63-bit integer that identifies a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def checksum(args: tuple, kwargs: dict) -> int:
    """Return a 63-bit integer that identifies the elements of the input tensors."""
    total = hashlib.sha256()
    for leaf in flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            plain = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            total.update(plain.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(total.digest()[:8], "big") >> 1
