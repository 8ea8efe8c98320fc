"""Write a checkpoint in one process, file by file, from values that are made when their file is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .._format.boxes import Box
from .._format.data_files import Entry, pack_files, write_data_file
from .._format.dtypes import ITEM_BYTES
from .._format.layouts import Layout
from .._format.manifest import Manifest, StoredFile, StoredTensor, TensorMeta, key_of, manifest_to_text
from .._format.versions import NewVersion

_MAX_FILE_BYTES = 2**30  # what is in memory at once; progress is told of after each


@dataclass(frozen=True)
class Part:
    """A box of a tensor to write, and what makes its values."""

    name: str
    box: Box
    values: Callable[[], torch.Tensor]


def write_checkpoint(
    path: Path,
    metas: Mapping[str, TensorMeta],
    parts: Sequence[Part],
    *,
    plain: Manifest | None = None,
    overwrite: bool,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Write a checkpoint, and return its manifest.

    Args:
        path: directory to create.
        metas: dtypes and shapes of tensors by name.
        parts: boxes that tile them.
        plain: where plain values, classes of optimizers and metadata come from.
        overwrite: as for ``save``.
        progress: is told of the bytes that are done, and of all bytes.

    Raises:
        CheckpointError: it cannot be written.
    """
    version = NewVersion(path, overwrite=overwrite)
    try:
        rows: dict[str, list[tuple[int, Box]]] = {name: [] for name in metas}
        files: dict[str, StoredFile] = {}
        sizes = [part.box.num_elements * ITEM_BYTES[metas[part.name].dtype] for part in parts]
        for number, run in enumerate(pack_files(sizes, max_bytes=_MAX_FILE_BYTES)):
            name, own = f"data-0-{number}.safetensors", [parts[i] for i in run]
            entries = [
                Entry(part.name, key_of(part.name, part.box, metas[part.name].shape), part.box, part.values())
                for part in own
            ]
            files[name] = write_data_file(version.folder / name, entries).file
            for part in own:
                rows[part.name].append((number, part.box))
            progress(sum(sizes[i] for i in run), sum(sizes))
        tensors = {name: StoredTensor(meta, Layout.of(meta.shape, rows[name])) for name, meta in metas.items()}
        manifest = Manifest(1, time.time(), {}, {}, version.folder.name, files, tensors)
        if plain is not None:
            manifest = replace(manifest, metadata=plain.metadata, leaves=plain.leaves, optimizers=plain.optimizers)
        version.commit(manifest_to_text(manifest))
    except BaseException:
        version.discard()
        raise
    return manifest
