"""The pipeline engine: runs a step of micro-batches over the stages of one mesh axis.

    engine = PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=8))
    loss = engine(input_ids, labels=labels)      # runs the full schedule: forwards, backwards, transfers
    loss.backward()                              # accumulates the gradients into the parameters
    optimizer.step()

Every rank of the axis runs the user's own forward, with stubs in place of the modules of other stages
(``_stages/stub.py``). The first micro-batch of each input signature runs in lockstep and records the values that
cross stages (``_run/recorder.py``). Later micro-batches run without lockstep and exchange the recorded values
(``_run/frame.py``).

Guarantee: the gradients are the sums, in the order of micro-batches, of a gradient-accumulation loop in one process.
They are equal bit for bit if each value that crosses stages has at most two consumers per stage; additions of three
gradients are grouped by stage.

A failure in the first micro-batch is raised on every stage, and the engine can be called again. A later failure is
raised on its own stage; the other stages fail when a transfer reaches the ``timeout`` of the process groups, or when
the failed process ends. The engine then refuses further steps.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.profiler import record_function

from ._checked import checked
from ._lost_ranks import first_line
from ._run.backward import Boundary, GradientSum, HookGate, connect, run_backward
from ._run.frame import Frame
from ._run.microbatch import checksum, describe_inputs, digest, split_inputs
from ._run.mode import RunState, TraceMode
from ._run.program import Program, Transfer
from ._run.recorder import RandomGuard, Recorder
from ._run.rows import LossRule, RowChecks, unequal_counts
from ._run.transport import Transport
from ._run.values import PipelineError, meta_of
from ._schedule.actions import FORWARD, Schedule
from ._stages.hooks import hooked_units
from ._stages.split import StageSplit, split_units
from ._stages.stub import install_stubs
from .plan import PipelinePlan

logger = logging.getLogger("vescale.pipe")


class PipelineEngine:
    """Train or evaluate a model as a pipeline over one mesh axis.

    The engine replaces the modules of other stages in ``model`` by stubs, in place. The names of the remaining modules
    do not change, and ``model.parameters()`` yields this stage's parameters. No tensor is read, so a deferred model
    can be materialized after the engine is constructed.

    Args:
        model: the full model, the same on every rank of the axis.
        axis: one-dimensional device mesh, for example ``mesh["pp"]``; its ranks are the stages, in order.
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
        timeout: time limit of a transfer between stages; the backend's default if None.

    Attributes:
        model: the model, with stubs.
        plan: the given plan.
        stage: index of this rank's stage, below ``num_stages``.
        schedule: the actions of every rank.
        split: the units of every stage; None with one stage.
        rows: checks of what mixes rows.

    Raises:
        SplitError: the model cannot be split by the plan.
        ValueError: the axis is not one-dimensional, or ``row_wise`` names no module.

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
        timeout: timedelta | None = None,
    ) -> None:
        if axis.ndim != 1:
            raise ValueError(f"expected a pipeline mesh of one axis, got {axis.ndim} axes {axis}; pass mesh['pp']")
        self.model = model
        self.plan = plan
        self.num_stages = axis.size()
        self.stage = axis.get_local_rank()
        self.schedule: Schedule = plan.actions(self.num_stages)
        self.split: StageSplit | None = None
        self._loss_fn = loss_fn
        self._meshes = tuple(meshes)
        self._state = RunState()
        self._gate = HookGate()
        self._programs: dict[int, Program] = {}
        self._current = Program()
        self._failure: BaseException | None = None
        self._units: dict[str, nn.Module] = {}
        names = _matching_names(model, row_wise)
        if self.num_stages > 1:
            self.split = split_units(model, plan, self.num_stages)
            self._units = install_stubs(model, self.split, self.stage, self._state)
        self._transport = Transport(axis, timeout=timeout)
        self.rows = RowChecks(model, self._transport, plan.num_microbatches, row_wise=names, is_on=not per_microbatch)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The values that cross stages, for the last input signature; empty before the first call."""
        return tuple(self._current.transfers)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step and return its loss on every stage, the mean over micro-batches.

        With gradients enabled, ``loss.backward()`` on the returned loss accumulates the step's gradients into the
        parameters. Under ``torch.no_grad()`` only the forwards run.

        Args:
            *args: positional arguments of the model; tensors are split along dim 0 into micro-batches.
            **kwargs: keyword arguments of the model, and ``target`` for ``loss_fn``.

        Raises:
            ValueError: an input cannot be split.
            PipelineError: the program cannot run as a pipeline, its micro-batches are not parts of one batch, or
                another stage failed.
            RandomOperatorError: a random operator ran in a pipeline of several stages.
        """
        if self._failure is not None:
            raise PipelineError(
                f"expected an engine without failed steps, got a call after {type(self._failure).__name__}: "
                f"{first_line(self._failure)}; messages may be left between the stages, so restart from a checkpoint "
                "with a new engine"
            )
        microbatches = split_inputs(args, kwargs, self.plan.num_microbatches)
        self._transport.step += 1
        program = self._program_for(*microbatches[0])
        parameters = [p for p in self.model.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
        self._gate.guard(parameters)
        try:
            with hooked_units(self._units, self._state, self.stage):
                if program.rule is None:
                    program.rule = self.rows.rule_of(self._rehearsed, *microbatches[0])
                step = _Step(self, microbatches, program, GradientSum(parameters))
                with self.rows.rehearsed():
                    step.run()
        except BaseException as error:
            self._transport.drop_sends()
            # a recording fails on all stages with nothing in flight; later failures may leave unreceived messages
            self._failure = error if program.recorded or not isinstance(error, Exception) else None
            raise
        step.check_targets()
        if not program.loss_meta.requires_grad:
            return step.loss
        return connect(step.loss, step.total, self._gate)

    # --- programs ---

    def _program_for(self, args: tuple, kwargs: dict) -> Program:
        """Return the program of this input signature. It is recorded on all stages or on none.

        Raises:
            PipelineError: the stages got different inputs.
        """
        form = f"{describe_inputs(args, kwargs)}; {self._mode_text()}"
        key, stage_form = digest(form), self._parameters_text()
        program = self._programs.get(key)
        if program is None or program.stage_form != stage_form:
            program = None  # to be recorded
        if self.num_stages == 1:
            self._programs[key] = program = program or Program(stage_form=stage_form)
            return program
        arrivals = self._transport.gather_integers([key, int(program is None)])
        if any(other != key for other, _ in arrivals):
            forms = self._transport.gather_objects(form)
            lines = "\n".join(f"  stage {stage}: {text}" for stage, text in enumerate(forms))
            raise PipelineError(
                f"expected the same inputs on every stage, got different ones; pass the same batch:\n{lines}"
            )
        if program is None or any(stale for _, stale in arrivals):
            self._check_same_elements(args, kwargs)
            program = self._programs[key] = Program(stage_form=stage_form)
        self._current = program
        return program

    def _check_same_elements(self, args: tuple, kwargs: dict) -> None:
        sums = self._transport.gather_integers([checksum(args, kwargs)])
        if any(other != sums[0] for other in sums):
            raise PipelineError(
                "expected the same inputs on every stage, got the same shapes with different elements; pass the same "
                "batch to all ranks of the pipeline axis (shard the data over the data-parallel axis only)"
            )

    def forget(self, program: Program) -> None:
        """Drop a program after a failed recording; the next step records again."""
        self._programs = {key: kept for key, kept in self._programs.items() if kept is not program}

    def _mode_text(self) -> str:
        device = self._transport.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return f"grad={torch.is_grad_enabled()}, training={self.model.training}, autocast={autocast}"

    def _parameters_text(self) -> str:
        """Return the part of the input signature that only this stage has: ``requires_grad`` and dtypes."""
        return " ".join(f"{p.requires_grad:d}{p.dtype}" for p in self.model.parameters())

    def _rehearsed(self, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """Run a call forward, for nothing but what it shows, and return its loss where that is."""
        if self.num_stages == 1:
            return self.loss_of(args, kwargs)
        _, loss = _Step(self, [], Program(), GradientSum([])).record(args, kwargs)
        return loss

    # --- used by a step ---

    def loss_of(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """Run the model (and ``loss_fn``) on one micro-batch."""
        if self._loss_fn is None:
            return _default_loss(self.model(*args, **kwargs))
        inputs = {name: value for name, value in kwargs.items() if name != "target"}
        output = self.model(*args, **inputs)
        loss = self._loss_fn(output, kwargs["target"]) if "target" in kwargs else self._loss_fn(output)
        return _default_loss(loss)

    def find_mesh(self, axis_names: tuple[str, ...]) -> DeviceMesh:
        """Return this stage's mesh with the given axis names.

        Raises:
            PipelineError: no mesh of the parameters or of ``meshes`` has these axes.
        """
        candidates = [
            *self._meshes,
            *self.rows.meshes,
            *(p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor)),
        ]
        for mesh in candidates:
            names = mesh.mesh_dim_names or ()
            if names == axis_names:
                return mesh
            if set(axis_names) <= set(names):
                return mesh[axis_names]
        raise PipelineError(
            f"stage {self.stage}: expected a mesh with the axes {axis_names} for a received DTensor, got none in its "
            "parameters; pass it as PipelineEngine(..., meshes=[mesh['tp']])"
        )


class _Step:
    """One step in progress: runs this rank's actions in order.

    ``_saved`` holds each micro-batch's boundary and loss from its forward to its backward, which frees its activations.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        microbatches: list[tuple[tuple, dict]],
        program: Program,
        total: GradientSum,
    ) -> None:
        self.total = total
        self._engine = engine
        self._transport = engine._transport
        self._microbatches: list[Any] = list(microbatches)
        self._program = program
        self._is_last = engine.stage == engine.num_stages - 1
        self._saved: dict[int, tuple[Boundary, torch.Tensor | None]] = {}
        self._losses: list[torch.Tensor] = []
        self._rule = program.rule or LossRule(1)
        self._counts = engine.rows.target_counts() if self._is_last and self._rule.counts_targets else None
        self._differs = False
        self.loss: torch.Tensor

    def run(self) -> None:
        """Run the schedule. Afterwards ``loss`` is the step's loss and ``total`` holds its gradients."""
        for action in self._engine.schedule.actions(self._engine.stage):
            with record_function(f"vescale.pipe/{action}"):
                if action.kind == FORWARD:
                    saved = self._forward(action.microbatch)
                    if self._program.loss_meta.requires_grad:
                        self._saved[action.microbatch] = saved
                    del saved
                elif self._program.loss_meta.requires_grad:
                    saved = self._saved.pop(action.microbatch)
                    run_backward(*saved, self.total, transport=self._transport, program=self._program)
                    del saved
        self._transport.wait_sends()
        self.loss = self._shared_loss()

    def check_targets(self) -> None:
        """Check that all parts of the batch count equally many targets.

        Raises:
            PipelineError: on every stage, if they do not.
        """
        if self._differs:
            raise unequal_counts([] if self._counts is None else self._counts.of_microbatches())

    def _forward(self, microbatch: int) -> tuple[Boundary, torch.Tensor | None]:
        boundary: Boundary
        loss: torch.Tensor | None
        args, kwargs = self._microbatches[microbatch]
        self._microbatches[microbatch] = None
        with contextlib.nullcontext() if self._counts is None else self._counts.microbatch():
            if self._engine.num_stages == 1:
                boundary, loss = Boundary(), self._engine.loss_of(args, kwargs)
                self._program.loss, self._program.backward_known = meta_of(loss), True
            elif not self._program.recorded:
                boundary, loss = self.record(args, kwargs)
            else:
                boundary, loss = self._follow(args, kwargs, recorder=None)
        if loss is None:
            return boundary, None
        # each part is divided before its backward, as in a loop of (loss / n).backward()
        part = self._rule.part(_plain_loss(loss))
        self._losses.append(part.detach())
        return boundary, part

    def record(self, args: tuple, kwargs: dict) -> tuple[Boundary, torch.Tensor | None]:
        """Run a forward in lockstep with all stages, and record it."""
        recorder = Recorder(self._transport)
        try:
            result = self._follow(args, kwargs, recorder=recorder)
        except Exception as error:
            self._engine.forget(self._program)
            recorder.fail(error)
            raise
        self._program.recorded = True
        for transfer in self._program.transfers if self._engine.stage == 0 else ():
            logger.info("%s", transfer)
        return result

    def _follow(self, args: tuple, kwargs: dict, *, recorder: Recorder | None) -> tuple[Boundary, torch.Tensor | None]:
        engine = self._engine
        frame = Frame(self._transport, self._program, recorder=recorder, find_mesh=engine.find_mesh)
        mode = engine._state.mode = TraceMode(frame)
        try:
            with mode.active():
                if recorder is None:
                    loss = engine.loss_of(args, kwargs)
                else:
                    with RandomGuard(lambda: mode.current_module):
                        loss = engine.loss_of(args, kwargs)
        finally:
            engine._state.mode = None
        return frame.boundary, frame.end(loss, last_stage=engine.num_stages - 1)

    def _shared_loss(self) -> torch.Tensor:
        """Return the sum of the micro-batches' losses, in order, broadcast from the last stage.

        Whether their numbers of targets differ comes with it.
        """
        if self._is_last:
            total = self._losses[0]
            for part in self._losses[1:]:
                total = total + part
            self._differs = self._counts is not None and self._engine.rows.differ(self._counts)
        else:
            meta = self._program.loss_meta
            total = torch.zeros((), dtype=meta.dtype, device=self._transport.device_of(meta.device_type))
        if self._engine.num_stages == 1:
            return total
        if not self._rule.counts_targets:
            return self._transport.broadcast_from_last(total)
        both = self._transport.broadcast_from_last(torch.stack([total, total.new_tensor(self._differs)]))
        self._differs = bool(both[1])
        return both[0]


def _matching_names(model: nn.Module, patterns: Sequence[str | re.Pattern]) -> list[str]:
    """Return the names of the modules that ``row_wise`` lists.

    Raises:
        ValueError: a pattern names none, or is no regular expression.
    """
    names = [name for name, _ in model.named_modules() if name]
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = {name for name in names if re.fullmatch(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"PipelineEngine: row_wise: expected regular expressions, got {pattern!r}: {error}"
            ) from None
        if not found:
            raise ValueError(
                f"PipelineEngine: row_wise: expected names of modules of {type(model).__name__}, or regular "
                f"expressions for full names, got {pattern!r}, which matches none; see model.named_modules()"
            )
        chosen |= found
    return [name for name in names if name in chosen]


def _default_loss(output: Any) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        TypeError: the output has no scalar loss.
    """
    loss = output
    if not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise TypeError(
            f"expected a scalar loss: output.loss, output['loss'] or a scalar tensor, got {what}; pass labels to the "
            "model, or PipelineEngine(..., loss_fn=...)"
        )
    return loss


def _plain_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss as a plain tensor; a DTensor loss is reduced over its mesh first."""
    if not isinstance(loss, DTensor):
        return loss
    return loss.redistribute(placements=[Replicate()] * loss.device_mesh.ndim).to_local()
