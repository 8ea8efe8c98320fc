"""Encode the results of a rank as records, and decode the records of all ranks on the first rank.

A leaf of a result becomes a tuple: its kind (``sharded``, ``plain``, ``value``), then the fields that must be equal on
all ranks, and last the rank's own value. Tensors are sent as bytes.
"""

from __future__ import annotations

import traceback

import _torch
import torch
from pieces import Mismatch, assemble, close, is_plain
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["LIMIT", "decoded", "described", "encoded", "head", "same", "unpacked"]

LIMIT = 700  # characters of an exception's text


def encoded(leaf: object) -> tuple:
    """Return the record of a leaf: its kind first, the local tensor or the value last."""
    if isinstance(leaf, DTensor):
        leaf = leaf.detach()
        if not all(map(is_plain, leaf.placements)):  # masked or otherwise special parts: only torch can add them
            leaf = leaf.redistribute(placements=[Replicate()] * leaf.device_mesh.ndim)
        local = _torch.local_tensor(leaf)
        start = ("sharded", tuple(leaf.device_mesh.shape), tuple(leaf.placements), tuple(leaf.shape), leaf.dtype)
        return (*start, _packed(local))
    if isinstance(leaf, torch.Tensor):
        return "plain", tuple(leaf.shape), leaf.dtype, _packed(leaf)
    try:
        return "value", type(leaf).__name__, leaf if isinstance(leaf, (bool, int, float, complex, str)) else repr(leaf)
    except Exception as error:
        return "value", type(leaf).__name__, f"{type(error).__name__}"


def _packed(tensor: torch.Tensor) -> tuple:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a copy: strides of dims of size 1 may forbid a view
    flat.view(tensor.shape).copy_(tensor.detach())
    return tuple(tensor.shape), tensor.dtype, flat.view(torch.uint8).numpy().tobytes()


def unpacked(entry: tuple | None, *, blank: bool = False) -> tuple | None:
    """Return an entry with its tensor unpacked, or, if ``blank``, with a tensor of zeros."""
    if entry is None or entry[0] == "value":
        return entry
    shape, dtype, data = entry[-1]
    if blank or not data:
        return *entry[:-1], torch.zeros(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype)
    return *entry[:-1], tensor.reshape(shape)


def head(entry: tuple | None) -> tuple | None:
    """Return the fields of an entry that must be equal on all ranks."""
    return None if entry is None else entry[:-1]


def decoded(entries: list[tuple], mesh_shape: tuple) -> object:
    """Assemble one leaf from the entries of all ranks."""
    form, *middle, value = entries[0]
    if form == "sharded":
        shape_of_mesh, placements, shape, dtype = middle
        if any(entry[-1].dtype != dtype for entry in entries):
            raise Mismatch(f"the shards are {value.dtype}, the DTensor says {dtype}")
        if tuple(shape_of_mesh) != tuple(mesh_shape):
            raise Mismatch(f"the result lives on a mesh of {shape_of_mesh}, the arguments on one of {mesh_shape}")
        return assemble([entry[-1] for entry in entries], shape, mesh_shape, placements)
    for rank, entry in enumerate(entries):
        alike = close(entry[-1], value, 1e-8) if form == "plain" else repr(entry[-1]) == repr(value)
        if not alike:
            raise Mismatch(f"a plain result differs between ranks: rank 0 has {value}, rank {rank} {entry[-1]}"[:LIMIT])
    return value


def described(error: Exception) -> tuple[str, str, bool]:
    """Return an exception's name and text, and whether it is one of our refusals."""
    ours = isinstance(error, NotImplementedError) and type(error).__module__.startswith("vescale.")
    text = str(error).strip().split("\n\nException raised from")[0]
    if not text:
        text = traceback.format_exception_only(error)[-1].strip()
    return type(error).__name__, text[:LIMIT], ours


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit (nan equals nan)."""
    return a.shape == b.shape and a.dtype == b.dtype and close(a, b, rtol=0.0)
