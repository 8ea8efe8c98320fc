"""Make background work deterministic in tests.

If code forgets to wait, its test still passes when the background work is fast. With `begin_late` it always fails:

    begin_late(monkeypatch, Buffer, "gather")       # Buffer.gather(...) returns something with wait()

A background thread may hold memory for a moment after its work has ended. With `ask_again` a test does not depend on
that time:

    ask_again(monkeypatch, Buffer, "is_shared")     # true only if it stays true
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["ask_again", "begin_late"]

#: Seconds for which an answer must stay true, and between two questions.
_STAYS = 0.3
_NAP = 0.02


class Late:
    """Something pending that begins, and ends, in `wait`."""

    def __init__(self, begin: Callable[[], Any]):
        self._begin = begin

    def wait(self) -> Any:
        """Begin it and wait for it."""
        return self._begin().wait()


def begin_late(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Delay the method `name` of `owner`, which starts work and returns a handle, until `wait()` on that handle.

    On several ranks all must wait in the same order.

    Args:
        patch: Undoes it.
        owner: The class.
        name: Its method; the returned handle has `wait()`.

    Example:
        >>> class Job:
        ...     def start(self):
        ...         print("started")
        ...         return self
        ...     def wait(self):
        ...         print("done")
        >>> with pytest.MonkeyPatch.context() as patch:
        ...     begin_late(patch, Job, "start")
        ...     pending = Job().start()
        ...     pending.wait()
        started
        done
    """
    begin = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: Late(functools.partial(begin, *args, **kwargs)))


def ask_again(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let the method `name` of `owner` return true only if it stays true for 0.3 s; false is returned immediately.

    Args:
        patch: Undoes it.
        owner: The class.
        name: Its method, which may be called often and changes nothing.

    Example:
        >>> class Buffer:
        ...     holders = 3
        ...     def is_shared(self):
        ...         self.holders -= 1
        ...         return self.holders > 0
        >>> with pytest.MonkeyPatch.context() as patch:
        ...     ask_again(patch, Buffer, "is_shared")
        ...     Buffer().is_shared()
        False
    """
    ask = getattr(owner, name)

    def patient(*args: Any, **kwargs: Any) -> Any:
        end = time.monotonic() + _STAYS
        while (answer := ask(*args, **kwargs)) and time.monotonic() < end:
            time.sleep(_NAP)
        return answer

    patch.setattr(owner, name, patient)
