"""The pipeline engine: runs a step of micro-batches over the stages of one mesh axis.

    engine = PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=8))
    loss = engine(input_ids, labels=labels)      # runs the full schedule: forwards, backwards, transfers
    loss.backward()                              # accumulates the gradients into the parameters
    optimizer.step()

Every rank of the axis runs the user's own forward, with stubs in place of the modules of other stages
(``_stages/stub.py``). The first micro-batch of each input signature runs in lockstep, forward and backward, and
records the values that cross stages (``_run/recorder.py``). Later micro-batches run by the schedule, a forward for each
stage of the rank, and exchange the recorded values (``_run/frame.py``, ``_run/mail.py``).

Guarantee: the gradients are the sums, in the order of micro-batches, of a gradient-accumulation loop in one process,
bit for bit, if the uses of each value that crosses stages are in the order of the stages; those of a weight that
several stages use are equal up to the order of additions (``_run/ties.py``). Random operators draw what one process
draws for the whole batch, or in that loop with ``per_microbatch=True`` (``_run/draws.py``).

On torch's fake process group the engine makes a dry run: this process runs the part of its rank, without the others
(``_run/dry.py``).

A failure in the first micro-batch is raised on every rank, and the engine can be called again. A later failure is
raised on its own rank, and soon on the others, which wait for its messages: their errors have the action and traceback
of the first. The engine then refuses further steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._checked import checked
from ._lost_ranks import first_line
from ._run.backward import GradientSum, HookGate, connect, needs_whole_backward
from ._run.draws import DrawRules
from ._run.dry import Twin
from ._run.microbatch import Inputs, equal_shares, num_rows, shares_of, split_inputs, split_sizes
from ._run.mode import RunState
from ._run.outside import OutsideCode
from ._run.program import Program, Transfer
from ._run.programs import Programs
from ._run.result import BatchLoss, BatchRows, default_loss
from ._run.rows import LossRule, RowChecks, matching_names
from ._run.step import Pipeline, Step
from ._run.ties import TiedWeights
from ._run.timing import Stopwatch, Timing, WaitMeter
from ._run.transport import Transport, is_dry
from ._run.values import PipelineError
from ._schedule.actions import Schedule
from ._stages.absent import is_plain
from ._stages.attributes import attributes_of, outside_modules
from ._stages.placement import Placement
from ._stages.split import StageSplit, split_units
from ._stages.stub import StageModules
from .plan import PipelinePlan


class PipelineEngine:
    """Train or evaluate a model as a pipeline over one mesh axis.

    The engine replaces the modules of other stages in ``model`` by stubs, in place. The names of the remaining modules
    do not change, and ``model.parameters()`` yields this rank's parameters. No tensor is read, so a deferred model
    can be materialized after the engine is constructed. A weight that several stages use belongs to the rank of its
    first name; on the others it requires no gradient outside of a step.

    Args:
        model: the full model, the same on every rank of the axis.
        axis: one-dimensional device mesh, for example ``mesh["pp"]``; its ranks run the stages, one or more each.
        plan: schedule, number of micro-batches, and split into stages.
        loss_fn: computes the loss from the model's output. It is called as ``loss_fn(output)``, or as
            ``loss_fn(output, target)`` if the engine is called with ``target=``. Without it the loss is
            ``output.loss``, ``output["loss"]`` or the output itself, a scalar tensor.
        meshes: meshes for DTensors that cross stages, in addition to those of this stage's parameters.
        per_microbatch: whether every micro-batch is a batch of its own, as in a loop of gradient accumulation. By
            default micro-batches are parts of one batch: the first step with new inputs looks for operators that mix
            rows, and such a step is refused (this needs vescale-dmodule; without it a warning says so).
        row_wise: names of modules, or regular expressions for full names, that treat every row alone although their
            code sorts or selects rows, as a mixture's experts do: ``[r".*\\.experts"]``.
        example_inputs: keyword or positional arguments of one call, for models that register modules in another order
            than that in which they run, see ``split_units``; not needed for most.
        timeout: time limit of a transfer between stages; the backend's default if None.
        forward_context: makes the context in which each forward of the model and ``loss_fn`` runs, such as
            ``functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16)``. Backward runs outside of it.

    Attributes:
        model: the model, with stubs.
        plan: the given plan.
        num_stages: number of stages over all ranks.
        stages: this rank's stages, in order.
        stage: the first of them.
        schedule: the actions of every rank.
        split: the units of every stage; None with one stage.
        rows: checks of what mixes rows.
        losses: what ``loss_fn`` gave for each micro-batch of the last step, detached, ``[num_microbatches]``, equal on
            every stage; None before the first step.

    Raises:
        SplitError: the model cannot be split by the plan.
        ScheduleError: a given schedule is invalid.
        ValueError: the axis is not one-dimensional, the schedule is of other sizes, or ``row_wise`` names no module.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch import nn
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> engine = PipelineEngine(nn.Linear(4, 1), mesh["pp"], PipelinePlan(num_microbatches=2), loss_fn=torch.sum)
        >>> loss = engine(torch.ones(8, 4))
        >>> loss.backward()
        >>> engine.model.bias.grad
        tensor([4.])
        >>> dist.destroy_process_group()
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        axis: DeviceMesh,
        plan: PipelinePlan,
        *,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        meshes: Sequence[DeviceMesh] = (),
        per_microbatch: bool = False,
        row_wise: Sequence[str | re.Pattern] = (),
        example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
        timeout: timedelta | None = None,
        forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        if axis.ndim != 1:
            raise ValueError(f"expected a pipeline mesh of one axis, got {axis.ndim} axes {axis}; pass mesh['pp']")
        self.model = model
        self.plan = plan
        self.schedule: Schedule = plan.actions(axis.size())
        self._placement = Placement.of(self.schedule, axis.get_local_rank())
        self.num_stages = self.schedule.num_stages
        self.stages = self._placement.mine
        self.stage = self.stages[0]
        self.split: StageSplit | None = None
        self._loss_fn = loss_fn
        self._meshes = tuple(meshes)
        self._context = forward_context
        self._state = RunState()
        self._gate = HookGate()
        self._current = Program()
        self._failure: BaseException | None = None
        self.losses: torch.Tensor | None = None
        self._modules: StageModules | None = None
        names, whole = matching_names(model, row_wise), dict(model.named_modules())
        self._twin: Twin[PipelineEngine] | None = None
        per_microbatch |= is_dry(axis)  # rows are not compared, and generators not moved
        if self.num_stages > 1:
            self.split = split_units(model, plan, self.num_stages, example_inputs=example_inputs)
            if is_dry(axis):
                self._twin = Twin(model, axis.device_type, functools.partial(self._twin_of, self.split.stages))
            self._modules = StageModules(model, self.split, self.stages, self._state)
            here = dict(model.named_modules())
            names = [name for name in names if here.get(name) is whole[name]]
        self._transport = Transport(axis, timeout=timeout)
        self._state.device = self._transport.device
        self.rows = RowChecks(
            model,
            self._transport,
            self._placement.last_rank,
            plan.num_microbatches,
            row_wise=names,
            is_on=not per_microbatch,
        )
        self._ties = TiedWeights(model, self.split.ties if self.split else (), self._placement, self._transport)
        num_stages = 1 if self._twin else self.num_stages
        self._draws = DrawRules(self._transport.device, num_stages, are_parts=not per_microbatch)
        self._programs = Programs(self._placement, self._transport, self._draws, self._ties)
        outside = [] if self.split is None else outside_modules(model, self.split.stages)
        attributes = functools.partial(self._attributes, outside, loss_fn)
        self._pipeline = Pipeline(
            self.schedule,
            self._placement,
            self.split,
            self._modules,
            self._transport,
            self.rows,
            self._draws,
            self._ties,
            self._state,
            loss_of=self.loss_of,
            find_mesh=self.find_mesh,
            forget=self._programs.forget,
            attributes=attributes,
            outside=outside,
            code=OutsideCode(self._state, self._modules, attributes, is_repeated=len(self.stages) > 1),
        )

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The values that cross stages, for the last input signature; empty before the first call."""
        return tuple(self._current.transfers)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step and return its loss on every stage: the mean over rows, or their sum, as that of the batch.

        With ``per_microbatch=True`` it is the mean over micro-batches.

        With gradients enabled, ``loss.backward()`` on the returned loss accumulates the step's gradients into the
        parameters. Under ``torch.no_grad()`` only the forwards run.

        Args:
            *args: positional arguments of the model; tensors are split along dim 0 into micro-batches.
            **kwargs: keyword arguments of the model, and ``target`` for ``loss_fn``.

        Raises:
            ValueError: an input cannot be split.
            PipelineError: the program cannot run as a pipeline, its micro-batches are not parts of one batch, or
                another stage failed.
            RandomOperatorError: a random operator would not draw what one process draws.
        """
        step, result = self._run(args, kwargs, self._pipeline, PipelineEngine.__call__)
        assert isinstance(result, BatchLoss)
        result.check()
        self.losses = result.losses
        return connect(result.value, step.total, step.reductions, self._gate) if step.has_backward else result.value

    @checked
    def outputs(self, *args: Any, select: Callable[[Any], torch.Tensor] | None = None, **kwargs: Any) -> torch.Tensor:
        """Run the forwards alone and return a tensor of the model's output for the whole batch, on every stage.

        Args:
            *args: positional arguments of the model, as in a step.
            select: returns the tensor, of as many rows (dim 0) as the inputs; the output itself by default. It runs on
                every stage, and must use the modules of the last one.
            **kwargs: keyword arguments of the model.

        Returns:
            the rows of all micro-batches, ``[num_rows, ...]``, without a gradient. A DTensor is brought together.

        Raises:
            TypeError: the output is no tensor.
            ValueError: it has another number of rows, or an input cannot be split.
            PipelineError: as in a step.

        Example:
            >>> logits = engine.outputs(input_ids, select=lambda output: output.logits)    # doctest: +SKIP
        """
        with torch.no_grad():
            pipeline = dataclasses.replace(
                self._pipeline,
                loss_of=lambda args, kwargs: self._rows_of(select, args, kwargs),
                # with the function itself: a tape keeps it, so that no other one gets its identity
                attributes=lambda: (*self._attributes(self._pipeline.outside, select), select),
            )
            of_twin = functools.partial(PipelineEngine.outputs, select=select)
            _, result = self._run(args, kwargs, pipeline, of_twin, outputs_of=_place_of(select))
        return result.value

    def _run(
        self,
        args: tuple,
        kwargs: dict,
        pipeline: Pipeline,
        of_twin: Callable[..., Any],
        *,
        outputs_of: str | None = None,
    ) -> tuple[Step, BatchLoss | BatchRows]:
        """Run a step, and return it with the loss of the batch, or with rows of all micro-batches.

        ``of_twin`` is the method that makes the same call of another engine. ``outputs_of`` tells selections of rows
        apart, in the same way on all ranks.
        """
        if self._failure is not None:
            raise PipelineError(
                f"expected an engine without failed steps, got a call after {type(self._failure).__name__}: "
                f"{first_line(self._failure)}; messages may be left between the stages, so restart from a checkpoint "
                "with a new engine"
            )
        self._draws.check_parts(self.plan.num_microbatches)
        microbatches = split_inputs(args, kwargs, self.plan.num_microbatches)
        sizes = split_sizes(args, kwargs, self.plan.num_microbatches)
        shares = shares_of(sizes) if self._draws.are_parts else equal_shares(len(sizes))
        self._transport.begin_step(args, kwargs)
        self._state.device = self._transport.device_of(self._transport.device.type)
        parameters = self._parameters()
        mode = f"{self._mode_text()}, outputs={outputs_of}"
        record = None if self._twin is None else functools.partial(self._recorded_by, self._twin, of_twin)
        step, programs = None, []
        try:
            with self._transport.listening():
                programs = self._programs.of(microbatches, sizes, mode, _form_of(parameters), record)
                self._current = programs[0]
                rule = self._rule_of(pipeline, programs, microbatches)
                result: BatchLoss | BatchRows = BatchRows()
                if outputs_of is None:
                    is_last = self._placement.is_here(self.num_stages - 1)
                    result = BatchLoss(rule, self.rows, is_here=is_last, shares=shares)
                with self._ties.active(programs[0].ties), self.rows.rehearsed():
                    total = GradientSum(parameters if torch.is_grad_enabled() else dict.fromkeys(parameters, ()))
                    self._gate.guard(total.parameters)
                    step = Step(pipeline, microbatches, programs, shares, total, result)
                    with contextlib.closing(step):
                        step.run()
        except BaseException as error:
            self._transport.drop_sends()
            # a recording fails on all ranks with nothing in flight, unless one of them is interrupted or lost; later
            # failures may leave unreceived messages
            is_under_way = self.num_stages > 1 and step is not None and all(program.recorded for program in programs)
            if is_under_way or not isinstance(error, Exception) or self._transport.has_failed():
                self._failure = error
                self._transport.report(error, "the first micro-batch" if step is None else str(step.where))
            raise
        return step, result

    @contextlib.contextmanager
    def timing(self) -> Iterator[Timing]:
        """Measure the steps that run inside this context, which all ranks of the pipeline enter and leave together.

        Waits for other ranks do not count as work. Clocks of ranks are set by a collective at the beginning of each
        step, so they differ by about the latency of a message. A step that records its inputs is not measured. An
        accelerator is synchronized before and after each action; measure a few steps of many.

        Raises:
            ValueError: steps are measured already.

        Example:
            >>> with engine.timing() as timing:                             # doctest: +SKIP
            ...     for _ in range(5):
            ...         engine(x, target=y).backward()
            >>> draw(timing.steps[-1], "step.svg")                          # doctest: +SKIP
            >>> plan = PipelinePlan("auto", 8, costs=timing.costs())        # doctest: +SKIP
        """
        if self._transport.is_dry:
            raise ValueError(
                "expected ranks that run, got a dry run on the fake process group, whose waits take no time"
            )
        if self._transport.watch is not None:
            raise ValueError("expected one measurement at a time, got engine.timing() inside another; leave the first")
        watch = self._transport.watch = Stopwatch(self._transport.device)
        timing = Timing()
        try:
            yield timing
        finally:
            self._transport.watch = None
        timing.end(self.schedule, self._transport.gather_objects(watch.steps))

    @checked
    def on_wait(self, meter: WaitMeter) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``meter`` measures this rank's waits for other stages."""
        return self._transport.on_wait(meter)

    # --- programs ---

    def _twin_of(self, stages: Sequence[Sequence[str]], model: nn.Module, axis: DeviceMesh) -> PipelineEngine:
        """Return an engine that runs all stages of a copy of the model on this rank."""
        plan = PipelinePlan("looped_bfs", split=stages, stages_per_rank=self.num_stages)
        return PipelineEngine(
            model,
            axis,
            plan,
            loss_fn=self._loss_fn,
            meshes=self._meshes,
            per_microbatch=True,
            forward_context=self._context,
        )

    def _recorded_by(self, twin: Twin[PipelineEngine], call: Callable[..., Any], inputs: Inputs) -> Program:
        """Return the program of a micro-batch that a twin has run; only this rank knows what owns its parameters."""
        program = twin.run(call, inputs, model=self.model, generators=self._draws.generators)._current
        program.whole.update(stage for stage, own in self._parameters().items() if needs_whole_backward(own))
        return program

    def _rule_of(self, pipeline: Pipeline, programs: Sequence[Program], microbatches: Sequence[Inputs]) -> LossRule:
        """Return how losses of micro-batches make that of the batch, which a rehearsal of each program shows.

        Raises:
            PipelineError: rows are mixed, or micro-batches with other numbers of rows have other rules.
        """
        for program, inputs in zip(programs, microbatches, strict=True):
            if program.rule is None:
                program.rule = self.rows.rule_of(functools.partial(self._rehearsed, pipeline), *inputs)
        rule, *others = dict.fromkeys(program.rule for program in programs if program.rule is not None)
        if others:
            raise PipelineError(
                "expected a loss that is the same mean over rows or targets, or a sum over rows, in all micro-batches, "
                f"got {rule} in the first one and {others[0]} in one with fewer rows; use a multiple of "
                f"num_microbatches={len(programs)} rows"
            )
        return rule

    def _mode_text(self) -> str:
        device = self._transport.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        stream = self._draws.generators.stream
        return f"grad={torch.is_grad_enabled()}, training={self.model.training}, autocast={autocast}, numbers={stream}"

    def _parameters(self) -> dict[int, list[torch.Tensor]]:
        """Return the parameters of each stage of this rank."""
        modules: dict[int, list[nn.Module]] = {stage: [] for stage in self.stages}
        if self._modules is None:
            modules[self.stage].append(self.model)
        else:
            for stage, unit in self._modules.units.values():
                modules[stage].append(unit)
        return {stage: list({p: None for unit in own for p in unit.parameters()}) for stage, own in modules.items()}

    def _attributes(self, outside: Sequence[nn.Module], function: Callable[..., Any] | None) -> tuple:
        """Return what code outside of units can depend on, other than its inputs."""
        own = attributes_of(outside, function)
        if self._modules is None:
            return own
        read = self._modules.attributes(sorted(self._state.attributes_shared))
        values = (value if is_plain(value) else id(value) for value in read.values())
        return *own, *map(id, self._modules.constants().values()), *values

    def _rehearsed(self, pipeline: Pipeline, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """Run a call forward, for nothing but what it shows, and return its loss, or a mean, where that is."""

        def loss_of(args: tuple, kwargs: dict) -> torch.Tensor:
            found = pipeline.loss_of(args, kwargs)
            return found if found.dim() == 0 else found.float().mean()

        if self.num_stages == 1:
            return loss_of(args, kwargs)
        rehearsed = dataclasses.replace(pipeline, loss_of=loss_of)
        step = Step(rehearsed, [(args, kwargs)], [Program()], equal_shares(1), GradientSum({}), BatchRows())
        with contextlib.closing(step), step.recording(0) as recorder:
            return step.record_forward(recorder, 0)[1]

    # --- used by a step ---

    def loss_of(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """Run the model (and ``loss_fn``) on one micro-batch."""
        with self._context():
            if self._loss_fn is None:
                return default_loss(self.model(*args, **kwargs))
            inputs = {name: value for name, value in kwargs.items() if name != "target"}
            output = self.model(*args, **inputs)
            loss = self._loss_fn(output, kwargs["target"]) if "target" in kwargs else self._loss_fn(output)
            return default_loss(loss)

    def _rows_of(self, select: Callable[[Any], torch.Tensor] | None, args: tuple, kwargs: dict) -> torch.Tensor:
        """Run the model on one micro-batch, and return the chosen tensor of its output."""
        with self._context():
            output = self.model(*args, **kwargs)
            rows: Any = output if select is None else select(output)
        if not isinstance(rows, torch.Tensor):
            raise TypeError(
                f"expected a tensor in the model's output, got {type(rows).__name__}; pass "
                "PipelineEngine.outputs(..., select=lambda output: output.logits)"
            )
        expected = num_rows(args, kwargs)
        if rows.dim() == 0 or rows.shape[0] != expected:
            raise ValueError(
                f"expected an output of {expected} rows (dim 0), as the inputs of a micro-batch, got a tensor of shape "
                f"{list(rows.shape)}; select another one"
            )
        return rows

    def find_mesh(self, axis_names: tuple[str, ...]) -> DeviceMesh:
        """Return this rank's mesh with the given axis names.

        Raises:
            PipelineError: no mesh of the parameters or of ``meshes`` has these axes.
        """
        candidates = [
            *self._meshes,
            *(p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor)),
            *self.rows.meshes,  # they have the axes of others, and one more
        ]
        for mesh in candidates:
            names = mesh.mesh_dim_names or ()
            if names == axis_names:
                return mesh
            if set(axis_names) <= set(names):
                return mesh[axis_names]
        raise PipelineError(
            f"{self._placement.name_of(self._placement.rank)}: expected a mesh with the axes {axis_names} for a "
            "received DTensor, got none in its parameters; pass it as PipelineEngine(..., meshes=[mesh['tp']])"
        )


def _form_of(parameters: dict[int, list[torch.Tensor]]) -> str:
    """Return the part of the input signature that only this rank has: ``requires_grad`` and dtypes."""
    return " ".join(f"{p.requires_grad:d}{p.dtype}" for own in parameters.values() for p in own)


def _place_of(function: Callable[..., Any] | None) -> str:
    """Return the name of a function and where it begins, equal on all ranks, which tells most functions apart."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{function.__module__}.{name}:{code.co_firstlineno}"
