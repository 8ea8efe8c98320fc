"""End a process without an abort: let the threads of gloo drop what they hold while Python still runs.

A thread of gloo that has run a collective drops the tensors of it last, and needs the interpreter's lock for that.
Torch (2.13) keeps a process group alive that DTensor has communicated over, so that ``destroy_process_group`` does not
join these threads. Should one of them be late, and ask for the lock when Python has begun to end, the process aborts
after its work is done ("terminate called without an active exception"), and the launcher reports a failure.

So the main thread waits a moment before Python ends, without the lock. A thread that is late needs microseconds.
"""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["let_threads_finish"]

SECONDS = 0.1
THREADS = Path("/proc/self/task")


def let_threads_finish() -> bool:
    """Wait for a moment if there are threads of gloo, or if that is unknown; return whether it waited."""
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
        except OSError:  # it has ended meanwhile
            continue
    return any("gloo" in name for name in names)
