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
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from .._errors import CheckpointError
from .manifest import FOLDER_NAME, MANIFEST_NAME, Manifest, folder_of

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
        self._is_new = not os.path.lexists(path)
        if not self._is_new:
            _check_place(path, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a writable path, got {type(error).__name__}: {error}; save to another path"
            ) from error

    def commit(self, text: str) -> None:
        """Let this version be the checkpoint, with its manifest, and remove the one before.

        Raises:
            CheckpointError: another save has been completed, where nothing may be overwritten.
        """
        _sync_directory(self.folder)
        with open(self._text, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        before = present_folder(self._path)
        manifest = self._path / MANIFEST_NAME
        if self._overwrite:
            os.replace(self._text, manifest)
        else:
            _place_new(self._text, manifest)
        _sync_directory(self._path)
        if self._is_new:
            _sync_directory(self._path.parent)
        if before is not None:
            shutil.rmtree(self._path / before, ignore_errors=True)

    def discard(self) -> None:
        """Remove what there is of this version, unless it is the checkpoint already."""
        if present_folder(self._path) == self.folder.name:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._text.unlink(missing_ok=True)
        if self._is_new:
            with contextlib.suppress(OSError):  # another save may have come
                self._path.rmdir()


def check_files(where: Path, manifest: Manifest) -> None:
    """Check that all data files of a version exist as regular files, with the sizes of the manifest.

    Raises:
        CheckpointError: a data file is missing, is another kind of file, or has another size.
    """
    if (where / manifest.folder).is_symlink():
        raise CheckpointError(
            f"{where}: expected a folder, got a symbolic link at {manifest.folder!r}; copy the files to where it is"
        )
    for file, stored in manifest.files.items():
        try:
            found = (where / manifest.folder / file).lstat()
        except OSError as error:
            fix = "read it again" if was_replaced(where, manifest) else "restore it, or use another checkpoint"
            raise CheckpointError(f"{where}: expected data file {file!r}, got {error.strerror}; {fix}") from error
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "another kind of file"
            raise CheckpointError(f"{where}: expected a regular data file {file!r}, got {kind}; copy it to where it is")
        if found.st_size != stored.num_bytes:
            raise CheckpointError(
                f"{where}: expected {stored.num_bytes} bytes in data file {file!r}, got {found.st_size}; restore it, "
                "or use another checkpoint"
            )


def was_replaced(where: Path, manifest: Manifest) -> bool:
    """Return whether a save has replaced the version of a manifest since it was read."""
    return present_folder(where) not in (None, manifest.folder)


def present_folder(path: Path) -> str | None:
    """Return the name of the folder of the present version, if there is one that can be read."""
    try:
        return folder_of((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot flush a directory
            os.fsync(handle)
    finally:
        os.close(handle)


def _check_place(path: Path, *, overwrite: bool) -> None:
    """Check that a save may write to an existing path: to a checkpoint, or to what an unfinished save has left."""
    names = sorted(os.listdir(path)) if path.is_dir() else [""]
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


def _place_new(text: Path, manifest: Path) -> None:
    """Rename a file to a name that must be free, at once."""
    is_taken = False
    try:
        os.link(text, manifest)
    except FileExistsError:
        is_taken = True
    except OSError:  # a file system without links
        is_taken = os.path.lexists(manifest)
        if not is_taken:
            os.rename(text, manifest)
    else:
        text.unlink()
    if is_taken:
        raise CheckpointError(
            f"{manifest.parent}: expected no other save to the same path, got one that was completed meanwhile; save "
            "to another path, or pass overwrite=True to replace a checkpoint"
        )
