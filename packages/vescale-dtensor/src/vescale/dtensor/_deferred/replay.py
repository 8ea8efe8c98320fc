"""Run the needed part of a tape on real memory.

One pass in program order. A needed call runs the program's own operator. Allocations and views are made when a needed
call first uses them. A draw whose values are not needed advances its generator in bounded pieces. A storage is handed
over and freed right after its last use. Storages that `plan_shards` chose hold only this rank's boxes::

    peak memory  =  results handed over  +  full tensors alive between their first write and last use  +  one piece

Guarantee: every operator runs with the arguments, strides, default dtype and generator state of the eager program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .._containers import leaves, map_leaves
from .._random.stock.draw import Scratch
from .generators import GeneratorLog
from .liveness import last_uses, skippable_draw
from .ops import FILLS, GEOMETRY_FACTORIES, fill_number
from .shards import Region, draw_into, fill_range
from .tape import Call, Ref, SetState, Tape

__all__ = ["Replay", "stream_entries", "unskippable_draws"]


def unskippable_draws(tape: Tape, start: int = 0) -> frozenset[int]:
    """Return the draws from `start` on that must run even if their result is not needed."""
    drawn = ((index, call) for index, call in tape.calls(start) if call.draws is not None)
    return frozenset(index for index, call in drawn if skippable_draw(tape, call) is None)


def stream_entries(tape: Tape, start: int, stop: int) -> set[int]:
    """Return the entries of a part of the tape that change a generator."""
    events = {i for i in range(start, stop) if isinstance(tape.entries[i], SetState)}
    return events | {index for index, call in tape.calls(start, stop) if call.draws is not None}


class Replay:
    """One run over a tape.

    Args:
        tape: the recorded program.
        log: the tape's generators, already in the state of the first entry that draws.
        needed: the calls to run.
        regions: the storages to hold as shards.
    """

    def __init__(
        self, tape: Tape, log: GeneratorLog, needed: Iterable[int], regions: Mapping[int, Region] | None = None
    ):
        self.tape = tape
        self.log = log
        self.needed = frozenset(needed)
        self.regions = regions or {}
        self._scratch = Scratch()
        self._values: dict[int, dict[int, Tensor]] = {}  # storage -> value -> real tensor
        self._shards: dict[int, Tensor] = {}  # storage -> this rank's box of it

    @torch.no_grad()
    def run(self, *, stream: Iterable[int], wanted: Iterable[int], hand_over: Callable[[int], None]) -> None:
        """Run the needed calls and the entries `stream`, in program order.

        Args:
            stream: entries that change a generator; they run, needed or not.
            wanted: storages to keep until after their last use, when `hand_over` is called for each of them.
            hand_over: takes a storage; `value` and `shard` give its tensors, which are freed when it returns.
        """
        wanted = set(wanted)
        finished = last_uses(self.tape, self.needed, wanted)
        remembered = self.log.remembered
        for index in (-1, *sorted(self.needed.union(stream))):
            if index >= 0:
                self._step(index, self.tape.entries[index], remembered)
            for storage in finished.get(index, ()):
                if storage in wanted:
                    hand_over(storage)
                self._values.pop(storage, None)
                self._shards.pop(storage, None)

    def _step(self, index: int, entry: Call | SetState, remembered: set[int]) -> None:
        if isinstance(entry, SetState):
            state = self.log.after[entry.state] if isinstance(entry.state, int) else entry.state
            self.log.generators[entry.generator].set_state(state)
            return
        if index not in self.needed:
            draw_into(None, None, skippable_draw(self.tape, entry), self._scratch)
        elif self.regions and not self.regions.keys().isdisjoint(self._touched(entry)):
            self._run_on_shards(entry)
        else:
            self._run(entry)
        if index in remembered:
            self.log.after[index] = self.log.generators[entry.draws].get_state()

    def _touched(self, call: Call) -> set[int]:
        return self.tape.storages(call.writes) | self.tape.created(call)

    # --------------------------------------------------------------------------------------- full tensors

    def value(self, index: int) -> Tensor:
        """Return the real tensor of a value; make it if it is an allocation or a view."""
        value = self.tape.values[index]
        known = self._values.setdefault(value.storage, {})
        if index not in known:
            origin = self.tape.entries[value.origin]
            if origin.is_view:
                self._run(origin)
            else:
                meta = value.meta
                known[index] = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=value.device)
        return known[index]

    def _run(self, call: Call) -> None:
        if call.op in GEOMETRY_FACTORIES:
            self.value(call.outputs[0]).fill_(fill_number(call.op, call.args, call.kwargs))
            return
        args, kwargs = map_leaves(lambda ref: self.value(ref.value), (call.args, call.kwargs), Ref)
        if torch.Tag.inplace_view in call.op.tags:
            args = (args[0].detach(), *args[1:])
        with _default_dtype(call.default_dtype):
            results = list(leaves(call.op(*args, **kwargs)))
        for place, value in call.outputs.items():
            self._values.setdefault(self.tape.values[value].storage, {})[value] = results[place]

    # --------------------------------------------------------------------------------------- shards

    def shard(self, storage: int) -> Tensor:
        """Return this rank's part of a storage; allocate it before the first write."""
        if storage not in self._shards:
            root = self.tape.values[self.tape.roots[storage]]
            sizes = self.regions[storage].sizes
            self._shards[storage] = torch.empty(sizes, dtype=root.meta.dtype, device=root.device)
        return self._shards[storage]

    def _run_on_shards(self, call: Call) -> None:
        (index, *_) = (*call.writes, *call.outputs.values())
        target = self.tape.values[index]
        region = self.regions[target.storage]
        draw = skippable_draw(self.tape, call) if call.draws is not None else None
        if draw is not None:
            draw_into(self.shard(target.storage), region, draw, self._scratch)
        elif call.op in GEOMETRY_FACTORIES:
            self.shard(target.storage).fill_(fill_number(call.op, call.args, call.kwargs))
        elif call.op in FILLS:
            start = target.meta.storage_offset()
            number = fill_number(call.op, call.args, call.kwargs)
            fill_range(self.shard(target.storage), region, start, start + target.meta.numel(), number)
        else:
            self._run_pointwise(call, region)

    def _run_pointwise(self, call: Call, region: Region) -> None:
        def local(argument: Ref | Tensor) -> Tensor:
            if isinstance(argument, Ref):
                storage = self.tape.values[argument.value].storage
                return self.shard(storage) if storage in self.regions else self.value(argument.value)
            return region.cut(argument.reshape(region.shape)) if argument.dim() else argument

        args, kwargs = map_leaves(local, (call.args, call.kwargs), (Ref, Tensor))
        with _default_dtype(call.default_dtype):
            result = call.op(*args, **kwargs)
        for value in call.outputs.values():
            self._shards[self.tape.values[value].storage] = result.contiguous()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    present = torch.get_default_dtype()
    if dtype == present:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(present)
