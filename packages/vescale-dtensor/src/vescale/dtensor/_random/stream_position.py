"""Where the random streams of a process are, to see whether anybody has drawn since."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["Position", "random_position"]

_compare_memory = ctypes.CDLL(None).memcmp
_compare_memory.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Position:
    """The state of torch's default generators; see :func:`random_position`.

    It is made and compared at the start and at the end of every call of a module, so both take about a microsecond
    (``torch.equal`` of two states takes several).
    """

    __slots__ = ("_state",)

    def __init__(self, device_type: str):
        state = torch.get_rng_state()  # also where the stream "philox" of all devices is
        if device_type != "cpu":
            device = torch.get_device_module(device_type)
            if not getattr(device, "is_current_stream_capturing", bool)():  # then no generator answers
                state = torch.cat([state, device.get_rng_state()])
        self._state = state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Position) or self._state.nbytes != other._state.nbytes:
            return NotImplemented
        return not _compare_memory(self._state.data_ptr(), other._state.data_ptr(), self._state.nbytes)


def random_position(device_type: str = "cpu") -> Position:
    """Return the positions of the random streams of the CPU and of a kind of device; equal until something draws.

    A position covers every draw from torch's default generators, by any code, and seeding; of a device, those of the
    current one. It does not cover generators that a program has created. On the CPU it takes about a microsecond.

    Example:
        >>> before = random_position()
        >>> random_position() == before
        True
        >>> dropped = torch.nn.functional.dropout(torch.ones(3), 0.5)
        >>> random_position() == before
        False
    """
    return Position(device_type)
