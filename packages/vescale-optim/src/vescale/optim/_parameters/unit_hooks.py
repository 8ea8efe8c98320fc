"""When the units of ZeRO 3 are whole: hooks of their modules, and of the autograd nodes that they leave behind.

    forward     enter unit      wait for its gather; start that of the next unit
                leave unit      free it; put a hook on the autograd nodes of what it returned
    backward    first such node wait for the gather of its unit; free the units that are done; start the one before
                end of backward free what is left: the root unit, and what was gathered and not used

Which units are done in a backward follows from the order in which autograd runs nodes: the one made last first. When a
node of a call runs, every call that was entered after it had ended is done.

Note: what keeps collectives matched between ranks
    Gathers have a process group of their own, so their order does not depend on when gradients become ready. All ranks
    must run the same units in the same order; they compare what they gathered at the end of each synchronising backward
    and of each forward without gradients, and all raise if it differs, before anything is updated.

Note: modules that `vescale.dmodule` runs on local tensors
    They run with other parameters in the modules' tables, over the same memory; `ShardedValues.share` says how. Hooks
    of units stay where they are, compiled blocks run between them. The first call of its kind is rehearsed inside of
    the forward, by two more forwards and backwards, on all ranks together (`UnitHooks.any_rank`).

Note: activation checkpointing
    A unit that is run again during backward stays whole until another unit's turn comes: its own backward follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .. import _torch
from .._checks import executions_of
from .._forward.outputs import autograd_nodes, tensors_in, tensors_in_container
from .._ranks.axis import Axis
from .sharded_values import ShardedValues

__all__ = ["Unit", "UnitHooks"]

_MARK = "vescale.optim.unit"


class Unit:
    """Parameters that are made whole and freed together.

    Attributes:
        name: Name of its module.
        module: The module whose calls use them.
        num_running: Calls in progress.
        num_pending: Calls whose backward is in progress.
        is_used: Whether something has waited for the parameters since they were gathered.
        is_kept: Whether they are to stay until a backward has ended.
    """

    def __init__(self, index: int, name: str, module: nn.Module, buckets: Sequence[ShardedValues]):
        self.index = index
        self.name = name
        self.module = module
        self.buckets = list(buckets)
        self.num_running = 0
        self.num_pending = 0
        self.is_used = False
        self.is_kept = False
        self.is_gathering = False

    @property
    def is_whole(self) -> bool:
        """Whether its parameters can be used."""
        return all(bucket.is_whole for bucket in self.buckets)

    @property
    def is_trained(self) -> bool:
        """Whether a parameter takes gradients."""
        return any(param.requires_grad for bucket in self.buckets for param in bucket.params)

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward of it is in progress."""
        return self.num_running > 0 or self.num_pending > 0

    def launch(self) -> bool:
        """Start the gather unless it is whole or on its way; tell whether it was started."""
        if self.is_gathering or self.is_whole:
            return False
        for bucket in self.buckets:
            bucket.launch()
        self.is_gathering = True
        return True

    def finish(self) -> None:
        """Wait for the gather."""
        self.is_used = True
        if self.is_gathering:
            for bucket in self.buckets:
                bucket.finish()
            self.is_gathering = False

    def free(self) -> None:
        """Free its whole parameters."""
        if self.is_gathering or self.is_whole:
            for bucket in self.buckets:
                bucket.free()
        self.is_gathering = self.is_used = self.is_kept = False

    def own_modules(self, others: set[int]) -> list[nn.Module]:
        """Return its module and those inside of it that belong to no other unit; ``others`` are ids of modules."""
        found, stack = [], [self.module]
        while stack:
            part = stack.pop()
            found.append(part)
            stack += [child for child in part.children() if id(child) not in others]
        return found


class _Call:
    """One run of a unit's module; ``start`` and ``end`` are counted over all calls of all units."""

    def __init__(self, unit: Unit, start: int, version: int):
        self.unit = unit
        self.start = start
        self.end = start
        self.version = version
        self.previous: Callable[[], _Call | None] = lambda: None
        self.around: tuple = ()  # of a call of the root unit: what was noted of the call around it


def _do_nothing(*_args: object) -> None:
    pass


class _InGraph:
    """A hook, and what it is to a compiler of whole blocks. A copy of its module belongs to no unit, and its hook does
    nothing.

    Attributes:
        _vescale_in_graph: ``"outside"``: its module must be entered and left outside of compiled code. ``"absent"``:
            it can be left out where its module runs inside of it.
    """

    def __init__(self, in_graph: str, function: Callable):
        self._vescale_in_graph = in_graph
        self.function = function

    def __call__(self, *args: object) -> object:
        with _torch.no_function_modes():  # what a hook asks of tensors is nobody else's business
            return self.function(*args)

    def __reduce__(self) -> object:
        return type(self), ("absent", _do_nothing)


class UnitHooks:
    """Gathers and frees units as their modules run.

    Args:
        units: All units; the root unit last.
        axis: The axis, with the process group for gathers.
        synchronises: Tells whether gradients are reduced.
        reshard_after_forward: Free a unit after its forward, and gather it again for its backward.
        prefetch: Gather the next unit while one runs.

    Attributes:
        pinned: How many `unsharded` contexts there are; inside them nothing is freed.
        keeps: Whether units stay whole, for the next micro-batch.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axis: Axis,
        *,
        synchronises: Callable[[], bool],
        reshard_after_forward: bool,
        prefetch: bool,
    ):
        self.units = list(units)
        self.root = self.units[-1]
        self.axis = axis
        self.synchronises = synchronises
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self.pinned = 0
        self.keeps = False
        self._clock = 0
        self._stack: list[_Call] = []
        self._last: Callable[[], _Call | None] = lambda: None
        self._active: dict[int, set[_Call]] = {}
        self._lingering: Unit | None = None
        self._trace: list[Unit] = self.units[:-1]
        self._seen: list[Unit] = []
        self._follows = False  # whether this forward has run the units of the trace so far
        self._gathered = 0  # a digest of the units gathered so far, in order
        self._version = 0  # of the shards' values
        if any(bucket.frees for unit in self.units for bucket in unit.buckets):
            others = {id(unit.module) for unit in self.units}
            self._modules = {unit: unit.own_modules(others - {id(unit.module)}) for unit in self.units}
            for unit in self.units:
                self._attach(unit)
            for execution in executions_of(self.root.module):
                execution.any_rank = self.any_rank

    def _attach(self, unit: Unit) -> None:
        enter = _InGraph("outside", lambda _module, _args: self._enter(unit))
        leave = _InGraph("outside", lambda _module, _args, out: self._leave(unit, out))
        leave_part = _InGraph("absent", lambda _module, _args, out: self._leave_part(unit, out))
        unit.module.register_forward_pre_hook(enter, prepend=True)
        unit.module.register_forward_hook(leave, always_call=True)
        for module in self._modules[unit]:
            if module is not unit.module and _torch.own_parameters(module):
                module.register_forward_hook(leave_part)

    def any_rank(self, flag: bool) -> bool:
        """Tell whether a flag is set on any rank of the axis; all call it together.

        `vescale.dmodule` asks before it rehearses a call: a rehearsal runs all units, so all ranks must make it.
        """
        if self.axis.size == 1:
            return flag
        mine = torch.tensor([flag], dtype=torch.int64, device=self.axis.device_type)
        every = torch.empty(self.axis.size, dtype=torch.int64, device=mine.device)
        self.axis.all_gather(every, mine, what="whether a call is new to a rank").wait()
        return bool(every.any())

    # ---------------------------------------------------------------------------------------------- gather and free

    def launch(self, unit: Unit) -> None:
        """Start the gather of a unit unless it is whole."""
        if unit.launch():
            self._gathered = (self._gathered * 1_000_003 + unit.index + 1) % 2**61

    def use(self, unit: Unit) -> None:
        """Make a unit whole."""
        self.launch(unit)
        unit.finish()

    def release(self, unit: Unit) -> None:
        """Free a unit if nothing holds it."""
        if not (unit.is_busy or self.pinned or self.keeps):
            unit.free()

    def values_changed(self) -> None:
        """Free everything: the shards have new values."""
        self._version += 1
        self.reset()

    def reset(self) -> None:
        """Free everything, and forget what an exception has left behind."""
        self._active.clear()
        self._stack.clear()
        self._lingering = None
        for unit in self.units:
            unit.num_running = unit.num_pending = 0
            if not self.pinned:
                unit.free()

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not ended, or not ended well."""
        return bool(self._active)

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward is in progress."""
        return any(unit.is_busy for unit in self.units)

    def _linger(self, unit: Unit | None) -> None:
        before, self._lingering = self._lingering, unit
        if before is not None and before is not unit:
            self.release(before)

    # ---------------------------------------------------------------------------------------------- forward

    def _enter(self, unit: Unit) -> None:
        again = _torch.backward_number() != -1
        self._clock += 1
        self._stack.append(_Call(unit, self._clock, self._version))
        unit.num_running += 1
        if again:
            if self._lingering is not unit:
                self._linger(None)
            self.use(self.root)
        elif unit is self.root:
            self._stack[-1].around = self._seen, self._follows, self._last
            self._seen, self._follows = [], True
            self._last = lambda: None
        self.use(unit)
        if not again:
            self._prefetch(unit)

    def _prefetch(self, unit: Unit) -> None:
        """Start the gather of the unit that ran after this one in the last forward."""
        if not self.root.num_running:
            return
        if unit is not self.root:
            position = len(self._seen)
            self._seen.append(unit)
            self._follows &= position < len(self._trace) and self._trace[position] is unit
        if self.prefetch and self._follows and len(self._seen) < len(self._trace):
            self.launch(self._trace[len(self._seen)])

    def _leave(self, unit: Unit, output: object) -> None:
        if not self._stack or self._stack[-1].unit is not unit:
            return  # a hook before ours has raised, so that it was never entered
        call = self._stack.pop()
        self._clock += 1
        call.end = self._clock
        unit.num_running -= 1
        _refuse_views(unit, output)
        watched = torch.is_grad_enabled() and output is not None and self._watch(call, output)
        if _torch.backward_number() != -1:
            self._linger(unit)
            return
        # What returns something, and nothing that autograd knows of, may have put it where we do not look: keep it.
        escapes = torch.is_grad_enabled() and output is not None and not watched and unit.is_trained
        unit.is_kept = escapes or (watched and (unit is self.root or not self.reshard_after_forward))
        if not unit.is_kept:
            self.release(unit)
        if unit is self.root:
            self._forward_ended(output is not None, watched)
            if unit.num_running:  # this was a call inside of a call: a rehearsal
                self._seen, self._follows, self._last = call.around

    def _leave_part(self, unit: Unit, output: object) -> None:
        """Let a backward also enter by what a part of a unit returned: somebody may have taken it out by a hook."""
        if torch.compiler.is_compiling():
            return  # what runs in one graph can be entered from outside only
        if torch.is_grad_enabled() and self._stack and self._stack[-1].unit is unit:
            call = self._stack[-1]
            for node in autograd_nodes(output):
                node.register_prehook(lambda _grads: self._before_backward(call))

    def _forward_ended(self, well: bool, watched: bool) -> None:
        if well:
            self._trace = self._seen
        for unit in self.units:
            if not (unit.is_used and unit.is_kept):
                self.release(unit)
        if well and not watched:
            self._check_same()

    def _watch(self, call: _Call, output: object) -> bool:
        """Put hooks on the autograd nodes by which backward enters a call; tell whether there are any."""
        nodes = autograd_nodes(output)
        for module in self._modules[call.unit]:
            # Tensors that leave by an attribute (an auxiliary loss), once each. What stands for a parameter does not.
            table = _torch.own_parameters(module)
            values = [value for key, value in vars(module).items() if value is not table and key not in table]
            for tensor in (t for value in values for t in tensors_in_container(value)):
                if tensor.grad_fn is not None and _MARK not in tensor.grad_fn.metadata:
                    tensor.grad_fn.metadata[_MARK] = True
                    nodes.add(tensor.grad_fn)
        for node in nodes:
            node.register_prehook(lambda _grads: self._before_backward(call))
        if nodes:
            call.previous, self._last = self._last, weakref.ref(call)
        return bool(nodes)

    # ---------------------------------------------------------------------------------------------- backward

    def _before_backward(self, call: _Call) -> None:
        if torch.is_grad_enabled() and not self.pinned:
            raise NotImplementedError(
                "backward with create_graph=True is not available with zero=3: parameters are freed before the second "
                "backward would read them; use zero=2, or run forward and both backwards in `with model.unsharded():`"
            )
        if call.version != self._version:
            raise RuntimeError(
                f"the parameters of unit {call.unit.name or '(root)'!r} were changed (by an optimizer step or by "
                "load_state_dict) after a forward and before its backward, which needs their former values; run every "
                "backward before the step"
            )
        number = _torch.backward_number()
        if number not in self._active:
            self._active[number] = set()
            _torch.on_backward_end(lambda: self._backward_ended(number))
        active = self._active[number]
        if call in active:
            return
        active.add(call)
        call.unit.num_pending += 1
        for other in sorted((other for other in active if other.start > call.end), key=lambda other: other.end):
            active.remove(other)
            self._done(other)
        self._linger(None)
        self.use(self.root)
        self.use(call.unit)
        previous = call.previous()
        if self.prefetch and previous is not None:
            self.launch(previous.unit)

    def _done(self, call: _Call) -> None:
        call.unit.num_pending -= 1
        self.release(call.unit)

    def _backward_ended(self, number: int) -> None:
        for call in sorted(self._active.pop(number, ()), key=lambda call: call.end):
            self._done(call)
        if _torch.backward_is_nested():
            return
        self._linger(None)
        for unit in self.units:
            self.release(unit)
        if self.synchronises():
            self._check_same()

    def _check_same(self) -> None:
        """Raise RuntimeError, on all ranks, if they have gathered different units or in a different order."""
        if self.axis.size == 1:
            return
        mine = torch.tensor([self._gathered], dtype=torch.int64, device=self.axis.device_type)
        every = torch.empty(self.axis.size, dtype=torch.int64, device=mine.device)
        self.axis.all_gather(every, mine, what="a digest of the units that ran").wait()
        other = [coord for coord, value in enumerate(every.tolist()) if value != every[0].item()]
        if other:
            raise RuntimeError(
                f"coord {other[0]} of axis {self.axis.name!r} ran other units, or in another order, than coord 0, so "
                "parameters were mixed up: the result must not be used. All ranks must run the same units; put modules "
                "that only some ranks run into a larger unit (units=...)"
            )


def _refuse_views(unit: Unit, output: object) -> None:
    """Raise RuntimeError if a unit returns a view of its parameters, which are freed now."""
    for tensor in tensors_in(output):
        if any(bucket.holds(_torch.local_tensor(tensor)) for bucket in unit.buckets):
            raise RuntimeError(
                f"unit {unit.name or '(root)'!r} returns a parameter, or a view of one, of shape "
                f"{tuple(tensor.shape)}; with zero=3 it has no values after the unit has run. Return a copy, or let it "
                "belong to the root unit (units=...)"
            )
