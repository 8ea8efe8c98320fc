"""Add up the waits of this rank for others: on the host by a clock, on an accelerator by pairs of events.

    host          | compute | wait for work     | compute |        seconds: end - begin of the wait
    accelerator   | kernels | stream waits      | kernels |        elapsed time from an event before to one after

An event is recorded and never waited for: `WaitClock.take` reads the pairs that have passed and leaves the others for
the next time. So measuring adds no synchronization.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_MILLISECONDS = 1e-3


class WaitClock:
    """The meter that `vescale.dtensor.extension.on_wait` and `vescale.pipe.PipelineEngine.on_wait` take.

    Attributes:
        is_paused: whether waits that begin now are not measured.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._seconds = 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()

    @contextlib.contextmanager
    def waiting(self, device_type: str) -> Iterator[None]:
        """Measure one wait of this rank on a device of a type."""
        if self.is_paused:
            yield
            return
        if device_type == "cpu":
            began = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - began
            return
        event = torch.get_device_module(device_type).Event
        before, after = event(enable_timing=True), event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._pairs.append((before, after))

    def take(self) -> float:
        """Return the seconds of the waits that have ended since the last call."""
        while self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            self._seconds += before.elapsed_time(after) * _MILLISECONDS
        seconds, self._seconds = self._seconds, 0.0
        return seconds
