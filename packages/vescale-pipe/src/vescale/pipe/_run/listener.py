"""Waits for messages that end when another rank fails, or Ctrl-C is pressed.

A wait for a message of gloo returns to Python when the message is there, and not before: a time limit closes the
connections of the group. So the rank waits without limit, and a thread listens for what would make it wait in vain. If
there is such a thing, the thread lets another wait of the same group time out. Thereby the connections close, the wait
fails, and so do those of the ranks that it is connected to::

    main thread                              listener
    waits for a message of rank 2            sleeps
      .                                      each second: has another rank seen a failure?      yes
      .                                      waits for a message that no one sends, for 1 ms
      connections are closed: an error

Ctrl-C is noticed by Python's wakeup descriptor. Only the default handler ends a wait: one of the user's own may let the
step go on, as it is meant to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._lost_ranks import Failures, first_line

_NOTHING = contextlib.nullcontext()
_UNUSED = 1  # a tag: messages have 0


class _Wait:
    """A wait in progress, for a message over ``group``; ``is_ended`` once it was made to fail."""

    def __init__(self, group: dist.ProcessGroup, failures: Failures) -> None:
        self.group, self.failures = group, failures
        self.is_ended = False

    def end(self) -> None:
        """Close the connections of the group."""
        self.is_ended = True
        other = (self.group.rank() + 1) % self.group.size()
        with contextlib.suppress(RuntimeError):  # the time-out, or they are closed already
            work: Any = dist.irecv(torch.empty(1), group=self.group, group_src=other, tag=_UNUSED)
            work.wait(timedelta(milliseconds=1))


class Listener(threading.Thread):
    """The thread that listens while others wait; see `listener`."""

    def __init__(self) -> None:
        super().__init__(name="vescale listens", daemon=True)
        self._waits: set[_Wait] = set()
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(self._wakeup, False)
        self._step = 0  # odd while one runs
        self._interrupted = -1  # the step in which Ctrl-C was pressed
        self.start()

    def run(self) -> None:
        """Listen until the process ends."""
        before: set[_Wait] = set()
        while True:
            if select.select([self._signals], [], [], Failures.POLL.total_seconds())[0]:
                step = self._step  # before its signal is read, which the next one would drop
                if signal.SIGINT in self._read() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    self._interrupted = step
            now = self._waits.copy()
            for wait in now:
                if self._interrupted == self._step or (wait in before and wait.failures.seen()):
                    wait.end()
            before = now

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Let Ctrl-C end the waits in this context; not if something else uses the wakeup descriptor of Python."""
        if threading.current_thread() is not threading.main_thread():
            yield  # others get no signals
            return
        self._read()  # what came after the last step
        self._step += 1
        before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)
            self._step += 1

    def _read(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._signals, 1024)
        return b""

    def wait(
        self, work: Any, group: dist.ProcessGroup, failures: Failures, failed: Callable[[str], RuntimeError]
    ) -> None:
        """Wait for a send or a receive on the CPU.

        Raises:
            RuntimeError: it failed, here or on another rank; it is what ``failed`` makes of the cause.
        """
        wait = _Wait(group, failures)
        self._waits.add(wait)
        try:
            with _NOTHING if self._step % 2 else self.step():
                work.wait()
            return
        except RuntimeError as error:
            cause = error
        finally:
            self._waits.discard(wait)
        raise failed("" if wait.is_ended else first_line(cause)) from cause


_listener: Listener | None = None


def listener() -> Listener:
    """Return the one of this process."""
    global _listener
    if _listener is None or not _listener.is_alive():  # a forked process has no threads
        _listener = Listener()
    return _listener
