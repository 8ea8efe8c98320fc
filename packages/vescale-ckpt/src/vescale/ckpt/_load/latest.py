"""Find the checkpoint to go on from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._background import settle
from .._checked import CheckedInside, FilePath, checked
from .._control import open_control
from .._errors import as_text, require_same
from .._format.series import complete_in
from .._format.storage import is_remote, place_of

_NAME: Any = str | None


@dataclass(frozen=True)
class _Found:
    """Where a rank looks, and the name of the last checkpoint there, on the first one."""

    directory: str
    name: str | None


@checked
def latest(directory: FilePath, *, process_group: CheckedInside[dist.ProcessGroup | None] = None) -> Path | str | None:
    """Return the checkpoint in a directory that was saved last, or None if there is none.

    It is a URL if ``directory`` is one. A collective: all ranks get the answer of the first one. Checkpoints that are
    not complete, or that miss data files, are skipped with a warning.

    Args:
        directory: where the checkpoints are, each in a directory of its own; it need not exist.
        process_group: as for ``save``.

    Raises:
        CheckpointError: the ranks have given several directories.

    Example:
        >>> save("runs/step-10", {"step": 10}, overwrite=True)
        >>> save("runs/step-20", {"step": 20}, overwrite=True)
        >>> latest("runs").name
        'step-20'
    """
    where = Path()
    with open_control(process_group) as control:

        def find() -> _Found:
            nonlocal where
            settle()
            where = place_of(directory)
            found = complete_in(where) if control.rank == 0 else []
            return _Found(as_text(where), found[-1][0].name if found else None)

        def choose(answers: list[_Found]) -> list[str | None]:
            require_same("directory", [answer.directory for answer in answers])
            return [answers[0].name] * control.size

        name: str | None = control.run_round(find, choose, result=_Found, share=_NAME)
    if name is None:
        return None
    return f"{os.fspath(directory).rstrip('/')}/{name}" if is_remote(where) else where / name
