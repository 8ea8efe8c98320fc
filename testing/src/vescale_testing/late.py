"""Delay what is started in the background until somebody waits for it, so that nobody can have used its result before.

A test whose code forgets to wait still passes when the background is quick. With `begin_late` it cannot:

    begin_late(monkeypatch, Buffer, "gather")       # Buffer.gather(...) returns something with wait()
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


class Late:
    """Something pending that begins, and ends, in `wait`."""

    def __init__(self, begin: Callable[[], Any]):
        self._begin = begin

    def wait(self) -> Any:
        """Begin it and wait for it."""
        return self._begin().wait()


def begin_late(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let the method `name` of `owner`, which starts something and returns what waits for it, start nothing till then.

    On several ranks all must wait in the same order.

    Args:
        patch: Undoes it.
        owner: The class.
        name: Its method; what it returns has `wait()`.

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
