"""How far a long operation is, for people who look at a terminal, or for a function of theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Self

from ._errors import CheckpointError

#: Takes the bytes that are done, and all bytes.
Listener = Callable[[int, int], object]


class Progress:
    """Counts the bytes that are done, and shows them on a terminal, on standard error.

    Use it as a context, which removes what is shown in the end.

    Args:
        verb: what is done with the bytes.
        total: number of bytes in all.
        is_shown: whether to show anything.
        listener: is called with the counts, if there is one.
    """

    def __init__(self, verb: str, total: int, *, is_shown: bool = True, listener: Listener | None = None) -> None:
        self._is_shown = is_shown and sys.stderr.isatty()
        self._verb, self._total, self._listener = verb, total, listener
        self._done, self._shown = 0, -1

    @classmethod
    def asked(cls, verb: str, progress: bool | Listener, rank: int) -> Self:
        """Return that of an argument ``progress``, on a rank: the first one alone shows anything."""
        is_first = rank == 0
        if isinstance(progress, bool):
            return cls(verb, 0, is_shown=progress and is_first)
        return cls(verb, 0, is_shown=False, listener=progress if is_first else None)

    def __call__(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._done += num_bytes
        self._tell()
        percent = 100 * self._done // max(self._total, 1)
        if self._is_shown and percent != self._shown:
            self._shown = percent
            text = f"{self._verb} {size_text(self._done)} of {size_text(self._total)}, {percent}%"
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)

    def _tell(self) -> None:
        if self._listener is None:
            return
        try:
            self._listener(self._done, self._total)
        except Exception as error:
            raise CheckpointError(
                f"expected progress(bytes_done, bytes_total) to return, got {type(error).__name__}: {error}; correct "
                "the function"
            ) from error

    def of(self, num_bytes: int, total: int) -> None:
        """Count bytes that are done, of a total that is known only now."""
        self._total = total
        self(num_bytes)

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove what is shown."""
        self.end()

    def end(self) -> None:
        """Remove what is shown."""
        if self._shown >= 0:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)
            self._shown = -1


def size_text(num_bytes: int) -> str:
    """Return a number of bytes with its unit."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"
