"""The dispatch mode that records the operators of a constructor, and computes the contents that it reads.

===============================================  ======================================================================
operator                                         action
===============================================  ======================================================================
on deferred tensors, or a factory                recorded; the result is deferred
random                                           recorded, also on real tensors: the generator must not advance
`torch.tensor(data)`                             its data are stored as a constant; the result is deferred
on real tensors only (made outside, numpy's)     runs normally; the result is real
on the `meta` device                             runs normally
result depends on data (`item`, `nonzero`, …)    the inputs are computed on demand; the result is real or a constant
===============================================  ======================================================================

**Contents on demand.** `float(linspace(0, 0.1, 12)[3])`, `mask.any()` and similar reads need a number during
recording. The calls that the value depends on are replayed on real memory, which is freed immediately afterwards.

If these calls include draws, the random stream is replayed, too. It starts in the generator states of the latest
**snapshot** before the first needed draw; afterwards the generators get their present states back. Each such read
stores a snapshot of the states after its last draw. So the rejection loop of `trunc_normal_` (torch 2.12 and later),
which tests after each round whether all elements are inside the bounds, replays only its own rounds. Its full tensor is
in memory during each replay.

Guarantee: a read returns the value that the eager constructor reads, so the recorded program takes the same branches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._containers import leaves, map_leaves
from .._torch.recording import Op, TorchDispatchMode, foreign_memory, is_random, written_arguments
from .generators import GeneratorLog
from .liveness import needed_calls
from .ops import ALIAS, GEOMETRY_FACTORIES, SAME_KIND
from .record import Recording
from .replay import Replay, stream_entries, unskippable_draws
from .tape import Tape
from .tensor import DeferredTensor, DeferredTensorError

__all__ = ["Recorder"]

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Records a constructor.

    Attributes:
        recording: the tape and generators of this constructor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.recording.read = self.read
        self._reader = _Reader(self.recording.tape, self.recording.log)
        self._is_paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if isinstance(tensor, DeferredTensor)]
        if self._is_paused or func is SAME_KIND or (not deferred and self._runs_as_always(func, tensors, kwargs)):
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return args[0] if deferred else self.recording.constant(args[0])
        if self._is_foreign(func, deferred):
            return func(*args, **kwargs)
        if func is aten.set_.source_Tensor and len(deferred) == 2:
            args[0].data = args[1]
            return args[0]
        if func is aten._local_scalar_dense.default:
            return self._now(func, args, kwargs)
        try:
            return self.recording.record(func, args, kwargs)
        except NotImplementedError:
            if is_random(func) or written_arguments(func):
                raise
            return self._now(func, args, kwargs)

    def read(self, value: int) -> Tensor:
        """Return the present contents of a value."""
        self._is_paused = True
        try:
            return self._reader.read(value)
        finally:
            self._is_paused = False

    def finish(self) -> None:
        """End the recording: disable reads on demand, and restore all generators."""
        self.recording.read = None
        try:
            self.recording.log.note_changes()
        finally:
            self.recording.log.restore()

    def _runs_as_always(self, func: Op, tensors: list[Tensor], kwargs: dict) -> bool:
        """Return whether an operator without deferred arguments runs normally, unrecorded."""
        devices = [kwargs["device"]] if kwargs.get("device") is not None else [tensor.device for tensor in tensors]
        if any(torch.device(device).type == "meta" for device in devices):
            return True
        if not tensors or is_random(func) or func in GEOMETRY_FACTORIES:
            return False
        # numpy may still change its memory: such a tensor stays real, and is copied where it is used
        return func is not aten.lift_fresh.default or foreign_memory(tensors[0])

    def _is_foreign(self, func: Op, deferred: list[DeferredTensor]) -> bool:
        """Return whether an operator only aliases a tensor of another recording; other mixtures are errors."""
        if all(tensor.deferred.recording is self.recording for tensor in deferred):
            return False
        if func in ALIAS:
            return True
        raise DeferredTensorError(
            f"{func} uses tensors of another deferred_init: {deferred}. Build both in one deferred_init, or "
            "materialize the first one before"
        )

    def _now(self, func: Op, args: tuple, kwargs: dict) -> object:
        """Run an operator whose result cannot be described without data."""
        real_args, real_kwargs = map_leaves(lambda t: self.read(t.deferred.value), (args, kwargs), DeferredTensor)
        with torch.no_grad():
            result = func(*real_args, **real_kwargs)
        return map_leaves(self.recording.constant, result, Tensor)


class _Reader:
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
