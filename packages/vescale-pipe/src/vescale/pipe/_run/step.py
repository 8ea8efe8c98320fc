"""One step of a pipeline: the actions of one rank, in the order of the schedule."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from .._schedule.actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from .._stages.attributes import attributes_of
from .._stages.hooks import hooked_units
from .._stages.placement import Placement
from .._stages.split import StageSplit
from .._stages.stub import StageModules
from .._torch import has_forward_hooks, profiled
from .backward import Boundary, Gradients, GradientSum, StageBackward, needs_whole_backward
from .crossings import Crossings
from .draws import Course, DrawRules, StepDraws
from .frame import Frame
from .mail import Letter, Mail
from .microbatch import Inputs, Share
from .mode import RunState, TraceMode
from .outside import OutsideCode
from .program import Program
from .recorder import Recorder
from .reductions import Reductions
from .result import BatchLoss, BatchRows
from .rows import RowChecks
from .tape import Births, Tape
from .ties import TiedWeights
from .transport import Transport
from .values import PipelineError, from_local_part, gradient_meta, local_gradient, meta_of

logger = logging.getLogger("vescale.pipe")

_OUTSIDE = (
    "vescale.pipe: this code is outside of stage modules and runs on every stage; what attributes keep inside of "
    "modules is on the stage of each alone, so return it from the module, or let a forward hook store it, which runs "
    "on every stage"
)

_NOTHING = contextlib.nullcontext()

#: Micro-batches that run from one tape; then the user's code runs again, and is compared with it.
TAPE_USES = 256


@dataclass(frozen=True)
class Pipeline:
    """What all steps of an engine share.

    Args:
        schedule: the actions of every rank.
        placement: the rank of every stage.
        split: the units of every stage; None with one stage.
        modules: the units of this rank and its stubs; None with one stage.
        transport: this rank's communication.
        rows: checks of what mixes rows.
        draws: how steps draw random numbers.
        ties: the weights that several stages use.
        state: what hooks and stubs share.
        loss_of: runs the model on a micro-batch, and returns its loss, or its part of another result.
        find_mesh: returns this rank's mesh with the given axis names.
        forget: drops a program.
        attributes: returns what code outside of units can depend on, other than its inputs.
        outside: the modules outside of units.
        code: compares what code outside of units may read and change.
    """

    schedule: Schedule
    placement: Placement
    split: StageSplit | None
    modules: StageModules | None
    transport: Transport
    rows: RowChecks
    draws: DrawRules
    ties: TiedWeights
    state: RunState
    loss_of: Callable[[tuple, dict], torch.Tensor]
    find_mesh: Callable[[tuple[str, ...]], DeviceMesh]
    forget: Callable[[Program], None]
    attributes: Callable[[], tuple]
    outside: Sequence[nn.Module]
    code: OutsideCode


class Step:
    """One step in progress: runs this rank's actions in order.

    ``_programs`` are those of the micro-batches: the same one for the same number of rows. ``_saved`` holds each
    micro-batch's boundary and loss from its forward to its backward, which frees its activations; ``_split`` what is
    left of a backward between I and W.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        microbatches: list[Inputs],
        programs: Sequence[Program],
        shares: Sequence[Share],
        total: GradientSum,
        result: BatchLoss | BatchRows,
    ) -> None:
        self.total = total
        self._result = result
        self._pipeline = pipeline
        self._transport, self._placement = pipeline.transport, pipeline.placement
        self._microbatches: list[Any] = list(microbatches)
        self._programs = programs
        self._last_stage = self._placement.num_stages - 1
        self._saved: dict[tuple[int, int], tuple[Boundary, torch.Tensor | None]] = {}
        self._split: dict[tuple[int, int], StageBackward] = {}
        self._ends: dict[torch.Tensor, Node] = {}
        self._draws = StepDraws(pipeline.draws, programs, shares)
        self._mail = Mail(self._transport, self._placement, programs)
        self._attributes = pipeline.attributes()
        self._hooks = contextlib.ExitStack()
        self._is_hooked = False
        self._begun: set[tuple[int, int]] = set()  # stages and programs whose tapes have been looked at
        self.where: object = "the first micro-batch"
        own = pipeline.schedule.actions(self._placement.rank)
        self.reductions = Reductions(total.of_stage, own, pipeline.ties.weights())

    def run(self) -> None:
        """Run the schedule. Afterwards the result is shared; ``total`` and ``reductions`` hold the gradients."""
        schedule, ties = self._pipeline.schedule, self._pipeline.ties
        ties.lend(self._programs[0].ties)
        constants = self._pipeline.code.constants()
        recorded = []
        for microbatch, program in enumerate(self._programs):
            if not program.recorded:
                self._record(microbatch)
                recorded.append(microbatch)
        watch = None if recorded else self._transport.watch
        schedule = _without(schedule, recorded)
        actions = self._actions(schedule)
        if self._placement.num_stages > 1:
            backward = self.has_backward
            self._mail = Mail(self._transport, self._placement, self._programs, schedule, backward=backward)
        if watch is not None:
            self._transport.gather_integers([0])  # so that all ranks begin at the same time
            watch.begin()
        for needed in actions[:1]:
            self._mail.expect(needed)
        for action, following in itertools.zip_longest(actions, actions[1:]):
            self.where = action
            if following is not None:
                self._mail.expect(following)
            with _NOTHING if watch is None else watch.action(action), profiled("vescale.pipe/", action):
                if action.kind == FORWARD:
                    self._forward(action.stage, action.microbatch)
                elif self.has_backward:
                    self._backward(action)
        self.where = "the end"
        self._pipeline.code.check_constants(constants, self._programs)
        ties.collect(self._programs[0].ties, self.total)
        self._transport.wait_sends()
        self._draws.finish()
        self._share_result()
        if self.has_backward:
            self.reductions.finish(self.total)

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed."""
        return self._programs[0].loss_meta.requires_grad

    def close(self) -> None:
        """Remove the hooks of the step."""
        self._hooks.close()
        self.reductions.close()

    # --- forward ---

    def _forward(self, stage: int, microbatch: int) -> None:
        boundary, loss = Boundary(), None
        args, kwargs = self._microbatches[microbatch]
        with self._counted(microbatch, stage), self._draws.forward(microbatch) as course:
            if self._placement.num_stages == 1:
                with self._draws.guard(microbatch, lambda: "the model"):
                    loss = self._pipeline.loss_of(args, kwargs)
                self._programs[microbatch].loss = meta_of(loss)
            else:
                crossings = self._crossings([stage], microbatch)
                boundary = crossings.boundaries[stage]
                tape, is_due = self._tape_of(stage, self._programs[microbatch])
                slots = None if tape is None or is_due else tape.prepared(args, kwargs)
                if tape is not None and slots is not None:
                    loss = tape.run(slots, crossings.send, crossings.receive)
                else:
                    loss = self._taken_down(stage, microbatch, crossings, course, is_due=is_due)
        if stage == self._placement.mine[-1]:
            self._microbatches[microbatch] = None
        part = None if loss is None else self._result.add(microbatch, loss)
        if self.has_backward:
            self._saved[stage, microbatch] = boundary, part

    def _tape_of(self, stage: int, program: Program) -> tuple[Tape | None, bool]:
        """Return the tape of a stage, if it can be run, and whether a new one is due."""
        state = self._pipeline.state
        if self._draws.draw(program):
            return None, False
        tape, begun = program.tapes.get(stage), (stage, id(program))
        is_first, is_other = begun not in self._begun, state.latest.get(stage) is not program
        self._begun.add(begun)
        state.latest[stage] = program
        if tape is None or program.attributes != self._attributes:
            return None, True
        if tape.reason:
            return None, False
        if is_first and not tape.is_current():
            del program.tapes[stage]
            return None, True
        # code of another program has run since, and may have left variables that modules read
        return (None, False) if is_other else (tape, tape.uses >= TAPE_USES)

    def _taken_down(
        self, stage: int, microbatch: int, crossings: Crossings, course: Course | None, *, is_due: bool
    ) -> torch.Tensor | None:
        """Run the user's code for a stage, and make a tape of it if one is due."""
        pipeline = self._pipeline
        assert pipeline.modules is not None
        self._hook_units()  # before the tape looks at the units
        own = [unit for home, unit in pipeline.modules.units.values() if home == stage]
        inside = functools.partial(attributes_of, [m for unit in own for m in unit.modules()], None)
        tape = Tape(self._transport.device.type, inside) if is_due else None
        loss = self._follow([stage], microbatch, crossings, course, recorder=None, tape=tape)
        if tape is not None:
            self._keep(stage, self._programs[microbatch], tape)
        return loss

    def _keep(self, stage: int, program: Program, tape: Tape) -> None:
        attributes = self._pipeline.attributes()
        if any(map(has_forward_hooks, self._pipeline.outside)):
            tape.refuse("modules outside of units have hooks")
        if attributes != self._attributes:
            tape.refuse("code outside of units changes attributes of its modules")
        if program.attributes != self._attributes:
            program.attributes, program.tapes = self._attributes, {}
        elif (before := program.tapes.get(stage)) is not None and not tape.reason:
            before.check_same(tape)
        program.tapes[stage] = tape
        if tape.reason:
            logger.info("stage %d runs the user's code in every micro-batch: %s", stage, tape.reason)

    def _crossings(self, stages: Sequence[int], microbatch: int) -> Crossings:
        return Crossings(self._mail, self._programs[microbatch], stages, microbatch, self._pipeline.find_mesh)

    def _follow(
        self,
        stages: Sequence[int],
        microbatch: int,
        crossings: Crossings,
        course: Course | None,
        *,
        recorder: Recorder | None,
        tape: Tape | None,
    ) -> torch.Tensor | None:
        """Run the user's forward for some stages; the loss comes where the last one is among them."""
        pipeline = self._pipeline
        self._hook_units()
        args, kwargs = self._microbatches[microbatch]
        program = self._programs[microbatch]
        frame = Frame(self._transport, crossings, program, stages=stages, recorder=recorder, tape=tape, course=course)
        mode = pipeline.state.mode = TraceMode(frame)
        if tape is not None:
            tape.begin(args, kwargs)
        try:
            with mode.active(), contextlib.ExitStack() as watches:
                watches.enter_context(self._draws.guard(microbatch, lambda: mode.current_module))
                if pipeline.modules is not None:
                    watches.enter_context(pipeline.modules.only(stages))
                watches.enter_context(pipeline.code.forward(is_recorded=recorder is not None))
                if tape is not None:
                    watches.enter_context(tape.taking_down())
                    watches.enter_context(Births(tape, mode.outside))
                loss = pipeline.loss_of(args, kwargs)
        except Exception as error:
            if mode.unit is None and recorder is not None and not isinstance(error, PipelineError):
                error.add_note(_OUTSIDE)
            raise
        finally:
            pipeline.state.mode = None
        return frame.end(loss, last_stage=self._last_stage)

    def _hook_units(self) -> None:
        """Hook the units of this rank until the end of the step: a backward may run their forward once more."""
        if not self._is_hooked and self._pipeline.modules is not None:
            self._hooks.enter_context(hooked_units(self._pipeline.modules.units, self._pipeline.state))
            self._is_hooked = True

    def _counted(self, microbatch: int, stage: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Note the targets that a forward of the last stage counts."""
        if self._result.counts is None or stage not in (None, self._last_stage):
            return contextlib.nullcontext()
        return self._result.counts.microbatch(microbatch)

    # --- the first micro-batch of a program ---

    def _record(self, microbatch: int) -> None:
        """Run a micro-batch, forward and backward, in lockstep with all ranks, and record it."""
        program = self._programs[microbatch]
        self._pipeline.state.attributes_read.clear()
        self._pipeline.state.latest.update(dict.fromkeys(self._placement.mine, program))
        with self.recording(microbatch) as recorder:
            boundaries, loss = self.record_forward(recorder, microbatch)
            state, code = self._pipeline.state, self._pipeline.code
            read = recorder.synchronize("constants", None, (state.constants_read, state.attributes_read))
            program.constants = frozenset().union(*(names for each in read for names in each))
            code.share_attributes([attributes for _, attributes in read])
            self._microbatches[microbatch] = None
            part = None if loss is None else self._result.add(microbatch, loss)
            if self.has_backward:
                self._record_backward(recorder, boundaries, part, microbatch)
                ties = self._programs[0].ties  # sizes of micro-batches change none
                program.ties = ties if microbatch else self._pipeline.ties.uses(ties, self.total)
        program.recorded = True
        for transfer in program.transfers if self._placement.is_here(0) else ():
            logger.info("%s", transfer)

    @contextlib.contextmanager
    def recording(self, microbatch: int) -> Iterator[Recorder]:
        """Return what synchronizes all ranks; an error inside reaches them all, and the program is dropped."""
        recorder = Recorder(self._transport, self._placement)
        try:
            yield recorder
        except Exception as error:
            self._pipeline.forget(self._programs[microbatch])
            recorder.fail(error)
            raise

    def record_forward(self, recorder: Recorder, microbatch: int) -> tuple[dict[int, Boundary], torch.Tensor | None]:
        """Run and record the forward of a micro-batch, of all stages of this rank."""
        mine = self._placement.mine
        crossings = self._crossings(mine, microbatch)
        with self._counted(microbatch), self._draws.forward(microbatch) as course:
            loss = self._follow(mine, microbatch, crossings, course, recorder=recorder, tape=None)
        for stage, own in self.total.of_stage.items():
            split = self._pipeline.split
            if needs_whole_backward(own) or (split and recorder.hooked & {*split.stages[stage]}):
                self._programs[microbatch].whole.add(stage)
        return crossings.boundaries, loss

    def _record_backward(
        self, recorder: Recorder, boundaries: dict[int, Boundary], part: torch.Tensor | None, microbatch: int
    ) -> None:
        program, here = self._programs[microbatch], self._placement.is_here
        arrived: dict[int, torch.Tensor] = {}
        for stage in reversed(range(self._placement.num_stages)):
            dead: list[int] = []
            found: dict[int, torch.Tensor | None] = {}
            if here(stage):
                boundary = boundaries.pop(stage)
                backward = self._stage_backward(program, stage, boundary, part, arrived.pop)
                with self._draws.backward(microbatch):
                    received, weights = backward.run()
                self._add(stage, microbatch, weights)
                found = dict(zip((index for index, _ in boundary.received), received, strict=True))
                dead = [index for index, gradient in found.items() if gradient is None]
                del boundary, backward
            every = recorder.synchronize(f"in the backward of stage {stage}", None, dead)
            program.dead.update(every[self._placement.ranks[stage]])
            for index in program.gradients_from_stage(stage):
                if here(stage):
                    self._send_gradient(index, microbatch, found[index])
                if here(program.gradient_to(index)):
                    arrived[index] = self._received_gradient((index, microbatch, True))

    # --- backward ---

    def _backward(self, action: Action) -> None:
        with self._draws.backward(action.microbatch):
            self._backward_of(action)

    def _backward_of(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if action.kind == WEIGHT_GRAD:
            self._add(stage, microbatch, self._split.pop((stage, microbatch)).run_weights())
            return
        boundary, part = self._saved.pop((stage, microbatch))
        program = self._programs[microbatch]
        backward = self._stage_backward(
            program, stage, boundary, part, lambda index: self._received_gradient((index, microbatch, True))
        )
        if action.kind == INPUT_GRAD:
            received = backward.run_inputs(whole=stage in program.whole)
            self._split[stage, microbatch] = backward
        else:
            received, weights = backward.run()
        for (index, _), gradient in zip(boundary.received, received, strict=True):
            self._send_gradient(index, microbatch, gradient)
        if action.kind != INPUT_GRAD:
            self._add(stage, microbatch, weights)

    def _add(self, stage: int, microbatch: int, weights: Gradients) -> None:
        """Add the gradients of a micro-batch to those of a stage, and reduce its sums after the last one."""
        if self.total.add(stage, microbatch, weights) == len(self._programs):
            self.reductions.add(stage, self.total)

    def _stage_backward(
        self,
        program: Program,
        stage: int,
        boundary: Boundary,
        loss: torch.Tensor | None,
        gradient_of: Callable[[int], torch.Tensor],
    ) -> StageBackward:
        roots = []
        if loss is not None and stage == self._last_stage:
            roots.append((get_gradient_edge(loss), torch.ones_like(loss)))
        for index, tensor in boundary.sent:
            if index not in program.dead and program.gradient_to(index) == stage:
                roots.append((get_gradient_edge(tensor), gradient_of(index)))
        for index, edge in boundary.received:
            if (later := program.later_use(index)) is not None:
                roots.append((edge, gradient_of(later)))
        received = [edge for _, edge in boundary.received]
        return StageBackward(roots, received, self.total.of_stage[stage], self._ends)

    def _received_gradient(self, letter: Letter) -> torch.Tensor:
        meta = gradient_meta(self._programs[letter[1]].transfers[letter[0]].meta)
        mesh = None if meta.sharded is None else self._pipeline.find_mesh(meta.sharded.axis_names)
        return from_local_part(self._mail.receive(letter), meta, mesh)

    def _send_gradient(self, index: int, microbatch: int, gradient: torch.Tensor | None) -> None:
        program = self._programs[microbatch]
        transfer = program.transfers[index]
        if index in program.dead:
            if gradient is not None:
                raise PipelineError(
                    f"expected no gradient for {transfer.value}, {transfer.meta}, as in the first micro-batch, got "
                    "one; the use of a value for the loss may not depend on the data"
                )
            return
        if gradient is None:
            meta = gradient_meta(transfer.meta)
            device = self._transport.device_of(meta.device_type)
            local = torch.zeros(meta.local_layout[0], dtype=meta.dtype, device=device)
        else:
            local = local_gradient(gradient, transfer.meta)
        self._mail.send(local, (index, microbatch, True))

    # --- the schedule and its result ---

    def _actions(self, schedule: Schedule) -> tuple[Action, ...]:
        actions = schedule.actions(self._placement.rank)
        if self._programs[0].loss is not None and not self.has_backward:
            return tuple(action for action in actions if action.kind == FORWARD)
        return actions

    def _share_result(self) -> None:
        """Send what the last stage has of all micro-batches to all stages."""
        metas = [program.loss_meta for program in self._programs]
        if self._placement.is_here(self._last_stage):
            tensor, expected = self._result.combined(), self._result.empty(metas, torch.device("meta"))
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise PipelineError(
                    f"expected a result of shape {list(expected.shape)} and dtype {expected.dtype}, as recorded, got "
                    f"{list(tensor.shape)} and {tensor.dtype}; select the same output for the same inputs"
                )
        else:
            tensor = self._result.empty(metas, self._transport.device_of(metas[0].device_type))
        self._result.take(self._transport.broadcast(tensor, self._placement.last_rank))


def _without(schedule: Schedule, microbatches: Sequence[int]) -> Schedule:
    """Return a schedule without the actions of some micro-batches."""
    if not microbatches:
        return schedule
    ranks = (schedule.actions(rank) for rank in range(schedule.num_ranks))
    left = tuple(tuple(action for action in own if action.microbatch not in microbatches) for own in ranks)
    return Schedule(schedule.num_stages, schedule.num_microbatches, left)
