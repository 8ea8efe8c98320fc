"""Let a meter measure waits for collectives: on the CPU the process waits, on an accelerator its current stream.

    with on_wait(meter):
        train()                       each wait for a collective runs inside `meter.waiting("cpu")`

This is what shows exposed communication: time in which a rank has nothing to compute before another rank's data comes.
A wait for a collective that has ended takes nothing, however long the collective took.

Meters are process-wide, because autograd waits on threads of its own. Without one, a wait costs one check of an empty
list more. Collectives that a graph of ``torch.compile`` launches, and DTensors' own on accelerators, are awaited inside
torch and not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from ._checked import checked

__all__ = ["METERS", "WaitMeter", "on_wait", "waiting"]


@runtime_checkable
class WaitMeter(Protocol):
    """Measures waits."""

    def waiting(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Return a context for one wait of this rank on a device of a type."""


#: The meters that are open, in the order in which they were opened.
METERS: list[WaitMeter] = []


@checked
@contextlib.contextmanager
def on_wait(meter: WaitMeter) -> Iterator[None]:
    """Let ``meter`` measure every wait for a collective of this process inside the context."""
    METERS.append(meter)
    try:
        yield
    finally:
        METERS.remove(meter)


@contextlib.contextmanager
def waiting(device_type: str) -> Iterator[None]:
    """Let the open meters measure what runs inside. Callers check `METERS` first, which is almost always empty."""
    with contextlib.ExitStack() as stack:
        for meter in list(METERS):
            stack.enter_context(meter.waiting(device_type))
        yield
