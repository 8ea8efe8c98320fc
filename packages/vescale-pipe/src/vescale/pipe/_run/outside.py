"""Code outside of units runs on every stage: what it may read of other stages, and change.

constants     copies of small buffers, and of plain attributes, of other stages: an error if their own stage changes one
              that others read
attributes    of modules outside: a rank of several stages runs that code once for each, so it may set them once, as
              lazy initialization does; an error if it changes them in every forward
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .._torch import version_of
from .mode import RunState
from .values import KeptValue, PipelineError


class Reads(Protocol):
    """A program; ``constants`` are the buffers that stages read of others."""

    constants: frozenset[str]


class Modules(Protocol):
    """The units of this rank, and stubs."""

    def constants(self, *, of_this_rank: bool) -> dict[str, torch.Tensor]:
        """Return small buffers that are no part of the state dict, by full name."""

    def attributes(self, names: Iterable[str], *, of_this_rank: bool) -> dict[str, Any]:
        """Return plain attributes by their full names."""


class OutsideCode:
    """What steps of an engine compare.

    Args:
        state: what hooks and stubs share.
        modules: the units of this rank and its stubs; None with one stage.
        attributes: returns what code outside of units can depend on, other than its inputs.
        is_repeated: whether this rank runs several stages.
    """

    def __init__(
        self,
        state: RunState,
        modules: Modules | None,
        attributes: Callable[[], tuple],
        *,
        is_repeated: bool,
    ) -> None:
        self._state, self._modules, self._attributes = state, modules, attributes
        self._is_repeated = is_repeated
        self._has_changed = False  # attributes, in the last forward

    def constants(self) -> dict[str, tuple[Any, int]]:
        """Return the constants of this rank's units, which others may read, with their versions."""
        if self._modules is None:
            return {}
        found = {name: (own, version_of(own)) for name, own in self._modules.constants(of_this_rank=True).items()}
        plain = self._modules.attributes(self._state.attributes_shared, of_this_rank=True)
        return found | {name: (own, 0) for name, own in plain.items()}

    def check_constants(self, before: dict[str, tuple[Any, int]], programs: Iterable[Reads]) -> None:
        """Check that no step has changed a constant that others read, be it one with other inputs.

        Raises:
            PipelineError: one has.
        """
        written, after = self._state.constants_written, self.constants()
        for name, (value, version) in before.items():
            if name not in after or not _same(after[name][0], value) or after[name][1] != version:
                written.add(name)
        read = frozenset().union(*(program.constants for program in programs))
        for name in sorted(read & written):
            if name in self._state.attributes_shared:
                raise _changed(name, *(values[name][0] for values in (before, after)))
            raise PipelineError(
                f"expected buffer `{name}` to stay as it is, since code outside of stage modules reads it on other "
                "stages, which have copies, got a write in its module; return it from the module, or make it a "
                "part of the state dict, which other stages do not read"
            )

    def share_attributes(self, read: Sequence[dict[str, Any]]) -> None:
        """Remember which plain attributes are read in a program; ``read`` has what each rank has got.

        Raises:
            PipelineError: this rank's modules have changed one since other ranks have copied it.
        """
        assert self._modules is not None
        for values in read:
            self._state.attributes_shared.update(values)
            for name, own in self._modules.attributes(values, of_this_rank=True).items():
                if not _same(own, values[name]):
                    raise _changed(name, values[name], own)

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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return one is other or (type(one) is type(other) and bool(one == other))


def _changed(name: str, before: Any, after: Any) -> PipelineError:
    return PipelineError(
        f"expected attribute `{name}` to stay as it is, since code outside of stage modules reads it on other stages, "
        f"which have copies, got {after!r} in place of {before!r}; return it from the module, or set it on all ranks "
        "between steps"
    )
