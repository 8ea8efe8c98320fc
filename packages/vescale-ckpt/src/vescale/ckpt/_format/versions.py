"""The directory of a checkpoint, and how a new version takes the place of the one before.

    step-100/
      manifest.json               names the folder of the present version
      save-1f0c22ab/              its data files
      save-77de01c4/              of a save that runs, or that did not finish

A save writes its files to a folder of its own, flushed to disk. Then it writes the manifest beside the present one and
renames it to ``manifest.json``, which takes its place at once. So at any moment the directory has the version before,
complete, or the new one, complete. Only then the folder of the version before is removed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import stat
from pathlib import Path

from .._errors import CheckpointError
from .manifest import FOLDER_NAME, MANIFEST_NAME, Manifest, folder_of
from .storage import (
    exists,
    file_sizes,
    flush_names,
    is_remote,
    make_folder,
    names_in,
    new_file,
    place_new,
    remove_tree,
    replace,
)

logger = logging.getLogger("vescale.ckpt")

_TEMPORARY_NAME = re.compile(re.escape(MANIFEST_NAME) + r"\.[0-9a-f]{8}")


class NewVersion:
    """A version of a checkpoint that is not complete yet.

    Args:
        path: the checkpoint's directory.
        overwrite: whether there may be a version already.

    Attributes:
        folder: for its data files.

    Raises:
        CheckpointError: there is something else at ``path``, or nothing can be written there.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self._path, self._overwrite = path, overwrite
        token = secrets.token_hex(4)
        self.folder, self._text = path / f"save-{token}", path / f"{MANIFEST_NAME}.{token}"
        self._is_new = not exists(path)
        if not self._is_new:
            _check_place(path, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
            make_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a writable path, got {type(error).__name__}: {error}; save to another path"
            ) from error

    def commit(self, text: str) -> None:
        """Let this version be the checkpoint, with its manifest, and remove the one before.

        Raises:
            CheckpointError: another save has been completed, where nothing may be overwritten.
        """
        flush_names(self.folder)
        with new_file(self._text) as file:
            file.write(text.encode())
        before = present_folder(self._path)
        manifest = self._path / MANIFEST_NAME
        if self._overwrite:
            replace(self._text, manifest)
        elif not place_new(self._text, manifest):
            raise CheckpointError(
                f"{self._path}: expected no other save to the same path, got one that was completed meanwhile; save to "
                "another path, or pass overwrite=True to replace a checkpoint"
            )
        flush_names(self._path)
        if self._is_new:
            flush_names(self._path.parent)
        if before is not None:
            with contextlib.suppress(OSError):
                remove_tree(self._path / before)

    def discard(self) -> None:
        """Remove what there is of this version, unless it is the checkpoint already."""
        if present_folder(self._path) == self.folder.name:
            return
        with contextlib.suppress(OSError):
            remove_tree(self.folder)
        with contextlib.suppress(OSError):
            self._text.unlink(missing_ok=True)
        if self._is_new:
            with contextlib.suppress(OSError):  # another save may have come
                self._path.rmdir()


def require_folder(folder: Path, rank: int) -> None:
    """Check that the folder that rank 0 has made is there on this rank, too.

    Raises:
        CheckpointError: it is not.
    """
    if not (is_remote(folder) or folder.is_dir()):
        raise CheckpointError(
            f"rank {rank}: expected the folder {folder} of rank 0, got no such folder; save to a file system shared by "
            "all ranks"
        )


def check_files(where: Path, manifest: Manifest) -> None:
    """Check that all data files of a version exist as regular files, with the sizes of the manifest.

    Raises:
        CheckpointError: a data file is missing, is another kind of file, or has another size.
    """
    if (where / manifest.folder).is_symlink():
        raise CheckpointError(
            f"{where}: expected a folder, got a symbolic link at {manifest.folder!r}; copy the files to where it is"
        )
    folder = where / manifest.folder
    remote = _remote_sizes(folder) if is_remote(where) else None
    for file, stored in manifest.files.items():
        try:
            size = _size_of(folder / file, where) if remote is None else remote[file]
        except (OSError, KeyError) as error:
            fix = "read it again" if was_replaced(where, manifest) else "restore it, or use another checkpoint"
            got = getattr(error, "strerror", None) or "none"
            raise CheckpointError(f"{where}: expected data file {file!r}, got {got}; {fix}") from error
        if size != stored.num_bytes:
            raise CheckpointError(
                f"{where}: expected {stored.num_bytes} bytes in data file {file!r}, got {size}; restore it, or use "
                "another checkpoint"
            )


def _remote_sizes(folder: Path) -> dict[str, int]:
    try:
        return file_sizes(folder)
    except FileNotFoundError:
        return {}


def _size_of(path: Path, where: Path) -> int:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "another kind of file"
        raise CheckpointError(
            f"{where}: expected a regular data file {path.name!r}, got {kind}; copy it to where it is"
        )
    return found.st_size


def was_replaced(where: Path, manifest: Manifest) -> bool:
    """Return whether a save has replaced the version of a manifest since it was read."""
    return present_folder(where) not in (None, manifest.folder)


def present_folder(path: Path) -> str | None:
    """Return the name of the folder of the present version, if there is one that can be read."""
    try:
        return folder_of((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _check_place(path: Path, *, overwrite: bool) -> None:
    """Check that a save may write to an existing path: to a checkpoint, or to what an unfinished save has left."""
    names = names_in(path) if path.is_dir() else [""]
    left = [name for name in names if FOLDER_NAME.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name)]
    foreign = len(left) < len(names)
    if overwrite and foreign and MANIFEST_NAME not in names:
        raise CheckpointError(
            f"{path}: expected a checkpoint to overwrite, got no {MANIFEST_NAME}; save to another path"
        )
    if foreign and not overwrite:
        raise CheckpointError(
            f"{path}: expected a path that does not exist, got an existing one; save to another path, or pass "
            "overwrite=True to replace a checkpoint"
        )
    present = present_folder(path)
    for name in left:
        if name != present:
            logger.warning("%s is left over from a save that did not finish, or is still running", path / name)
