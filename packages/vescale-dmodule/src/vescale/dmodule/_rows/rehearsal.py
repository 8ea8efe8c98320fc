"""A call on twice the rows that it is given, to find what mixes rows, without the other rows.

A pipeline computes a batch in micro-batches, and data-parallel ranks compute parts of each. That is what one device
computes on the whole batch, if every operator treats every row alone and the loss is a mean over rows. A rehearsal
shows whether that is so. The call runs twice, forward and without side effects: as it is, and on DTensors whose rows
are ``Shard(0)`` on an axis of two ranks, of which this process is the second, and the first does not exist::

    an operator communicates over that axis          it mixes rows
    cross_entropy with targets that it may ignore    a mean over rows if all parts count equally many: to be compared
    the loss is Partial("avg"), equal in both        a mean over rows
    the loss is Partial("sum"), equal in both        a sum over rows, divided by nothing or by a given number
    the loss is Partial("sum"), half in the second   a sum over rows, divided by their number: a mean
    another loss                                     refused: numbers of rows count, or a constant beside a sum

Until something communicates, all values are those of the given rows. So everything can be rehearsed, also a stage of a
pipeline that gets its values from other stages, which rehearse, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import UnsupportedRandomOperator, debug, random
from vescale.dtensor.extension import exact_num_blocks

from .. import _torch
from .._boundary.convert import to_plain
from .._boundary.rows_axis import lower
from .._boundary.values import map_tensors
from .._execution.eager import EagerScope, hook_scope
from .._execution.modes import ATTRIBUTE, Execution
from .._gradients.sync import GradientSync
from .._static.recording.compare import is_close, maxima
from .._static.recording.dry_run import without_side_effects
from .._static.recording.names import Names
from .calls import calls_of
from .functions import OwnFunctions
from .known import known_row_wise
from .mixing import COUNTED_MEANS, MixingNotes
from .planned import OnAxis, PlannedRows, RowWisePart, placement_of_rows
from .values import all_rows, num_rows

__all__ = ["AXIS", "Rehearsal", "Rehearsed", "WholeCall", "row_wise_parts"]

AXIS = "rows"


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal shows.

    Attributes:
        mixing: texts about what mixes rows. Where it is not empty, other findings may follow from wrong values.
        counted: texts about means over targets of which some may be ignored.
        written: names of the buffers that a call changes.
        is_sum: whether the loss is a sum over rows, not a mean.
        doubt: a text about a loss that is neither; empty if it is one of both.
        error: why the call cannot run on DTensors; None if it can.
    """

    mixing: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    is_sum: bool = False
    doubt: str = ""
    error: Exception | None = None

    @property
    def is_clean(self) -> bool:
        """Whether nothing mixes rows."""
        return not self.mixing and not self.doubt and self.error is None


@dataclass(frozen=True)
class _Alone:
    """A call on the given rows: its loss, and the buffers that it changed."""

    loss: Tensor | None
    buffers: dict[str, Tensor]


class Rehearsal:
    """Rehearses calls of a module.

    Args:
        module: the module; parts may be absent.
        device_type: of its tensors.
        row_wise: names of modules that treat every row alone, whatever their operators do.

    Attributes:
        counted_means: functions that are means over targets, of which they may ignore some.
    """

    counted_means = COUNTED_MEANS

    def __init__(self, module: nn.Module, *, device_type: str, row_wise: Iterable[str] = ()):
        self._module, self._row_wise = module, {*row_wise, *known_row_wise(module)}
        self._ghost = _torch.ghost_mesh(device_type, AXIS)
        self._planned: _PlannedRehearsal | None = None
        self._functions = OwnFunctions(self._ghost)

    @property
    def mesh(self) -> DeviceMesh:
        """The axis of two ranks, ahead of those of a plan."""
        return self._ghost if self._execution is None else self._rows().mesh

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """Meshes of values between stages: of a rehearsal, and of calls on the rows of all ranks."""
        calls = calls_of(self._module)
        return (self.mesh,) if calls is None else (self.mesh, calls.mesh)

    @staticmethod
    def can_run(module: nn.Module) -> bool:
        """Return whether calls of a module can be rehearsed: its DTensors, if it has any, are those of a plan."""
        if vars(module).get(ATTRIBUTE) is not None:
            return True
        return not any(isinstance(t, DTensor) for t in itertools.chain(module.parameters(), module.buffers()))

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks that compute rows of one device apart; 1 where each computes those of all."""
        calls = calls_of(self._module)
        return 1 if calls is None or exact_num_blocks() is not None else calls.mesh.size(0)

    @contextlib.contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Run calls that were rehearsed on this rank's rows as they are while the context is open."""
        calls = calls_of(self._module)
        with contextlib.nullcontext() if calls is None else _set(calls, "is_off", True):
            yield

    def highest(self, numbers: list[float]) -> list[float]:
        """Return the maximum of each number over the data-parallel ranks. Collective over them."""
        calls = calls_of(self._module)
        if calls is None:
            return numbers
        mesh = calls.mesh
        return maxima(numbers, mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[0]])

    def run(
        self,
        call: Callable[[tuple, dict], Tensor | None],
        args: tuple,
        kwargs: dict,
        *,
        anywhere: Callable[[bool], bool] = bool,
    ) -> Rehearsed:
        """Rehearse a call.

        Args:
            call: makes the call with positional and keyword arguments; returns the loss, None if it has none.
            args: positional arguments; tensors have the rows in dim 0.
            kwargs: keyword arguments.
            anywhere: returns whether a flag is set on any process that makes the call together with this one.

        Raises:
            Exception: any error of the module itself.
        """
        with torch.no_grad(), self._alone():
            alone = self._as_it_is(call, args, kwargs)
            found = self._tried(call, args, kwargs, alone, splits_constants=False)
            if anywhere(not found.is_clean):
                again = self._tried(call, args, kwargs, alone, splits_constants=True)
                found = found if anywhere(not again.is_clean) else again
            if anywhere(bool(self._functions)):
                with self._functions.on_own_rows():
                    self._as_it_is(call, args, kwargs)
                if found.is_clean and self._functions.difference is not None:
                    found = replace(found, mixing=(self._functions.difference,))
            return replace(found, written=tuple(alone.buffers))

    def _as_it_is(self, call: Callable[[tuple, dict], Tensor | None], args: tuple, kwargs: dict) -> _Alone:
        with without_side_effects(self._module):
            before = _values(self._module)
            try:
                with random.local_batch(self._ghost):  # draws as on DTensors
                    loss = call(args, kwargs)
            except UnsupportedRandomOperator:
                loss = call(args, kwargs)
            after = _values(self._module)
        changed = {name for name, value in after.items() if name not in before or not torch.equal(before[name], value)}
        return _Alone(loss, {name: after[name] for name in after if name in changed})

    def _tried(self, *call: Any, splits_constants: bool) -> Rehearsed:
        try:
            with without_side_effects(self._module):
                return self._on_dtensors(*call, splits_constants=splits_constants)
        except Exception as error:
            return Rehearsed(error=error)

    def _on_dtensors(
        self,
        call: Callable[[tuple, dict], Tensor | None],
        args: tuple,
        kwargs: dict,
        alone: _Alone,
        *,
        splits_constants: bool,
    ) -> Rehearsed:
        names, planned = Names(), None if self._execution is None else self._rows()
        num_rows_of_both = 2 * (num_rows(args, kwargs) or 0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(row_wise_parts(self._module, self._names_of_row_wise(), planned))
            stack.enter_context(names.watching(dict(self._module.named_modules())))
            if planned is None:
                log: Sized = OnAxis(stack.enter_context(debug.comm_log(mesh=self._ghost)), AXIS)
                args, kwargs = all_rows(args, kwargs, self._ghost)
                stack.enter_context(self._functions.on_all_rows(names))
            else:
                args, kwargs = planned.distribute(args, kwargs)
                stack.enter_context(planned.rehearsing())
                log = stack.enter_context(planned.log())
            notes = MixingNotes(names, log, self.mesh, num_rows=num_rows_of_both, splits_constants=splits_constants)
            whole = WholeCall(call, notes)
            hook_scope(whole, "", EagerScope(True, GradientSync(), attaches=False, rows=planned and planned.mesh))
            try:
                loss = whole(args, kwargs)
            except Exception:
                if not notes.mixing:  # else values may be wrong from there on
                    raise
                loss = None
        texts = list(notes.mixing)
        if not texts:
            buffers = _values(self._module)
            differs = [name for name, value in alone.buffers.items() if not _is_equal(buffers.get(name), value)]
            texts = [f"a write of statistics of rows to buffer {name!r}" for name in differs]
        is_sum, doubt = (False, "") if loss is None or texts else self._kind(loss, alone.loss)
        return Rehearsed(tuple(texts), tuple(notes.counted), is_sum=is_sum, doubt=doubt)

    @property
    def _execution(self) -> Execution | None:
        return vars(self._module).get(ATTRIBUTE)

    def _rows(self) -> _PlannedRehearsal:
        if self._planned is None:
            self._planned = _PlannedRehearsal(self._module, self._ghost, meet=None)
        return self._planned

    def _names_of_row_wise(self) -> set[str]:
        calls = calls_of(self._module)
        return self._row_wise | (calls.row_wise if calls is not None else frozenset())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Run calls in eager mode, on this rank's rows alone, and attach nothing to parameters."""
        calls, execution = calls_of(self._module), self._execution
        with contextlib.ExitStack() as stack:
            if calls is not None:
                stack.enter_context(_set(calls.recorder, "is_running", True))
            if execution is not None:
                execution.follow(self._module)  # a rehearsal undoes what it does to hooks
                stack.enter_context(_set(execution.scope, "attaches", False))
                stack.enter_context(_set(execution, "is_rehearsed", True))
            yield

    def _kind(self, loss: Tensor, alone: Tensor) -> tuple[bool, str]:
        """Return whether a loss is a sum over rows, and a text if it is neither a sum nor a mean."""
        is_wide = isinstance(loss, DTensor) and loss.device_mesh.ndim == self.mesh.ndim
        own = loss.placements[0] if is_wide else Replicate()
        if is_wide:
            loss = _torch.local_of(loss) if self._execution is None else lower(loss, self._execution.mesh)
        part, alone = to_plain(loss), to_plain(alone)
        is_same, is_half = is_close(part, alone), is_close(2 * part, alone)
        if not own.is_partial("sum") and is_same:
            return False, ""
        if own.is_partial("sum") and is_same != is_half:
            return is_same, ""
        return False, (
            f"its loss, {float(alone):.6g} of these rows alone, is {float(part):.6g} as a part of twice as many "
            f"({own} over rows), neither a mean nor a sum"
        )


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the local values of the buffers."""
    buffers = module.named_buffers()
    return {name: (_torch.local_of(b) if isinstance(b, DTensor) else b).detach().clone() for name, b in buffers}


def _is_equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and one.dtype == other.dtype and is_close(one, other)


@contextlib.contextmanager
def _set(holder: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute while the context is open."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


class WholeCall(nn.Module):
    """A call as a module, for the hooks that run it on DTensors."""

    def __init__(self, call: Callable[[tuple, dict], Tensor | None], notes: MixingNotes):
        super().__init__()
        self._call, self._notes = call, notes

    def forward(self, args: tuple, kwargs: dict) -> Tensor | None:
        with self._notes:  # which sees calls before plain tensors in them become DTensors
            return self._call(args, kwargs)


class _PlannedRehearsal(PlannedRows):
    """Calls of a parallelized module whose results stay on the mesh with the axis of rows, for a loss function."""

    keeps_results = True

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Run calls of the module on the axis of rows while the context is open."""
        with _set(self.execution.scope, "rows", self.mesh), self.opened():
            yield


@contextlib.contextmanager
def row_wise_parts(module: nn.Module, names: set[str], planned: _PlannedRehearsal | None) -> Iterator[None]:
    """Run some parts of a module on this rank's rows alone."""
    handles: list[RemovableHandle] = []
    calls = calls_of(module)
    for name, part in module.named_modules():
        if planned is None and name in names:
            handles += _RowWise(name).register(part)
        elif planned is not None and name in {*names, *planned.row_wise} and calls is None:
            handles += RowWisePart(planned, name).register(part)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _RowWise:
    """Hooks that run a part of a plain module on this rank's rows."""

    def __init__(self, name: str):
        self._name = name
        self._running: list[list[DTensor]] = []

    def register(self, part: nn.Module) -> list[RemovableHandle]:
        return [
            part.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            part.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, _part: nn.Module, args: tuple, kwargs: dict) -> Any:
        wide: list[DTensor] = []
        self._running.append(wide)

        def convert(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            wide.append(tensor)
            return _torch.local_of(tensor)

        return map_tensors(convert, (args, kwargs))

    def leave(self, part: nn.Module, _args: tuple, output: object) -> object:
        wide = self._running.pop()
        if output is None or not wide:
            return None
        mesh = wide[0].device_mesh

        def convert(tensor: Tensor) -> DTensor:
            placement = placement_of_rows(self._name, part, tensor, wide)
            return DTensor.from_local(tensor, mesh, [placement], run_check=False)

        return map_tensors(convert, output)
