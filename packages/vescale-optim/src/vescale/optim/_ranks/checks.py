"""What the data-parallel ranks compare at the end of every backward: facts that several owners add.

The reducer of ``DDP`` reduces a maximum there anyway, of which parameters any rank has used. The pair of the facts is
added to it (`vescale.dtensor.extension.pair_of`), so that the comparison takes no collective of its own:

    DDP                    rows of the batch, state of the generator  ---.
    DistributedOptimizer   hyperparameters                            ---+--->  (d, -d), used, used, ...  ---> maximum

With ``find_unused_parameters=False`` there is no such maximum; then the facts are compared in the first backward and in
every N-th. A difference is an error before the optimizer steps. Numbers whose difference is worth a warning only
(`_forward/ignored_outputs.py`) take two more places of the maximum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from vescale.dtensor.extension import Fact, Turns, is_equal, pair_of, raise_difference

from .axis import Axis

__all__ = ["BackwardChecks"]

#: Bits of the numbers that are added to the maximum, which has 32.
_BITS = 31

Source = Callable[[], Iterable[Fact]]


class Watch(Protocol):
    """A number whose difference between ranks is a warning."""

    def take(self) -> int: ...
    def warn(self, least: int, most: int) -> None: ...


class BackwardChecks:
    """The facts of all owners.

    Args:
        axis: The ranks that run the backward together.
    """

    def __init__(self, axis: Axis):
        self._axis = axis
        self._sources: list[Callable[[], Source | None]] = []
        self._turns = Turns()
        self._watch: Watch | None = None

    def watch(self, number: Watch) -> None:
        """Compare a number, too."""
        self._watch = number

    def add(self, source: Source) -> None:
        """Add an owner; ``source`` is its bound method, and goes with it."""
        self._sources.append(weakref.WeakMethod(source))

    @property
    def is_on(self) -> bool:
        """Whether anything is compared at all."""
        return self._turns.is_on and not self._axis.is_dry

    def facts(self) -> list[Fact]:
        """Return what this rank has now; nothing on an axis of one rank, or if nothing is to be compared."""
        if self._axis.size == 1 or not self.is_on:
            return []
        sources = [source() for source in self._sources]
        return [fact for source in sources if source is not None for fact in source()]

    def numbers(self, facts: Iterable[Fact]) -> tuple[int, ...]:
        """Return four numbers of 32 bits for `finish`, which takes their maxima."""
        number = min(self._watch.take(), 2**_BITS - 1) if self._watch is not None and self.is_on else 0
        return *pair_of(facts, bits=_BITS), number, -number

    def finish(self, facts: Iterable[Fact], maxima: Sequence[int]) -> None:
        """Raise if the facts of any rank differ.

        Raises:
            ValueError: On every rank.
        """
        *pair, most, negative_least = maxima
        if self._watch is not None and most != -negative_least and self._axis.coord == 0:
            self._watch.warn(-negative_least, most)
        if not is_equal(pair):
            raise_difference(facts, self._axis.group)

    def check_in_turn(self, facts: Iterable[Fact]) -> None:
        """Compare the facts by a collective, in the first call and in every N-th.

        Raises:
            ValueError: On every rank, if they differ.
        """
        if self._turns.is_due():
            self._axis.check_facts(facts, what="a comparison of ranks")
