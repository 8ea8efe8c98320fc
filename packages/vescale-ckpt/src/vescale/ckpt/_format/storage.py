"""Where checkpoints are: paths of a file system, and URLs of whatever fsspec knows, such as ``s3://bucket/run``.

URLs become paths of universal-pathlib, which has the methods of ``pathlib``. This module has what differs. A file
system has links, flushes and renames. An object store replaces one object at once, has no directories, and writes a
file from its begin to its end.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import re
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from .._errors import CheckpointError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# a link may lead out of the checkpoint, and a pipe would be waited for
_FLAGS = ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
_READ_AHEAD_BYTES = 16 * 1024**2


def place_of(path: str | os.PathLike) -> Path:
    """Return an absolute path, or that of a URL, which is none of ``pathlib`` but has its methods.

    Raises:
        CheckpointError: the package for URLs, or for this kind of URL, is not installed.
    """
    text = os.fspath(path)
    if not (isinstance(text, str) and _URL.match(text)):
        return Path(os.path.abspath(path))
    try:
        from upath import UPath
    except ImportError:
        raise CheckpointError(
            f"{text}: expected the package universal-pathlib for a URL, got none; pip install 'vescale-ckpt[fsspec]'"
        ) from None
    try:
        place: Any = UPath(text)
        place.fs  # noqa: B018
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text}: expected a URL that fsspec can open, got {error}; check it") from None
    return Path(os.path.abspath(place)) if isinstance(place, os.PathLike) else place


def is_remote(path: Path) -> bool:
    """Return whether a path came from a URL."""
    return not isinstance(path, Path)


def names_in(path: Path) -> list[str]:
    """Return the names in a directory, in order.

    Raises:
        OSError: there is none.
    """
    if not is_remote(path):
        return sorted(os.listdir(path))
    _forget(path)
    return sorted(child.name for child in path.iterdir())


def exists(path: Path) -> bool:
    """Return whether there is something, be it a link to nothing."""
    if not is_remote(path):
        return os.path.lexists(path)
    _forget(path)
    return path.exists()


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of the files in the folder of a URL, with one request."""
    fs: Any = _forget(folder)
    found = fs.ls(_inner(folder), detail=True)
    return {item["name"].rstrip("/").rpartition("/")[2]: item["size"] for item in found if item["type"] == "file"}


def open_to_read(path: Path) -> tuple[Any, int]:
    """Open a file, and return it with its size.

    Raises:
        OSError: there is none, or a link, or another kind of file.
    """
    if is_remote(path):
        fs: Any = path.fs  # type: ignore[attr-defined]
        size = fs.info(_inner(path))["size"]
        return fs.open(_inner(path), "rb", block_size=_READ_AHEAD_BYTES, cache_type="readahead"), size
    handle = os.open(path, functools.reduce(operator.or_, (getattr(os, flag, 0) for flag in _FLAGS)))
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "another kind of file")
    return FileIO(handle, "r"), found.st_size


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which is on disk in the end; there is none of this name yet."""
    if is_remote(path):
        fs: Any = path.fs  # type: ignore[attr-defined]
        with fs.open(_inner(path), "wb") as file:
            yield file
        return
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Make a directory that there is not yet."""
    if is_remote(path):
        path.mkdir(parents=True, exist_ok=True)  # which may do nothing
    else:
        path.mkdir()


def remove_tree(path: Path) -> None:
    """Remove a directory with its files."""
    if is_remote(path):
        fs: Any = _forget(path)
        with contextlib.suppress(FileNotFoundError):
            fs.rm(_inner(path), recursive=True)
    else:
        shutil.rmtree(path)


def replace(new: Path, path: Path) -> None:
    """Give a file the name of another one, whose place it takes at once."""
    if is_remote(path):
        _move(new, path)
    else:
        os.replace(new, path)


def place_new(new: Path, path: Path) -> bool:
    """Give a file a name that must be free, at once where the storage can; return whether it was free."""
    if is_remote(path):
        if exists(path):
            return False
        _move(new, path)
        return True
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if os.path.lexists(path):
            return False
        os.rename(new, path)
    else:
        new.unlink()
    return True


def flush_names(path: Path) -> None:
    """Flush the names in a directory to disk."""
    if is_remote(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot flush a directory
            os.fsync(handle)
    finally:
        os.close(handle)


def _move(new: Path, path: Path) -> None:
    """Move an object to a name: a store copies it, and removes the first one."""
    fs: Any = new.fs  # type: ignore[attr-defined]
    fs.mv(_inner(new), _inner(path))


def _inner(path: Path) -> str:
    """Return the path as its file system knows it."""
    inner: str = path.path  # type: ignore[attr-defined]
    return inner


def _forget(path: Path) -> Any:
    """Return the file system of a URL, without what it remembers of directories: other ranks write there."""
    fs: Any = path.fs  # type: ignore[attr-defined]
    fs.invalidate_cache()
    return fs
