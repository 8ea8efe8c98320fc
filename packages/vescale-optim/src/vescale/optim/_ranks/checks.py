"""What the data-parallel ranks compare at the end of every backward: facts that several owners add.

The reducer of ``DDP`` reduces a maximum there anyway, of which parameters any rank has used. The pair of the facts is
added to it (`vescale.dtensor.extension.pair_of`), so that the comparison takes no collective of its own:

    DDP                    rows of the batch, state of the generator  ---.
    DistributedOptimizer   hyperparameters                            ---+--->  (d, -d), used, used, ...  ---> maximum

With ``find_unused_parameters=False`` there is no such maximum; then the facts are compared in the first backward and in
every N-th. A difference is an error before the optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from vescale.dtensor.extension import Fact, Turns, is_equal, pair_of, raise_difference

from .axis import Axis

__all__ = ["BackwardChecks"]

#: Bits of the numbers that are added to the maximum, which has 32.
_BITS = 31

Source = Callable[[], Iterable[Fact]]


class BackwardChecks:
    """The facts of all owners.

    Args:
        axis: The ranks that run the backward together.
    """

    def __init__(self, axis: Axis):
        self._axis = axis
        self._sources: list[Callable[[], Source | None]] = []
        self._turns = Turns()

    def add(self, source: Source) -> None:
        """Add an owner; ``source`` is its bound method, and goes with it."""
        self._sources.append(weakref.WeakMethod(source))

    @property
    def is_on(self) -> bool:
        """Whether anything is compared at all."""
        return self._turns.is_on

    def facts(self) -> list[Fact]:
        """Return what this rank has now; nothing on an axis of one rank, or if nothing is to be compared."""
        if self._axis.size == 1 or not self.is_on:
            return []
        sources = [source() for source in self._sources]
        return [fact for source in sources if source is not None for fact in source()]

    def pair(self, facts: Iterable[Fact]) -> tuple[int, int]:
        """Return two numbers of 32 bits for `finish`, which takes their maxima."""
        return pair_of(facts, bits=_BITS)

    def finish(self, facts: Iterable[Fact], maxima: Iterable[int]) -> None:
        """Raise if the facts of any rank differ.

        Raises:
            ValueError: On every rank.
        """
        if not is_equal(tuple(maxima)):
            raise_difference(facts, self._axis.group)

    def check_in_turn(self, facts: Iterable[Fact]) -> None:
        """Compare the facts by a collective, in the first call and in every N-th.

        Raises:
            ValueError: On every rank, if they differ.
        """
        if self._turns.is_due():
            self._axis.check_facts(facts, what="a comparison of ranks")
