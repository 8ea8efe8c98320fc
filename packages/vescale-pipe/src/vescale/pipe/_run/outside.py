"""Code outside of units runs on every stage: what it may read of other stages, and change.

constants     copies of small buffers of other stages: an error if their own stage writes one that others read
attributes    of modules outside: a rank of several stages runs that code once for each, so it may set them once, as
              lazy initialization does; an error if it changes them in every forward
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from .._torch import version_of
from .mode import RunState
from .values import KeptValue, PipelineError


class Reads(Protocol):
    """A program; ``constants`` are the buffers that stages read of others."""

    constants: frozenset[str]


class OutsideCode:
    """What steps of an engine compare.

    Args:
        state: what hooks and stubs share.
        constants: returns the constants of this rank's units, by full name.
        attributes: returns what code outside of units can depend on, other than its inputs.
        is_repeated: whether this rank runs several stages.
    """

    def __init__(
        self,
        state: RunState,
        constants: Callable[[], dict[str, torch.Tensor]],
        attributes: Callable[[], tuple],
        *,
        is_repeated: bool,
    ) -> None:
        self._state, self._constants, self._attributes = state, constants, attributes
        self._is_repeated = is_repeated
        self._has_changed = False  # attributes, in the last forward

    def constants(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return the constants of this rank's units, which others may read, with their versions."""
        return {name: (own, version_of(own)) for name, own in self._constants().items()}

    def check_constants(self, before: dict[str, tuple[torch.Tensor, int]], programs: Iterable[Reads]) -> None:
        """Check that no step has written a constant that others read, be it one with other inputs.

        Raises:
            PipelineError: one has.
        """
        written, after = self._state.constants_written, self.constants()
        for name, (tensor, version) in before.items():
            if name not in after or after[name][0] is not tensor or after[name][1] != version:
                written.add(name)
        read = frozenset().union(*(program.constants for program in programs))
        for name in sorted(read & written):
            raise PipelineError(
                f"expected buffer `{name}` to stay as it is, since code outside of stage modules reads it on other "
                "stages, which have copies, got a write in its module; return it from the module, or make it a "
                "part of the state dict, which other stages do not read"
            )

    def _compared(self) -> list[Any]:
        """Return attributes, in which all values are alike: code that reads one in another forward is refused there."""
        return [KeptValue if isinstance(item, KeptValue) else item for item in self._attributes()]

    @contextlib.contextmanager
    def forward(self, *, is_recorded: bool) -> Iterator[None]:
        """Compare attributes before and after a forward that is recorded, and after the next one if they differ.

        Raises:
            PipelineError: they differ again.
        """
        if not self._is_repeated or not (is_recorded or self._has_changed):
            yield
            return
        before = self._compared()
        yield
        had_changed, self._has_changed = self._has_changed, self._compared() != before
        if had_changed and self._has_changed:
            raise PipelineError(
                "expected code outside of stage modules that leaves the attributes of its modules alone, or sets them "
                "once, since it runs once for each stage of a rank, got other values after two forwards; change them "
                "in a module with parameters, or between steps"
            )
