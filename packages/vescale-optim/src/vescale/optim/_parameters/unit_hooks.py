"""When the units of ZeRO 3 are unsharded: hooks of their modules, and of the autograd nodes that they leave behind.

    forward     enter unit      wait for its all-gather; start that of the next unit
                leave unit      free it; put a hook on the autograd nodes of its outputs
    backward    first such node wait for the all-gather of its unit; free the units that are done; start the one before
                end of backward free the rest: the root unit, and units that were gathered and not used

Which units are done in a backward follows from the order in which autograd runs nodes: the one made last first. When a
node of a call runs, every call that was entered after it had ended is done.

Note: modules that `vescale.dmodule` runs on local tensors
    They run with local parameters in the tables of the modules, over the same memory; `guard.Memory` guards those.
    Hooks of units stay where they are, compiled blocks run between them. The first call of its kind is recorded inside
    of the forward, by two more forwards and backwards, on all ranks together (`Units.any_rank`).

Note: activation checkpointing
    A unit that is recomputed during backward stays unsharded until another unit is entered: its own backward follows.

Note: the autograd nodes by which backward enters a unit
    They belong to tensors in the unit's outputs, nested in containers and in objects of any type, and to tensors that
    its modules store as attributes, such as an auxiliary loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import _torch
from .._checks import executions_of
from .units import Unit, Units

__all__ = ["UnitHooks"]

#: How deep to look for tensors in attributes of objects of unknown types.
_DEPTH = 4

#: Metadata of an autograd node that `_attribute_nodes` has returned.
_MARK = "vescale.optim.unit"


class _Call:
    """One run of a unit's module; ``start`` and ``end`` are counted over all calls of all units."""

    def __init__(self, unit: Unit, start: int, version: int):
        self.unit = unit
        self.start = start
        self.end = start
        self.version = version
        self.previous: Callable[[], _Call | None] = lambda: None
        self.around: tuple = ()  # for the root unit: the state of an enclosing call


def _do_nothing(*_args: object) -> None:
    pass


class _InGraph:
    """A hook, and its role where blocks are compiled. A copy of its module belongs to no unit; there it does nothing.

    Attributes:
        _vescale_in_graph: ``"outside"``: its module must be entered and left outside of compiled code. ``"absent"``:
            it can be left out where its module runs inside of it.
    """

    def __init__(self, in_graph: str, function: Callable):
        self._vescale_in_graph = in_graph
        self.function = function

    def __call__(self, *args: object) -> object:
        with _torch.no_function_modes():  # a pipeline traces code by such a mode, and hooks are not traced
            return self.function(*args)

    def __reduce__(self) -> object:
        return type(self), ("absent", _do_nothing)


class UnitHooks:
    """Unshards and frees units as their modules run.

    Args:
        units: All units.
        synchronizes: Returns whether gradients are reduced.
        reshard_after_forward: Free a unit after its forward, and gather it again for its backward.
        prefetch: Gather the next unit while one runs.
    """

    def __init__(self, units: Units, *, synchronizes: Callable[[], bool], reshard_after_forward: bool, prefetch: bool):
        self.units = units
        self.root = units.root
        self.synchronizes = synchronizes
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self._clock = 0
        self._stack: list[_Call] = []
        self._last: Callable[[], _Call | None] = lambda: None
        self._active: dict[int, set[_Call]] = {}
        self._lingering: Unit | None = None
        self._trace: list[Unit] = units.all[:-1]
        self._seen: list[Unit] = []
        self._follows = False  # whether this forward has run the units of the trace so far
        if units.frees:
            others = {id(unit.module) for unit in units.all}
            self._modules = {unit: unit.own_modules(others - {id(unit.module)}) for unit in units.all}
            for unit in units.all:
                self._attach(unit)
            for execution in executions_of(self.root.module):
                execution.any_rank = units.any_rank

    def _attach(self, unit: Unit) -> None:
        enter = _InGraph("outside", lambda _module, _args: self._enter(unit))
        leave = _InGraph("outside", lambda _module, _args, out: self._leave(unit, out))
        leave_part = _InGraph("absent", lambda _module, _args, out: self._leave_part(unit, out))
        unit.module.register_forward_pre_hook(enter, prepend=True)
        unit.module.register_forward_hook(leave, always_call=True)
        for module in self._modules[unit]:
            if module is not unit.module and _torch.own_parameters(module):
                module.register_forward_hook(leave_part)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not ended, or has ended with an exception."""
        return bool(self._active)

    def reset(self) -> None:
        """Free everything, and forget calls that an exception has ended."""
        self._active.clear()
        self._stack.clear()
        self._lingering = None
        self.units.reset()

    def _linger(self, unit: Unit | None) -> None:
        before, self._lingering = self._lingering, unit
        if before is not None and before is not unit:
            self.units.release(before)

    # ---------------------------------------------------------------------------------------------- forward

    def _enter(self, unit: Unit) -> None:
        again = _torch.backward_number() != -1
        self._clock += 1
        self._stack.append(_Call(unit, self._clock, self.units.version))
        unit.num_running += 1
        if again:
            if self._lingering is not unit:
                self._linger(None)
            self.units.use(self.root)
        elif unit is self.root:
            self._stack[-1].around = self._seen, self._follows, self._last
            self._seen, self._follows = [], True
            self._last = lambda: None
        self.units.use(unit)
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
            self.units.launch(self._trace[len(self._seen)])

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
        # An output without autograd nodes: the nodes may be where `_watch` does not look. Keep the unit.
        escapes = torch.is_grad_enabled() and output is not None and not watched and unit.is_trained
        unit.is_kept = escapes or (watched and (unit is self.root or not self.reshard_after_forward))
        if not unit.is_kept:
            self.units.release(unit)
        if unit is self.root:
            self._forward_ended(output is not None, watched)
            if unit.num_running:  # a nested call: a recording
                self._seen, self._follows, self._last = call.around

    def _leave_part(self, unit: Unit, output: object) -> None:
        """Let a backward also enter by the outputs of a part of a unit: a hook may have carried them out of it."""
        if torch.compiler.is_compiling():
            return  # what runs in one graph can be entered from outside only
        if torch.is_grad_enabled() and self._stack and self._stack[-1].unit is unit:
            call = self._stack[-1]
            for node in _autograd_nodes(output):
                node.register_prehook(lambda _grads: self._before_backward(call))

    def _forward_ended(self, well: bool, watched: bool) -> None:
        if well:
            self._trace = self._seen
        for unit in self.units.all:
            if not (unit.is_used and unit.is_kept):
                self.units.release(unit)
        if well and not watched and self.units.compares:
            self.units.check_same()

    def _watch(self, call: _Call, output: object) -> bool:
        """Put hooks on the autograd nodes by which backward enters a call; return whether there are any."""
        nodes = _autograd_nodes(output)
        for module in self._modules[call.unit]:
            nodes |= _attribute_nodes(module)
        for node in nodes:
            node.register_prehook(lambda _grads: self._before_backward(call))
        if nodes:
            call.previous, self._last = self._last, weakref.ref(call)
        return bool(nodes)

    # ---------------------------------------------------------------------------------------------- backward

    def _before_backward(self, call: _Call) -> None:
        if torch.is_grad_enabled() and not self.units.pinned:
            raise NotImplementedError(
                "backward with create_graph=True is not available with zero=3: parameters are freed before the second "
                "backward would read them; use zero=2, or run forward and both backwards in `with model.unsharded():`"
            )
        if call.version != self.units.version:
            raise RuntimeError(
                f"the parameters of unit {call.unit.label} were changed (by an optimizer step or by "
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
        self.units.use(self.root)
        self.units.use(call.unit)
        previous = call.previous()
        if self.prefetch and previous is not None:
            self.units.launch(previous.unit)

    def _done(self, call: _Call) -> None:
        call.unit.num_pending -= 1
        self.units.release(call.unit)

    def _backward_ended(self, number: int) -> None:
        for call in sorted(self._active.pop(number, ()), key=lambda call: call.end):
            self._done(call)
        if _torch.backward_is_nested():
            return
        self._linger(None)
        for unit in self.units.all:
            self.units.release(unit)
        if self.synchronizes() and self.units.compares:
            self.units.check_same()


def _refuse_views(unit: Unit, output: object) -> None:
    """Raise RuntimeError if a unit returns a view of its parameters, which are freed now."""
    for tensor in _tensors_in(output):
        if any(bucket.holds(_torch.local_tensor(tensor)) for bucket in unit.buckets):
            raise RuntimeError(
                f"unit {unit.label} returns a parameter, or a view of one, of shape {tuple(tensor.shape)}; with zero=3 "
                "it has no values after the unit has run. Return a copy, or let it belong to the root unit (units=...)"
            )


def _autograd_nodes(output: object) -> set[Node]:
    """Return the autograd nodes of what a module returned."""
    tensors = list(_tensors_in(output))
    # Writing to a view takes its own node out of the graph, and leaves that of its base.
    bases = [base for tensor in tensors if (base := _torch.base_of(tensor)) is not None]
    return {tensor.grad_fn for tensor in (*tensors, *bases) if tensor.grad_fn is not None}


def _attribute_nodes(module: nn.Module) -> set[Node]:
    """Return the autograd nodes of tensors that a module stores as attributes (an auxiliary loss), each node once.

    Attributes that stand for a parameter are left out.
    """
    table = _torch.own_parameters(module)
    values = [value for key, value in vars(module).items() if value is not table and key not in table]
    nodes = set()
    for tensor in (t for value in values for t in _tensors_in_container(value)):
        if tensor.grad_fn is not None and _MARK not in tensor.grad_fn.metadata:
            tensor.grad_fn.metadata[_MARK] = True
            nodes.add(tensor.grad_fn)
    return nodes


def _tensors_in(value: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each, depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors_in(each, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for each in vars(value).values():
            yield from _tensors_in(each, depth - 1)


def _tensors_in_container(value: object) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in a list, tuple or dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, Tensor))
    elif type(value) is dict:
        yield from (each for each in value.values() if isinstance(each, Tensor))
