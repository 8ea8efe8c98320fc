"""Inspect a checkpoint without loading it: read its manifest, and verify all bytes."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from .._checked import FilePath, checked
from .._errors import CheckpointError
from .data_files import DataFile
from .manifest import MANIFEST_NAME, Manifest, Piece, check_pieces, manifest_from_text
from .storage import place_of
from .versions import check_files


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
    return manifest_at(place_of(path))


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
    where = place_of(path)
    manifest = manifest_at(where)
    verify_files(where, manifest, lambda _: None)
    return manifest


def verify_files(where: Path, manifest: Manifest, progress: Callable[[int], None]) -> None:
    """Compare all checksums; ``progress`` is told of the bytes of each file that was read.

    Raises:
        CheckpointError: as for ``verify``.
    """
    pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for name in manifest.tensors:
        for piece in manifest.pieces(name):
            pieces[piece.file].append((name, piece))
    faults = []
    for file in sorted(manifest.files):
        faults += _verify_file(where, file, pieces[file], manifest)
        progress(manifest.files[file].num_bytes)
    if faults:
        raise CheckpointError(
            f"{where}: expected undamaged pieces, got faults in {len(faults)}; use another checkpoint:\n"
            + "\n".join(f"  - {fault}" for fault in faults)
        )


def manifest_at(where: Path) -> Manifest:
    """Return the manifest of the checkpoint at a place; see ``read_manifest``."""
    return checked_manifest(where, read_manifest_text(where))


def checked_manifest(where: Path, text: str) -> Manifest:
    """Return the manifest of a checkpoint from its text; its files are there, and have pieces that tile its tensors.

    Raises:
        CheckpointError: the text is no manifest, or it does not fit the files.
    """
    manifest = manifest_from_text(text, where=str(where))
    check_files(where, manifest)
    check_pieces(manifest, str(where))
    return manifest


def read_manifest_text(where: Path) -> str:
    """Return the text of the manifest at ``where``.

    Raises:
        CheckpointError: there is no manifest.
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
        if where.is_dir() and not (where / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{where}: expected a complete checkpoint, got a directory without {MANIFEST_NAME}; a "
                "save runs or did not finish, so use another checkpoint"
            ) from None
        raise CheckpointError(
            f"{where}: expected a checkpoint, got {error.strerror or type(error).__name__}; check the path"
        ) from None


def _verify_file(where: Path, file: str, pieces: list[tuple[str, Piece]], manifest: Manifest) -> list[str]:
    faults = []
    try:
        with DataFile(where / manifest.folder / file, manifest.files[file]) as opened:
            for name, piece in pieces:
                try:
                    opened.check(piece, name=name, dtype=manifest.tensors[name].meta.dtype)
                except CheckpointError as error:
                    faults.append(str(error))
    except CheckpointError as error:
        faults.append(str(error))
    return faults
