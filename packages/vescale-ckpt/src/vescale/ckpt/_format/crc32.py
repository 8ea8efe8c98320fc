"""CRC-32, by zlib-ng if it is installed: faster than Python's zlib, with the same results."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any


def _fastest() -> Callable[[Any], int]:
    try:
        from zlib_ng import zlib_ng
    except ImportError:
        return zlib.crc32
    function: Callable[[Any], int] = zlib_ng.crc32
    return function


crc32 = _fastest()
