"""Cut full tensors into shards and assemble shards, independently of the code under test.

The cut is `torch.chunk`, one mesh axis after another. The assembly cuts a tensor of indices in the same way:

    whole.flatten()[cut(arange(numel).view(shape), ...)] = local

It checks that a rank's part has the size that its placements give, and that replicas agree. A partial tensor is split
into random parts whose sum, mean, maximum or minimum is exact (the values have 24 significant bits).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from _torch import split_factor
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

__all__ = ["Mismatch", "assemble", "close", "cut", "is_plain", "part"]


class Mismatch(Exception):  # noqa: N818 - not an error of the program but a finding
    """The error in a sharded result."""


def is_plain(placement: Placement) -> bool:
    """Return whether the functions of this file support a placement."""
    if type(placement) is Partial:
        return placement.reduce_op in REDUCE
    return type(placement) in (Replicate, Shard) or split_factor(placement) is not None


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


def cut(whole: Tensor, mesh_shape: Sequence[int], coord: Sequence[int], placements: Sequence[Placement]) -> Tensor:
    """Return the view (or copy) of ``whole`` that the rank at ``coord`` holds; partial axes hold all of it."""
    for size, at, placement in zip(mesh_shape, coord, placements, strict=True):
        if (factor := split_factor(placement)) is not None:
            pieces = [_chunk(piece, size, at, placement.dim) for piece in whole.chunk(factor, placement.dim)]
            whole = torch.cat(pieces, placement.dim)
        elif (block := getattr(placement, "block", None)) is not None:  # vescale's BlockShard
            blocks = whole.unflatten(placement.dim, (whole.shape[placement.dim] // block, block))
            whole = _chunk(blocks, size, at, placement.dim).flatten(placement.dim, placement.dim + 1)
        elif isinstance(placement, Shard):
            whole = _chunk(whole, size, at, placement.dim)
    return whole


def _chunk(tensor: Tensor, num: int, index: int, dim: int) -> Tensor:
    chunks = tensor.chunk(num, dim)
    return chunks[index] if index < len(chunks) and tensor.shape[dim] else tensor.narrow(dim, 0, 0)


def part(whole: Tensor, mesh_shape: Sequence[int], coord: Sequence[int], placements: Sequence[Placement], seed: int):
    """Return a copy of the part that the rank at ``coord`` holds; those of partial axes reduce to ``whole``."""
    generator = torch.Generator().manual_seed(seed)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            size, op = mesh_shape[axis], placement.reduce_op
            parts = torch.randint(-12, 13, (size, *whole.shape), generator=generator).to(whole.dtype)
            parts = parts / 8 if whole.is_floating_point() or whole.is_complex() else parts
            if op in ("max", "min"):
                parts = whole - parts.abs() * (1 if op == "max" else -1)
                parts[seed % size] = whole
            else:
                parts[-1] = (whole if op == "sum" else whole * size) - parts[:-1].sum(0)
            whole = torch.empty_like(whole).copy_(parts[coord[axis]])  # in the memory order of the whole
    return cut(whole, mesh_shape, coord, placements).clone()


@functools.lru_cache(4096)
def _index(shape: tuple, mesh_shape: tuple, coord: tuple, placements: tuple) -> Tensor:
    numel = functools.reduce(int.__mul__, shape, 1)
    return cut(torch.arange(numel).view(shape), mesh_shape, coord, placements)


def assemble(
    locals_: Sequence[Tensor], shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> Tensor:
    """Assemble the shards of all ranks, given in the mesh's order.

    Raises:
        Mismatch: A shard does not have the shape of its placements, replicas differ, or the parts have no reduction.
    """
    if (dtype := locals_[0].dtype) in SIGNED:  # torch has few operators for unsigned types
        signed = [local.view(SIGNED[dtype]) for local in locals_]
        return assemble(signed, shape, mesh_shape, placements).view(dtype)
    shape, mesh_shape, placements = tuple(shape), tuple(mesh_shape), tuple(placements)
    coords = list(itertools.product(*map(range, mesh_shape)))
    held = {}
    for rank, (coord, local) in enumerate(zip(coords, locals_, strict=True)):
        expected = _index(shape, mesh_shape, coord, placements).shape
        if local.shape != expected:
            raise Mismatch(f"rank {rank} holds {tuple(local.shape)} where {placements} promise {tuple(expected)}")
        held[coord] = local
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            if locals_[0].is_complex() and placement.reduce_op in ("max", "min"):
                raise Mismatch(f"complex numbers have no order, but the placements are {placements}")
            held = _reduced(held, axis, mesh_shape[axis], REDUCE[placement.reduce_op])
    whole = torch.zeros(shape, dtype=locals_[0].dtype)
    flat, written = whole.view(-1), torch.zeros(whole.numel(), dtype=torch.bool)
    for coord, local in held.items():
        index = _index(shape, mesh_shape, coord, placements).reshape(-1)
        values = local.reshape(-1)
        known = written[index]
        if known.any() and not close(values[known], flat[index][known], 1e-8):
            raise Mismatch(f"replicas differ: the rank at {coord} disagrees with one before it ({placements})")
        flat[index] = values
        written[index] = True
    if not bool(written.all()):
        raise Mismatch(f"no rank holds {int((~written).sum())} of {written.numel()} elements ({placements})")
    return whole


def _reduced(held: dict, axis: int, size: int, reduce) -> dict:
    result = {}
    for coord in held:
        if coord[axis] == 0:
            parts = [held[(*coord[:axis], i, *coord[axis + 1 :])] for i in range(size)]
            result[coord] = reduce(torch.stack(parts)).to(parts[0].dtype)
    return result


def close(actual: Tensor, expected: Tensor, rtol: float) -> bool:
    """Compare values, relative to the largest (at least 1e-3); nan equals nan, infinities equal themselves."""
    if actual.numel() == 0 or (actual.dtype != torch.complex32 and torch.equal(actual, expected)):
        return True
    if not (actual.is_floating_point() or actual.is_complex()):
        return False
    if actual.is_complex():
        return close(torch.view_as_real(actual), torch.view_as_real(expected), rtol)
    actual, expected = actual.double(), expected.double()
    fine = torch.isfinite(expected)
    a, b = actual[~fine], expected[~fine]
    if not bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return False
    if not fine.any():
        return True
    gap = (actual[fine] - expected[fine]).abs().max()
    return bool(gap <= rtol * max(1e-3, expected[fine].abs().max().item()))
