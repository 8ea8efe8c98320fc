"""A folder of Hugging Face that is being written: complete files appear when all of them are there.

Files are written under temporary names and flushed. A folder is complete if it has ``model.safetensors``, or the index
and its files; so what is renamed last is the one file, or the index. Where a complete folder is overwritten, that file
is removed first: a folder with files of two saves is never complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from .._errors import CheckpointError
from .._format.storage import flush_names
from .hf_files import INDEX, SINGLE
from .hf_write import NewFile

_TEMPORARY = re.compile(r"\.vescale-[0-9a-f]{8}-[0-9]+")
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


class NewFolder:
    """Files on their way to a folder.

    Args:
        path: of the folder.
        overwrite: whether there may be one already.

    Raises:
        CheckpointError: there is something at ``path``, or nothing can be written there.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self._path, self._overwrite = path, overwrite
        self.token = secrets.token_hex(4)
        self._is_new = not os.path.lexists(path)
        self._count = 0
        if not self._is_new and not path.is_dir():
            raise CheckpointError(f"{path}: expected a folder, got a file; save to another path")
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = [] if overwrite else [name for name in os.listdir(path) if not _TEMPORARY.fullmatch(name)]
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a writable path, got {type(error).__name__}: {error}; save to another path"
            ) from error
        if names:
            raise CheckpointError(
                f"{path}: expected a path that does not exist, or an empty folder, got one with {sorted(names)[0]!r}; "
                "save to another path, or pass overwrite=True to replace the weights in it"
            )

    def create(self, files: Sequence[NewFile], index: str | None) -> None:
        """Make the files with their sizes and headers, and the index."""
        self._count = len(files) + (index is not None)
        for number, file in enumerate(files):
            with open(temporary(self._path, self.token, number), "xb") as handle:
                handle.write(file.header)
                handle.truncate(file.num_bytes)
                _flush(handle)
        if index is not None:
            with open(temporary(self._path, self.token, len(files)), "xb") as handle:
                handle.write(index.encode())
                _flush(handle)

    def commit(self, names: Sequence[str], write_config: Callable[[Path], object]) -> None:
        """Give the files their names, in order, after the config; what there was before is removed first.

        Raises:
            CheckpointError: another save has been completed, where nothing may be overwritten.
        """
        for marker in (SINGLE, INDEX):
            if os.path.lexists(self._path / marker):
                if not self._overwrite:
                    raise CheckpointError(
                        f"{self._path}: expected no other save to the same path, got {marker!r} of one; save to "
                        "another path, or pass overwrite=True"
                    )
                (self._path / marker).unlink()
        flush_names(self._path)
        for name in os.listdir(self._path):
            if _SHARD.fullmatch(name):
                (self._path / name).unlink()
        write_config(self._path)
        for number, name in enumerate(names):
            if number == len(names) - 1:
                flush_names(self._path)
            os.replace(temporary(self._path, self.token, number), self._path / name)
        flush_names(self._path)
        self._count = 0

    def discard(self) -> None:
        """Remove the files that have no name yet."""
        for number in range(self._count):
            with contextlib.suppress(OSError):
                temporary(self._path, self.token, number).unlink(missing_ok=True)
        if self._is_new:
            with contextlib.suppress(OSError):  # it has files
                self._path.rmdir()


def temporary(path: Path, token: str, number: int) -> Path:
    """Return where a file is before it has its name."""
    return path / f".vescale-{token}-{number}"


def _flush(handle: object) -> None:
    handle.flush()  # type: ignore[attr-defined]
    os.fsync(handle.fileno())  # type: ignore[attr-defined]
