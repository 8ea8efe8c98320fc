"""The checkpoints of one run: directories beside each other, such as ``runs/step-100`` and ``runs/step-200``."""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path

from .._errors import CheckpointError
from .inspect import manifest_at
from .manifest import MANIFEST_NAME, Manifest
from .storage import names_in, remove_tree

logger = logging.getLogger("vescale.ckpt")


def complete_in(directory: Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints in a directory, in the order in which they were saved."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in [directory / name for name in names_in(directory)]:
            if (path / MANIFEST_NAME).is_file():
                try:
                    manifest = manifest_at(path)
                except CheckpointError as error:
                    logger.warning("skipped a checkpoint that cannot be loaded: %s", error)
                    continue
                found.append((path, manifest))
    return sorted(found, key=lambda item: item[1].saved_at)


def series_of(name: str) -> str | None:
    """Return a name without the number at its end, such as ``"step-"`` of ``"step-100"``; None if it has none."""
    found = re.fullmatch(r"(.*?)[0-9]+", name)
    return None if found is None else found[1]


def remove_earlier(path: Path, *, keep: int) -> None:
    """Remove all checkpoints of the series of ``path`` but this one and the last of the others, ``keep`` in all.

    A checkpoint loses its manifest first: one that is removed in part is an incomplete one. Other files stay, and links
    are left alone. What cannot be removed is logged: the save is complete.
    """
    series = series_of(path.name)
    try:
        found = complete_in(path.parent)
    except OSError as error:
        logger.warning("earlier checkpoints could not be removed: %s", error)
        return
    others = [
        (other, manifest)
        for other, manifest in found
        if other != path and not other.is_symlink() and series_of(other.name) == series
    ]
    for each, manifest in others[: max(0, len(others) - keep + 1)]:
        try:
            (each / MANIFEST_NAME).unlink()
            remove_tree(each / manifest.folder)
        except OSError as error:
            logger.warning("%s could not be removed: %s", each, error)
            continue
        with contextlib.suppress(OSError):  # there are other files
            each.rmdir()
        logger.info("removed %s, as the last %d are kept", each, keep)
