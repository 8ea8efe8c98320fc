"""A module that runs on local tensors, as a small state machine.

``StaticProgram`` belongs to one module, the whole model or a part of one that otherwise runs in eager mode. Hooks of
the module call :meth:`StaticProgram.enter` before its forward and :meth:`StaticProgram.leave` after it::

                             new signature              layouts adopted
            RECORDING <--------------------------- IDLE ---------------------> CHECKING
                                                   |  |                           |
     no gradient, first time; exact mode           |  |  forward,                 |  forward,
            EAGER_ONCE <---------------------------'  |  recomputation            |  recomputation
                                                      '------------> OPEN <-------'

Every arrow is also the way back, at the end and after an exception.

IDLE
    The module holds DTensors. The hooks are the only trace of the program in it.
RECORDING
    The first dry run: the caller's call on DTensors, with an observer (see ``recording.dry_run``).
CHECKING
    The second dry run: the same call on local tensors, compared with the first. OPEN while a forward runs.
EAGER_ONCE
    The first call of a signature without gradients, which generation may never repeat, and calls inside of ``exact``.
OPEN
    The patch (see ``_execution.patch``) is in the module: local parameters, attributes, direct calls, compiled blocks.
    Boundaries run recorded conversions. The module's own code runs between them on plain tensors.

Every transition to IDLE restores the module, also after an exception. The signature of a call is the shapes, dtypes and
layouts of its tensors, its Python arguments, and the switches of checkpointing, training, autocast and gradients.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from vescale.dtensor.extension import exact_num_blocks

from .. import _torch
from .._boundary.values import describe_value, map_leaves
from .._compile.blocks import CompiledProgram
from .._execution.eager import hook_scope
from .._execution.module_hooks import hook_calls
from .._execution.patch import ModulePatch
from .._execution.surroundings import surround
from .._report.ranges import is_watched
from .call import Call, State
from .direct_calls import direct_calls
from .local_modules import local_rows, silent_axes
from .local_parameters import LocalParameters
from .model import Model
from .operator_mode import OperatorHooks, QuietCall
from .parts import Parts, join
from .recomputation import Recomputation
from .recording.calls import CallRecorder, Island, Place
from .recording.compare import add_rows, difference, highest, raise_together
from .recording.dry_run import Run, check, keep_or_refuse, new_run, record
from .recording.layouts import RecordedLayouts, Recording, Recordings
from .recording.search import search
from .regions import EagerPart, ExpertsPart, experts_gradients

__all__ = ["StaticProgram"]

logger = logging.getLogger("vescale.dmodule")

AGREES, DIFFERS, FAILS = range(3)  # how the check of a recording ends


class StaticProgram:
    """Run a module on local tensors; see the docstring of this file.

    Args:
        model: the parallelized model.
        name: name of the module in the model.
        module: the module.
        eager: full names of the eager parts of the model.
        is_root: whether callers expect plain tensors (the full model) or DTensors (a part of it).
        compiled: whether to compile the blocks of the module.

    Attributes:
        parts: the module and its submodules.
        call: the call in progress and the state.
        recordings: all recorded layouts, by signature.
        parameters: the local parameters; None before the first call.
        patch: of local parameters, attributes and forwards.
        compiled: the compiled blocks; None in static mode.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        module: nn.Module,
        eager: frozenset[str],
        *,
        is_root: bool,
        compiled: bool = False,
    ):
        self.model = model
        self.parts = Parts.of(module, name, eager)
        self.call = Call(self.parts, model.mesh, is_root=is_root)
        self.recordings = Recordings()
        self.parameters: LocalParameters | None = None
        self.patch = ModulePatch()
        self.compiled = CompiledProgram(self.parts, model.mesh) if compiled else None
        self._applied: list[ModulePatch] = []  # while the program is open
        self._surroundings = contextlib.ExitStack()  # while the program is open
        self._handles: list[RemovableHandle] = []
        self._eager_once: list[RemovableHandle] = []
        self._drawing: dict[str, OperatorHooks] = {}  # of the parts with random operators
        self._recomputation = Recomputation(self.call, self.parts, self.recordings, model.phase, self._opened)
        self._quiet_call = QuietCall(model.mesh.device_type)
        self._before = State.IDLE  # the state that closing returns to

    # --------------------------------------------------------------------------------------------- hooks

    def install(self) -> None:
        """Install the hooks of the parts of the module; the owner of the program hooks the module itself."""
        parts, phase = self.parts, self.model.phase
        for name in parts.eager:
            eager = EagerPart(self.call, phase, name)
            self._handles += hook_scope(parts.modules[name], name, self.model.scope)
            self._handles += hook_calls(parts.modules[name], eager.enter, eager.leave)
        for name, region in parts.experts.items():
            experts = ExpertsPart(self.call, name, region)
            self._handles += hook_calls(parts.modules[name], experts.enter, experts.leave)
        for name in parts.repeated():
            self._recomputation.hook(name)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recomputation.remove()
        self._drawing.clear()

    def _hook_random_operators(self, names: Iterable[str]) -> None:
        """Hook the parts with recorded random operators."""
        for name in names:
            if name not in self._drawing:
                hooks = self._drawing[name] = OperatorHooks(self.call, name)
                if name != self.parts.name:  # a hook registered during a call of its module misses that call
                    self._handles += hooks.register(self.parts.modules[name])

    # --------------------------------------------------------------------------------------------- a call

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Begin a call: record it if its signature is new, then open the program."""
        call = self.call
        if (call.depth or call.is_open) and not _torch.is_in_own_forward(module):
            self._abandon()
        if call.state is State.IDLE and not self._prepare(args, kwargs):
            self._enter_eager_once()
        elif call.state in (State.IDLE, State.CHECKING):
            self._open()
        if not call.depth:
            call.number += 1
            call.layouts.restart()
        call.depth += 1
        if call.is_open and self.parts.name in self._drawing:
            self._drawing[self.parts.name].enter(module, args)
        if call.state is State.EAGER_ONCE:
            self.model.scope.enter(module, self.parts.name)
        if call.state is State.EAGER_ONCE or call.depth > 1:  # eager arguments, or arguments from inside the module
            return None
        edge = call.localize if call.is_open else call.observer.watch_argument
        if self.model.rows is not None and call.is_root and not call.is_open:
            edge = call.observer.watch_rows
        where = self.parts.edge("enters")
        return map_leaves(edge, args, where), map_leaves(edge, kwargs, where) if kwargs else kwargs

    def leave(self, module: nn.Module, args: tuple, output: object) -> object:
        """End a call and return the results of eager mode. ``output`` is None if the call raised."""
        call, state = self.call, self.call.state
        if not call.depth:
            return None  # an earlier hook raised, so `enter` did not run
        call.depth -= 1
        if state is State.EAGER_ONCE:
            self._leave_eager_once()
            return None
        if state is State.OPEN:
            if self.parts.name in self._drawing:
                self._drawing[self.parts.name].leave(module, args, output)
            if not call.depth:
                self._close()
                self._quiet_call.end(self.parts.name, well=output is not None)
                if output is not None:
                    call.layouts.check_order()
        if output is None:
            return None
        if state is State.RECORDING:
            edge = call.observer.watch
        else:
            edge = call.globalize if call.is_root or not call.depth else call.noted
        return map_leaves(edge, output, self.parts.edge("returns"))

    def _enter_eager_once(self) -> None:
        """Run one call in eager mode, by hooks of the children.

        Hooks of the module itself would be removed while torch iterates over them.
        """
        self.call.state = State.EAGER_ONCE
        for name, child in self.parts.module.named_children():
            self._eager_once += hook_scope(child, join(self.parts.name, name), self.model.scope)

    def _leave_eager_once(self) -> None:
        self.model.scope.leave(self.parts.name)
        if not self.call.depth:
            for handle in self._eager_once:
                handle.remove()
            self._eager_once.clear()
            self.call.state = State.IDLE

    def _abandon(self) -> None:
        """Restore the module after an interrupted call; torch runs no forward hooks after a KeyboardInterrupt."""
        self.call.depth = 0
        for hooks in self._drawing.values():
            while hooks.entered:
                hooks.leave(self.parts.module, (), None)
        if self.call.state is State.EAGER_ONCE:
            self.model.scope.path.clear()
            self.model.scope.contexts.close()
            self._leave_eager_once()
        else:
            self._close()
            self._quiet_call.end(self.parts.name, well=False)

    def _prepare(self, args: tuple, kwargs: dict) -> bool:
        """Choose the layouts of a call; record a new signature. Return False if this call must run in eager mode."""
        if self.model.is_rehearsed or exact_num_blocks() is not None:
            return False
        self._refresh()
        recordings, signature = self.recordings, self._signature(args, kwargs)
        layouts = self._find(signature)
        self.call.signature = signature
        checks = self.model.checks if self.call.is_root else None
        if layouts is None:
            if checks is not None:
                checks.first_call(args, kwargs)
            if not torch.is_grad_enabled() and signature not in recordings.seen:
                recordings.seen.add(signature)
                return False
            self._record(signature, args, kwargs)
            if checks is not None:
                checks.generator(draws=signature not in recordings.quiet)
        else:
            self.call.layouts = layouts
            if checks is not None:
                checks.later_call(args, kwargs, draws=signature not in recordings.quiet)
            if signature in recordings.quiet:
                self._quiet_call.begin()
        return True

    def prepare(self, args: tuple, kwargs: dict) -> None:
        """Record a call if its signature is new, and do not run it. Collective over the mesh."""
        if self.call.state is State.IDLE:
            self._prepare(args, kwargs)
            self._quiet_call.end(self.parts.name, well=False)

    def _signature(self, args: tuple, kwargs: dict) -> Hashable:
        device = self.call.plan_mesh.device_type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        values = *map(describe_value, args), describe_value(kwargs) if kwargs else None
        mode = torch.is_grad_enabled(), self.parts.module.training, self.model.rows is not None
        return *mode, dtype, *self.parts.checkpointing(), *values

    def _find(self, signature: Hashable) -> RecordedLayouts | None:
        """Return the recorded layouts of a call; None if any rank must record it, because all ranks record together."""
        layouts, any_rank = self.recordings.by_signature.get(signature), self.model.any_rank
        if any_rank is not None:
            is_due = layouts is None and (torch.is_grad_enabled() or signature in self.recordings.seen)
            if any_rank(is_due):
                self.recordings.seen.add(signature)
                return None
        return layouts

    # --------------------------------------------------------------------------------------------- recording

    def _record(self, signature: Hashable, args: tuple, kwargs: dict) -> None:
        """Record a call on DTensors, adopt its layouts, check them on local tensors. Collective over the mesh.

        Raises:
            NotLocalFriendlyError: the module is wrong on local tensors; raised on all ranks.
            Exception: any error of the module itself in eager mode.
        """
        error, level, mesh, rows = None, FAILS, self._mesh, self.model.rows
        self.parts.row_wise = frozenset() if rows is None else rows.row_wise
        try:
            eager, recording, islands = self._run_on_dtensors(args, kwargs)
            local = new_run(self.call.plan_mesh)
            self._adopt(recording)
            with self._dry_run(State.CHECKING, local):
                self._refresh()
                self._expect_gradients(checked=local)
                check(local, eager, self.parts, args, kwargs)
            level = AGREES
        except Exception as found:
            error = found
            logger.warning("static mode: the recording failed on this rank: %s", found)  # `highest` may hang
        finally:
            if self.parameters is not None:
                self._expect_gradients()
        for run in (local, eager) if rows is not None and highest(level, mesh) == AGREES else ():
            add_rows(run, eager, mesh)  # a rank that failed would not take part
        if level == AGREES and (error := difference(eager, local, self.parts)) is not None:
            level = DIFFERS
        if highest(level, mesh) == DIFFERS:
            nudged = self._run_nudged(eager, islands, args, kwargs)
            error = error and difference(eager, local, self.parts, nudged)
        raise_together(error, mesh)
        self.recordings.assign(signature, self.call.layouts, is_quiet=recording.is_quiet, parts=self.parts)
        self.recordings.returned[signature] = recording.returned

    def _run_nudged(self, eager: Run, islands: Mapping[Place, Island], args: tuple, kwargs: dict) -> Run:
        """Record a call again, to measure how far rounding errors reach (see ``recording.rounding``)."""
        run = new_run(self.call.plan_mesh, eager.observer.changed)
        self._run(run, self._recorder(run, islands, keeps=False, nudges=True), args, kwargs)
        if self.model.rows is not None:
            add_rows(run, eager, self._mesh)
        return run

    @property
    def _mesh(self) -> DeviceMesh:
        """The ranks that make the call together."""
        return self.call.plan_mesh if self.model.rows is None else self.model.rows.mesh

    def _recorder(self, run: Run, islands: Mapping[Place, Island], **options: bool) -> CallRecorder:
        return CallRecorder(run.names, self._mesh, islands, over_rows=self.model.rows is not None, **options)

    def _run_on_dtensors(self, args: tuple, kwargs: dict) -> tuple[Run, Recording, Mapping[Place, Island]]:
        """Record a call; again, if it changes results in place or has islands that were not known before."""
        model, changed = self.model, frozenset()
        islands: dict[Place, Island] = {}
        searches = model.scope.allow_implicit or model.rows is not None
        while True:
            run = new_run(self.call.plan_mesh, changed)
            recorder = self._recorder(run, islands, keeps=searches)
            recording = self._run(run, recorder, args, kwargs)
            if recording is None:
                changed |= run.observer.newly_changed()
                continue
            found = self._islands(recording, recorder, args, kwargs) if searches else {}
            if found.keys() <= islands.keys():
                return run, recording, islands
            searches = any(island.operands for island in found.values())  # which changes what follows it
            islands = {**islands, **found}

    def _run(self, run: Run, recorder: CallRecorder, args: tuple, kwargs: dict) -> Recording | None:
        with self._dry_run(State.RECORDING, run):
            self.model.phase.convert, recorder.edges = run.observer.convert, run.observer.edges
            rows = self.model.rows
            if rows is not None and self.call.is_root:
                args, kwargs = rows.distribute(args, kwargs)
            with contextlib.nullcontext(()) if rows is None else rows.log() as recorder.log:
                return record(run, recorder, self.parts, self.model.scope, args, kwargs)

    def _islands(self, recording: Recording, recorder: CallRecorder, args: tuple, kwargs: dict) -> dict[Place, Island]:
        """Search for operators that must run on DTensors. Collective over the mesh."""
        call, run = self.call, new_run(self.call.plan_mesh)
        before, call.layouts = call.layouts, recording.forward_layouts(call.plan_mesh, self._returns)
        try:
            with self._dry_run(State.CHECKING, run):
                self._refresh()
                self._expect_gradients(checked=run)
                return search(run, recorder, self.parts, args, kwargs)
        finally:
            call.layouts = before

    @contextlib.contextmanager
    def _dry_run(self, state: State, run: Run) -> Iterator[None]:
        call, model = self.call, self.model
        call.state, call.observer, model.scope.attaches = state, run.observer, False
        meter, model.phase.meter = model.phase.meter, None  # a report does not count dry runs
        try:
            with _torch.repeated():
                yield
        finally:
            if call.is_open:  # interrupted
                self._close()
            call.state, call.depth, call.observer, model.scope.attaches = State.IDLE, 0, None, True
            model.phase.convert, model.phase.meter = None, meter

    @property
    def _returns(self) -> str | None:
        """The boundary where replicated results become plain tensors; None if they stay DTensors."""
        return self.parts.edge("returns") if self.call.is_root else None

    def _adopt(self, recording: Recording) -> None:
        """Adopt the layouts of a recording and hook the parts that it names."""
        call, recordings = self.call, self.recordings
        call.layouts = recordings.adopt(recording, call.plan_mesh, self._returns)
        recordings.gradients = experts_gradients(self.parts, call.layouts.tokens) | recordings.gradients
        self._hook_random_operators(recording.operators)
        for name in recording.recomputed:
            self._recomputation.hook(name)

    # --------------------------------------------------------------------------------------------- open and close

    def _open(self) -> None:
        """Apply the patch and switch the boundaries to recorded conversions."""
        calls = self._calls()
        self._before = self.call.state
        self.call.state = State.OPEN
        try:
            self._apply(self.patch)
            self.parameters.opened()
            if calls is not None:
                self._apply(calls)
        except BaseException:
            self._close()
            raise
        phase = self.model.phase
        phase.convert, phase.local = self.call.convert, True
        self._surroundings = surround(self._recomputation.carry)

    def _apply(self, patch: ModulePatch) -> None:
        patch.apply()
        self._applied.append(patch)

    def _calls(self) -> ModulePatch | None:
        """Return the patch of direct calls or of compiled blocks; None where the normal calls must run."""
        layouts = self.call.layouts
        if self.call.observer is not None:
            return None
        if self.compiled is not None:
            return self.compiled.patch(layouts)
        if is_watched(self.model.phase.meter) or _torch.has_global_hooks():
            return None
        if layouts.calls is None:
            layouts.calls = direct_calls(self.parts, layouts.steps)
        return layouts.calls if layouts.calls.adds_only() else None

    def _close(self) -> None:
        """Restore the patch and switch the boundaries back; replaced buffers stay, as DTensors."""
        phase = self.model.phase
        phase.convert, phase.local = None, False
        self._surroundings.close()
        buffers = self.parameters.replaced_buffers()
        while self._applied:
            self._applied.pop().restore()
        for table, key, buffer in buffers:
            table[key] = buffer
        self.call.state = self._before

    @contextlib.contextmanager
    def _opened(self, layouts: RecordedLayouts) -> Iterator[None]:
        """Open the program, which is closed, with some layouts while the context is open."""
        before, self.call.layouts = self.call.layouts, layouts
        try:
            self._refresh()
            self._open()
            yield
        finally:
            if self.call.is_open:
                self._close()
            self.call.layouts = before

    def _refresh(self) -> None:
        """Make the local parameters and the patch before the first call and after a change of the model."""
        if self.parameters is not None and not self.parameters.stale():
            return
        own, before = self.parts.local(), self.parameters
        self.model.sync.attach(self.parts.module)
        self.parameters = LocalParameters(own.items(), silent_axes)
        if before is not None and before.trained != self.parameters.trained:
            self.recordings.by_signature.clear()
        self.patch = ModulePatch([*self.parameters.rows(), *local_rows(own, self.model.local_attributes)])
        self.call.silent = self.parameters.silent()
        self._expect_gradients()

    # --------------------------------------------------------------------------------------------- gradients

    def _expect_gradients(self, checked: Run | None = None) -> None:
        """Set the layouts of the local gradients and the hooks that receive them.

        Args:
            checked: the dry run that keeps the gradients; None delivers them to the receivers of the DTensors.
        """
        gradients = self.recordings.gradients
        layouts = {} if checked is not None else gradients
        for parameter in self.parameters:
            keeps = None if parameter.name in layouts else functools.partial(keep_or_refuse, parameter, checked)
            parameter.expect(gradients.get(parameter.name), keeps)
