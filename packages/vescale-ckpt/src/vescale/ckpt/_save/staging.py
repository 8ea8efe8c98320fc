"""Copies of what a rank writes, in host memory that the next save uses again.

New memory costs more time than the copies, as the system hands it out page by page, and pinned memory is slower still.
So the buffers stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .._format.data_files import pack_files, resolved

_ALIGNMENT = 64
_BUFFER_BYTES = 256 * 1024**2  # a power of two: torch rounds pinned memory up to one


class Staging:
    """Buffers for the copies of one save at a time."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copies(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies on the CPU, valid until the next call; the copying has ended."""
        sizes = [-(-view.numel() * view.element_size() // _ALIGNMENT) * _ALIGNMENT for view in views]
        devices = {view.device for view in views if view.device.type == "cuda"}
        copies = []
        for number, run in enumerate(pack_files(sizes, max_bytes=_BUFFER_BYTES)):
            own = [sizes[i] for i in run]
            buffer = self._buffer(number, sum(own), is_pinned=bool(devices))
            for i, start in zip(run, accumulate(own, initial=0), strict=False):
                view = resolved(views[i])
                part = buffer[start : start + view.numel() * view.element_size()]
                copy = part.view(view.dtype).view(view.shape)
                copies.append(copy.copy_(view, non_blocking=view.device in devices))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _buffer(self, number: int, num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        """Return the buffer of this number, a larger one if it is too small."""
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].numel() < num_bytes:
            self._buffers[number] = torch.empty(0, dtype=torch.uint8)  # before the next one is allocated
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return self._buffers[number]
