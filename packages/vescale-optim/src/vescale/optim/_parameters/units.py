"""Units of ZeRO 3 at run time: which of them are unsharded, and until when.

The parameters of a unit are unsharded, used and freed together:

                launch()                 finish()
    SHARDED  ------------>  GATHERING  ------------>  UNSHARDED
       ^                        |                         |
       |________ free() ________|_________ free() ________|

`Units.use` does both steps. `Units.release` frees a unit unless a forward or backward of it is in progress, an
``unsharded()`` context is open (``pinned``), or micro-batches share one all-gather (``keeps``). New values of the
shards free everything (`Units.values_changed`).

Note: what keeps collectives matched between ranks
    All-gathers have a process group of their own, so their order does not depend on when gradients become ready. All
    ranks must run the same units in the same order. They compare a digest of what they gathered at the end of each
    synchronizing backward and of each forward without gradients. If it differs, all raise before anything is updated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch import nn

from .._ranks.axis import Axis
from .sharded_values import ShardedValues

__all__ = ["Unit", "UnitState", "Units"]


class UnitState(enum.Enum):
    """Where the values of a unit's parameters are."""

    SHARDED = "each rank has its part"
    GATHERING = "the all-gather is in flight"
    UNSHARDED = "every rank has the full values"


class Unit:
    """Parameters that are unsharded and freed together.

    Attributes:
        name: Name of its module; empty for the root unit.
        module: The module whose calls use them.
        buckets: Their values. Without any, or with one rank and no offload, the unit stays unsharded.
        state: See `UnitState`.
        num_running: Calls in progress.
        num_pending: Calls whose backward is in progress.
        is_used: Whether the parameters have been awaited since they were gathered.
        is_kept: Whether they stay until a backward has ended.
    """

    def __init__(self, index: int, name: str, module: nn.Module, buckets: Sequence[ShardedValues]):
        self.index = index
        self.name = name
        self.module = module
        self.buckets = list(buckets)
        self.frees = any(bucket.frees for bucket in self.buckets)
        self.state = UnitState.SHARDED if self.frees else UnitState.UNSHARDED
        self.num_running = 0
        self.num_pending = 0
        self.is_used = False
        self.is_kept = False

    @property
    def label(self) -> str:
        """The name for errors."""
        return repr(self.name or "(root)")

    @property
    def is_trained(self) -> bool:
        """Whether a parameter takes gradients."""
        return any(param.requires_grad for bucket in self.buckets for param in bucket.params)

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward of it is in progress."""
        return self.num_running > 0 or self.num_pending > 0

    def launch(self) -> bool:
        """Start the all-gather of a sharded unit; return whether it was started."""
        if self.state is not UnitState.SHARDED:
            return False
        for bucket in self.buckets:
            bucket.launch()
        self.state = UnitState.GATHERING
        return True

    def finish(self) -> None:
        """Wait for the all-gather."""
        self.is_used = True
        if self.state is UnitState.GATHERING:
            for bucket in self.buckets:
                bucket.finish()
            self.state = UnitState.UNSHARDED

    def keep_writes(self) -> None:
        """Let the shards have what was written to the full parameters."""
        if self.state is UnitState.UNSHARDED:
            for bucket in self.buckets:
                bucket.keep_writes()

    def free(self) -> None:
        """Free the full parameters."""
        if self.frees and self.state is not UnitState.SHARDED:
            for bucket in self.buckets:
                bucket.free()
            self.state = UnitState.SHARDED
        self.is_used = self.is_kept = False

    def own_modules(self, others: set[int]) -> list[nn.Module]:
        """Return its module and those inside of it that belong to no other unit; ``others`` are ids of modules."""
        found, stack = [], [self.module]
        while stack:
            part = stack.pop()
            found.append(part)
            stack += [child for child in part.children() if id(child) not in others]
        return found


class Units:
    """All units of a module.

    Args:
        units: The units; the root unit last.
        axis: The axis, with the process group for all-gathers.

    Attributes:
        root: The root unit.
        version: How often the values of the shards have changed.
        pinned: How many ``unsharded()`` contexts are open. Nothing is freed inside of them.
        keeps: Whether units stay unsharded for the next micro-batch.
        compares: Whether ranks compare what they have gathered after each backward.
    """

    def __init__(self, units: Sequence[Unit], axis: Axis):
        self.all = list(units)
        self.root = self.all[-1]
        self.axis = axis
        self.version = 0
        self.pinned = 0
        self.keeps = False
        self.compares = True
        self._digest = 0  # of the units gathered so far, in order

    @property
    def frees(self) -> bool:
        """Whether any unit is ever freed."""
        return any(unit.frees for unit in self.all)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is in progress."""
        return any(unit.is_busy for unit in self.all)

    def launch(self, unit: Unit) -> None:
        """Start the all-gather of a unit if it is sharded."""
        if unit.launch():
            self._digest = (self._digest * 1_000_003 + unit.index + 1) % 2**61

    def use(self, unit: Unit) -> None:
        """Unshard a unit."""
        self.launch(unit)
        unit.finish()

    def keep_writes(self) -> None:
        """Let the shards have what was written to full parameters."""
        for unit in self.all:
            unit.keep_writes()

    def release(self, unit: Unit) -> None:
        """Free a unit unless it is needed; writes to its parameters are kept."""
        if not self.keeps:
            self.free_idle(unit)

    def free_idle(self, unit: Unit) -> None:
        """Free a unit that nothing uses, although units are kept; writes to its parameters are kept."""
        if not (unit.is_busy or self.pinned):
            unit.keep_writes()
            unit.free()

    def gather_all(self) -> None:
        """Unshard all units, with the present values of the shards."""
        for unit in self.all:
            unit.free()
        for unit in self.all:
            self.launch(unit)
        for unit in self.all:
            unit.finish()

    def give_away(self) -> None:
        """Copy values written to the full parameters into the shards; existing views keep their memory."""
        for unit in self.all:
            for bucket in unit.buckets:
                bucket.give_away()

    def reset(self) -> None:
        """Free everything, and forget calls that an exception has ended."""
        for unit in self.all:
            unit.num_running = unit.num_pending = 0
            if not self.pinned:
                unit.free()

    # ---------------------------------------------------------------------------------------------- between ranks

    def any_rank(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank of the axis. All ranks call it together.

        `vescale.dmodule` asks before it records a call: the recording runs all units, so all ranks must make it.
        """
        return any(self.axis.gather_number(int(flag), what="whether a call is new to a rank"))

    def check_same(self) -> None:
        """Compare what the ranks have gathered.

        Raises:
            RuntimeError: On all ranks, if it differs.
        """
        digests = self.axis.gather_number(self._digest, what="a digest of the units that ran")
        other = next((coord for coord, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise RuntimeError(
                f"coord {other} of axis {self.axis.name!r} ran other units, or in another order, than coord 0, so "
                "parameters were mixed up: the result must not be used. All ranks must run the same units; put modules "
                "that only some ranks run into a larger unit (units=...)"
            )
