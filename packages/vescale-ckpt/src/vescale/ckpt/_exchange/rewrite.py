"""Write a checkpoint anew in one process: other names, a part of it, another dtype, large files in place of many."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .._errors import CheckpointError
from .._format.boxes import Box
from .._format.dtypes import ITEM_BYTES
from .._format.manifest import Manifest, TensorMeta
from .._load.difference import Stored, cut
from .._load.plan import plan_load
from .._save.one_process import Part, write_checkpoint

_PART_BYTES = 64 * 1024**2
FLOATING = ("float64", "float32", "float16", "bfloat16")


def rewrite(
    path: Path,
    new: Path,
    *,
    match: Sequence[str],
    rename: Mapping[str, str],
    dtype: str | None,
    overwrite: bool,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Write the checkpoint at ``path`` to ``new``, and return the new manifest; every byte is compared with checksums.

    Args:
        path: of a checkpoint.
        new: directory to create.
        match: patterns of the names to keep, such as ``"model/*"``; all if there is none.
        rename: as for ``load``.
        dtype: of floating-point tensors in the new one; as they are if None.
        overwrite: as for ``save``.
        progress: is told of the bytes that are done, and of all bytes.

    Raises:
        CheckpointError: nothing matches, or a checkpoint cannot be read or written.
    """
    with Stored(path) as stored:
        old = stored.manifest
        kept = [name for name in (*old.tensors, *old.leaves) if not match or _matches(name, match)]
        if not kept:
            raise CheckpointError(
                f"{path}: expected names that match {list(match)}, got none; see `vescale-ckpt inspect`"
            )
        names = set(kept)
        used = {root for root in old.optimizers if any(name.startswith(f"{root}/") for name in kept)}
        part = replace(
            old,
            tensors={name: each for name, each in old.tensors.items() if name in names},
            leaves={name: each for name, each in old.leaves.items() if name in names},
            optimizers={root: kind for root, kind in old.optimizers.items() if root in used},
        ).renamed(rename)
        metas, parts = {}, []
        for name, tensor in part.tensors.items():
            meta = tensor.meta
            is_cast = dtype is not None and meta.dtype in FLOATING
            metas[name] = TensorMeta(dtype if is_cast and dtype else meta.dtype, meta.shape)
            limit = _PART_BYTES // ITEM_BYTES[meta.dtype]
            for box in cut(Box.full(meta.shape), limit) if 0 not in meta.shape else ():
                values = functools.partial(_values, stored, tensor.key, box, getattr(torch, metas[name].dtype))
                parts.append(Part(name, box, values))
        return write_checkpoint(new, metas, parts, plain=part, overwrite=overwrite, progress=progress)


def _values(stored: Stored, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a box of a stored tensor."""
    values = torch.empty(box.sizes, dtype=getattr(torch, stored.manifest.tensors[name].meta.dtype))
    for reads in plan_load({name: [box]}, stored.manifest).values():
        for read in reads:
            values[read.box.slices(inside=box)] = stored.values(name, read.piece, read.box)
    return values.to(dtype)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
