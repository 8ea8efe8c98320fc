"""The last round of a save in a thread, while training goes on: one save at a time in a process.

    main thread      rounds 1 and 2, copies |  training ...  | the next save, load or latest waits, and raises
    thread                                  |  files, commit |

The thread has a process group of its own: collectives of two threads in one group would mix.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ._control import Control, control_of, own_group
from ._errors import CheckpointError

logger = logging.getLogger("vescale.ckpt")


class _Background(threading.Thread):
    """Runs the end of the save to ``path``; the interpreter waits for it before it ends."""

    def __init__(self, path: Path, run: Callable[[], None]) -> None:
        super().__init__(name=f"vescale saves {path.name}")
        self.path = path
        self.error: BaseException | None = None
        self._end_save: Callable[[], None] | None = run

    def run(self) -> None:
        """Run, and keep nothing but the error."""
        end_save, self._end_save = self._end_save, None
        assert end_save is not None, "a thread runs once"
        try:
            with torch.no_grad():
                end_save()
        except BaseException as error:
            logger.error("the asynchronous save of %s failed: %s", self.path, error)
            self.error = error


_present: _Background | None = None


def start(path: Path, run: Callable[[], None]) -> None:
    """Run the end of the save to ``path`` in a thread; the one before has been waited for."""
    global _present
    _present = _Background(path, run)
    _present.start()


def settle() -> None:
    """Wait for the save in the background, if any.

    Raises:
        CheckpointError: it failed.
    """
    global _present
    if (present := _present) is None:
        return
    present.join()
    _present = None
    if present.error is not None:
        raise CheckpointError(
            f"expected the asynchronous save of {present.path} to succeed, got {present.error}; save again"
        ) from present.error


def wait() -> None:
    """Wait until the save that ``save(async_=True)`` began on this rank is complete and on disk.

    Returns at once if there is none. Other ranks need not call it. Call it before
    ``torch.distributed.destroy_process_group`` and before other programs read the checkpoint; a program that ends, and
    the next ``save``, ``load`` and ``latest`` wait by themselves.

    Raises:
        CheckpointError: the save failed; ``path`` is as it was before. It is raised once: here, or by the next
            ``save``, ``load`` or ``latest``.

    Example:
        >>> save("runs/step-10", {"step": 10}, overwrite=True, async_=True)
        >>> wait()
        >>> read_manifest("runs/step-10").leaves
        {'step': 10}
    """
    settle()


def background_control(control: Control) -> Control:
    """Return the ranks of ``control`` with a process group for the thread; a collective when it is first called."""
    if control.failures is None:  # one process, without groups
        return control
    key = control.ranks, "background"
    if own_group(*key) is None:
        control.make_groups([key])
    return control_of(own_group(*key), name="background")
