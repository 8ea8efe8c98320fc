"""Contents on demand: compute the values that a constructor reads from its own tensors while it is recorded.

`float(linspace(0, 0.1, 12)[3])`, `mask.any()` and similar reads need a number during recording. The calls that the
value depends on are replayed on real memory, which is freed immediately afterwards.

If these calls include draws, the random stream is replayed, too. It starts in the generator states of the latest
**snapshot** before the first needed draw; the generators get their present states back afterwards. Each such read
stores a snapshot of the states after its last draw. So the rejection loop of `trunc_normal_` (torch 2.12 and later),
which tests after each round whether all elements are inside the bounds, replays only its own rounds. Its full tensor is
in memory during each replay.

Guarantee: a read returns the value that the eager constructor reads, so the recorded program takes the same branches.
"""

from __future__ import annotations

from torch import Tensor

from .generators import GeneratorLog
from .liveness import needed_calls
from .replay import Replay, stream_entries, unskippable_draws
from .tape import Tape

__all__ = ["Reader"]


class Reader:
    """Computes contents of the values of one tape."""

    def __init__(self, tape: Tape, log: GeneratorLog):
        self.tape = tape
        self.log = log
        self._snapshots: dict[int, list[Tensor]] = {0: list(log.initial)}

    def read(self, value: int) -> Tensor:
        """Return a real tensor with the present contents of a value."""
        storage = self.tape.values[value].storage
        needed = needed_calls(self.tape, {storage})
        draws = self._draws(needed)
        if not draws:
            return self._run(needed, set(), value)
        start, stop = self._snapshot_before(draws[0]), draws[-1] + 1
        while True:
            roots = frozenset(index for index in unskippable_draws(self.tape, start) if index < stop)
            needed = needed_calls(self.tape, {storage}, roots=roots)
            earlier = self._snapshot_before(self._draws(needed)[0])
            if earlier >= start:
                break
            start = earlier  # a draw that cannot be skipped depends on a still earlier one
        with self.log.borrowed(self._snapshots[start]):
            result = self._run(needed, stream_entries(self.tape, start, stop), value)
            self._snapshots[stop] = self.log.states()
        return result

    def _draws(self, calls: list[int]) -> list[int]:
        return [index for index in calls if self.tape.entries[index].draws is not None]

    def _snapshot_before(self, index: int) -> int:
        """Return the latest snapshot at which the log has all states that the program restores later."""
        lost = self.log.remembered - self.log.after.keys()
        return max(start for start in self._snapshots if start <= min({index, *lost}))

    def _run(self, needed: list[int], stream: set[int], value: int) -> Tensor:
        replay = Replay(self.tape, self.log, needed)
        found: list[Tensor] = []
        storage = self.tape.values[value].storage
        replay.run(stream=stream, wanted={storage}, hand_over=lambda _: found.append(replay.value(value)))
        return found[0]
