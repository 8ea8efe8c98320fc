"""Inspect a checkpoint without loading it: read its manifest, and verify all bytes."""

import os
from collections import defaultdict
from pathlib import Path

from .._checked import FilePath, checked
from .._errors import CheckpointError
from .files import find_old_versions, open_data_file
from .manifest import MANIFEST_NAME, Manifest, Piece, manifest_from_text


@checked
def read_manifest(path: FilePath) -> Manifest:
    """Read the manifest of a checkpoint and check that its data files are there, with their sizes.

    Not a collective; reads no tensor data.

    Args:
        path: directory that ``save`` made.

    Raises:
        CheckpointError: ``path`` is not a complete checkpoint.

    Example:
        >>> save("runs/step-10", {"step": 10}, metadata={"note": "first"}, overwrite=True)
        >>> read_manifest("runs/step-10").metadata
        {'note': 'first'}
    """
    where = Path(os.path.abspath(path))
    manifest = manifest_from_text(read_manifest_text(where), where=str(where))
    check_files(where, manifest)
    return manifest


@checked
def verify(path: FilePath) -> Manifest:
    """Read every byte of a checkpoint and compare all checksums.

    Not a collective: call it in one process.

    Args:
        path: directory that ``save`` made.

    Returns:
        The manifest.

    Raises:
        CheckpointError: pieces are damaged (the text lists all), or as for ``read_manifest``.

    Example:
        >>> save("runs/step-10", {"step": 10}, overwrite=True)
        >>> verify("runs/step-10").world_size
        1
    """
    where = Path(os.path.abspath(path))
    manifest = read_manifest(where)
    pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            pieces[piece.file].append((name, piece))
    faults = [fault for file in sorted(pieces) for fault in _verify_file(where / file, pieces[file], manifest)]
    if faults:
        raise CheckpointError(
            f"{where}: expected undamaged pieces, got faults in {len(faults)}; use another checkpoint:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )
    return manifest


def read_manifest_text(where: Path) -> str:
    """Return the text of the manifest at ``where``.

    Raises:
        CheckpointError: there is no manifest; the text names an earlier version, if any.
    """
    try:
        return (where / MANIFEST_NAME).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{where}: expected text in {MANIFEST_NAME}, got {error}; it was changed, so use another checkpoint"
        ) from None
    except ValueError as error:  # a path that no file system takes
        raise CheckpointError(f"{where}: expected a checkpoint, got {error}; check the path") from None
    except OSError as error:
        old = [str(other) for other in find_old_versions(where)]
        hint = f"an earlier version is at {', '.join(old)}" if old else "check the path"
        if where.is_dir() and not (where / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{where}: expected a complete checkpoint, got a directory without {MANIFEST_NAME}; {hint}"
            ) from None
        raise CheckpointError(f"{where}: expected a checkpoint, got {error.strerror}; {hint}") from None


def check_files(where: Path, manifest: Manifest) -> None:
    """Check that all data files exist with the sizes of the manifest.

    Raises:
        CheckpointError: a data file is missing or has another size.
    """
    for file, size in manifest.files.items():
        try:
            found = (where / file).stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{where}: expected data file {file!r}, got {error.strerror}; restore it, or use another checkpoint"
            ) from error
        if found != size:
            raise CheckpointError(
                f"{where}: expected {size} bytes in data file {file!r}, got {found}; restore it, or use another "
                "checkpoint"
            )


def _verify_file(path: Path, pieces: list[tuple[str, Piece]], manifest: Manifest) -> list[str]:
    faults = []
    try:
        with open_data_file(path) as opened:
            for name, piece in pieces:
                try:
                    opened.read(piece, piece.box, name=name, dtype=manifest.tensors[name].meta.dtype)
                except CheckpointError as error:
                    faults.append(str(error))
    except CheckpointError as error:
        faults.append(str(error))
    return faults
