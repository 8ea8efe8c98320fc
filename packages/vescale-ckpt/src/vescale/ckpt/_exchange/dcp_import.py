"""Make a checkpoint of a folder of ``torch.distributed.checkpoint`` (DCP) in one process.

Data files are mapped to memory: what is written is read then, so memory is bounded by a few blocks. Only chunks that
are not in row-major order are read whole.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from .._errors import CheckpointError
from .._load.plan import is_under
from .._save.save import save
from .._state.flat import from_json
from .dcp_blobs import DcpFile
from .dcp_folder import Folder, Reading, require_pickle


@dataclass(frozen=True)
class _Mapped:
    """A tensor of a folder, in memory as it is in its files."""

    __global_shape__: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[tuple[int, ...], torch.Tensor]]

    def __boxes__(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        return self.chunks


def import_dcp(where: Path, path: Path, *, allow_pickle: bool, ignore: Collection[str], overwrite: bool) -> None:
    """Save what a DCP folder has as a checkpoint; not a collective.

    Args:
        where: the folder.
        path: of the checkpoint.
        allow_pickle: as for ``load_dcp``.
        ignore: names, or leading parts of names, to leave out.
        overwrite: as for ``save``.

    Raises:
        CheckpointError: as for ``load_dcp`` and ``save``.
    """
    require_pickle(where, allow=allow_pickle)
    listing = Reading(where, {}, {}, tuple(ignore), True).listing()
    folder = Folder(where, listing, {})
    folder.check()
    manifest = folder.manifest
    state: dict[str, object] = {
        name: from_json(value, like=None) for name, value in manifest.leaves.items() if not is_under(name, ignore)
    }
    files: dict[str, DcpFile] = {}
    try:
        for name, tensor in manifest.tensors.items():
            if is_under(name, ignore):
                continue
            dtype, chunks = tensor.meta.dtype, []
            for piece in manifest.pieces(name):
                if piece.file not in files:
                    files[piece.file] = folder.open_file(piece.file)
                values = files[piece.file].mapped(piece, name=name, dtype=dtype)
                chunks.append((piece.box.offsets, values))
            state[name] = _Mapped(tensor.meta.shape, getattr(torch, dtype), chunks)
        if not state:
            raise CheckpointError(f"{where}: expected names to import, got none besides {sorted(ignore)}; ignore less")
        save(path, state, metadata={"imported_from": str(where)}, overwrite=overwrite)
    finally:
        for file in files.values():
            file.__exit__()
