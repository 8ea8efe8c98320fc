"""Convert a checkpoint to a folder of Hugging Face and back, in one process and without a model.

Tensors go block by block, so memory is bounded whatever their sizes. If the folder has a ``config.json`` and
``transformers`` is installed, the model is built on the meta device: it says which names are ties, and what names and
merges it has. Otherwise names are the same on both sides.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError, format_some
from .._format.boxes import Box
from .._format.data_files import BLOCK_BYTES
from .._format.dtypes import ITEM_BYTES
from .._format.manifest import Manifest, TensorMeta
from .._format.strided import Part
from .._load.difference import Stored, cut
from .._save import one_process
from .hf_files import Region, list_folder, real_path
from .hf_folder import NewFolder
from .hf_load import absent_of, content_of
from .hf_save import FileWriter, files_of
from .hf_state import ModuleState, names_to_drop
from .hf_transformers import ignored_keys, model_of_config, names_to_load, names_to_save, optional_names, tied_names
from .hf_write import final_names

logger = logging.getLogger("vescale.ckpt")

_BLOCK_ELEMENTS = BLOCK_BYTES // 8
_CONFIGS = ("config.json", "generation_config.json")


def export_hf(
    checkpoint: Path,
    folder: Path,
    *,
    prefix: str,
    config: Path | None,
    max_shard_bytes: int,
    overwrite: bool,
    progress: Callable[[int, int], None],
) -> list[str]:
    """Write the tensors under a prefix of a checkpoint as a folder of Hugging Face, and return the names of its files.

    Args:
        checkpoint: directory of ``save``.
        folder: to create.
        prefix: path of the model in the state that was saved, such as ``"model"``.
        config: folder with the ``config.json`` of the model, which is copied.
        max_shard_bytes: as for ``save_hf``.
        overwrite: as for ``save_hf``.
        progress: is told of the bytes that are done, and of all bytes.

    Raises:
        CheckpointError: the checkpoint cannot be read, has no such tensors, or the folder cannot be written.
    """
    with Stored(checkpoint) as stored:
        model = _model(config)
        full_names = _under(prefix, stored.manifest)
        ties = () if model is None else ModuleState.of(model).ties()
        dropped = names_to_drop(tuple(_among(group, full_names) for group in ties), tied_names(model))
        metas = {name: stored.manifest.tensors[full].meta for name, full in full_names.items() if name not in dropped}
        content, files, index = files_of(metas, names_to_save(model, None), max_shard_bytes)
        new = NewFolder(folder, overwrite=overwrite)
        try:
            new.create(files, index)
            total = sum(map(_num_bytes, metas.values()))
            with FileWriter(folder, new.token, content) as writer:
                for name, meta in metas.items():
                    full = full_names[name]
                    for piece in stored.manifest.pieces(full):
                        for box in cut(piece.box, _BLOCK_ELEMENTS):
                            writer.write(name, box, stored.values(full, piece, box))
                            progress(box.num_elements * ITEM_BYTES[meta.dtype], total)
            new.commit(final_names(files), lambda path: _copy_configs(config, path))
        except BaseException:
            new.discard()
            raise
    return final_names(files)


def import_hf(
    folder: Path, checkpoint: Path, *, prefix: str, overwrite: bool, progress: Callable[[int, int], None]
) -> Manifest:
    """Write the tensors of a folder of Hugging Face as a checkpoint of a state with a model at a prefix.

    Args:
        folder: as for ``load_hf``; with its ``config.json``.
        checkpoint: directory to create.
        prefix: path of the model in the state, such as ``"model"``.
        overwrite: as for ``save``.
        progress: is told of the bytes that are done, and of all bytes.

    Raises:
        CheckpointError: the folder cannot be read, or the checkpoint cannot be written.
    """
    files = list_folder(folder)
    model = _model(folder)
    state = None if model is None else ModuleState.of(model)
    wanted = [] if state is None else list(state.tensors)
    content = content_of(files, names_to_load(model, None, wanted), wanted, ignored_keys(model))
    source = content.manifest()
    absent = {} if state is None else absent_of(wanted, source, state.ties(), optional_names(model))
    regions = content.regions()
    maps = {name: _mapped(real_path(folder, name), file.num_bytes) for name, file in files.items()}
    parts = []
    metas: dict[str, TensorMeta] = {}
    for name in (*source.tensors, *sorted(name for name, other in absent.items() if name != other)):
        stored = absent.get(name, name)
        full, meta = _join(prefix, name), source.tensors[stored].meta
        metas[full] = meta
        for piece in source.pieces(stored):
            view = _view(maps[piece.file], regions[piece.file][piece.key], piece.box, meta.dtype)
            parts.append(one_process.Part(full, piece.box, functools.partial(_same, view)))
    return one_process.write_checkpoint(checkpoint, metas, parts, overwrite=overwrite, progress=progress)


def _same(view: torch.Tensor) -> torch.Tensor:
    return view


def _model(config: Path | None) -> Any:
    if config is None or not (config / "config.json").is_file():
        return None
    model = model_of_config(config)
    if model is None:
        logger.warning("%s: the names of the files are taken as those of the model", config / "config.json")
    return model


def _under(prefix: str, manifest: Manifest) -> dict[str, str]:
    """Return the names of the tensors under a prefix, by their names without it."""
    start = f"{prefix}/" if prefix else ""
    found = {name.removeprefix(start): name for name in manifest.tensors if name.startswith(start)}
    if not found:
        roots = sorted({name.split("/", 1)[0] for name in manifest.tensors})
        raise CheckpointError(
            f"expected tensors under {start!r} in the checkpoint, got others; pass the prefix "
            f"{format_some(map(repr, roots), limit=3)}"
        )
    return found


def _among(group: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in group if name in names)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _num_bytes(meta: TensorMeta) -> int:
    return Box.full(meta.shape).num_elements * ITEM_BYTES[meta.dtype]


def _copy_configs(config: Path | None, folder: Path) -> None:
    for name in _CONFIGS:
        if config is not None and (config / name).is_file() and config != folder:
            shutil.copyfile(config / name, folder / name)


def _mapped(path: Path, num_bytes: int) -> torch.Tensor:
    """Return the bytes of a file, of which only those in use are in memory."""
    return torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)


def _view(data: torch.Tensor, region: Region, box: Box, dtype: str) -> torch.Tensor:
    """Return the values of a block of a file."""
    size = ITEM_BYTES[dtype]
    length = Part((0,) * len(box.sizes), box.sizes, region.strides).length
    values = data[region.start : region.start + length * size]
    if region.start % size:  # which torch cannot view
        values = values.clone()
    return values.view(getattr(torch, dtype)).as_strided(box.sizes, region.strides)
