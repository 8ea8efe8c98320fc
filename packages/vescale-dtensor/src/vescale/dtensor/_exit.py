"""End a process without an abort: let the threads of gloo release their tensors while Python still runs.

A gloo thread that has run a collective releases the tensors of the collective last, and needs the interpreter lock for
that. Torch (2.13) keeps a process group alive after DTensor has communicated over it, so ``destroy_process_group`` does
not join these threads. If such a thread requests the lock during the shutdown of Python, the process aborts after its
work is done ("terminate called without an active exception"), and the launcher reports a failure.

So the main thread waits a moment before Python shuts down, without the lock. A gloo thread needs microseconds.
"""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["wait_for_gloo_threads"]

SECONDS = 0.1
THREADS = Path("/proc/self/task")


def wait_for_gloo_threads() -> bool:
    """Wait a moment if this process has threads of gloo, or if that is unknown; return whether the call waited.

    To be called last, after all process groups are destroyed.
    """
    waits = _has_gloo_threads()
    if waits:
        time.sleep(SECONDS)
    return waits


def _has_gloo_threads() -> bool:
    if not THREADS.exists():  # not Linux
        return True
    names = []
    for thread in THREADS.iterdir():
        try:
            names.append(thread.joinpath("comm").read_text())
        except OSError:  # the thread has ended
            continue
    return any("gloo" in name for name in names)
