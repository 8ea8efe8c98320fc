"""The pipeline engine: runs a step of micro-batches over the stages of one mesh axis.

    engine = PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=8))
    loss = engine(input_ids, labels=labels)      # the whole schedule runs: forwards, backwards, transfers
    loss.backward()                              # gradients reach the parameters, as always
    optimizer.step()

Every rank of the axis runs the user's own forward, with the modules of other stages replaced by stubs (``_mode.Stub``).
The first micro-batch of a new form of inputs is run in lockstep and records which values cross stages (``_recorder``);
from then on stages run on their own and exchange exactly these (``_frame``).

Guarantee: the gradients are the sums, in the order of micro-batches, that a gradient-accumulation loop of one process
computes, bit for bit where every crossing value has at most two consumers per stage (additions of three gradients are
grouped by stage).

A failure in the first micro-batch is raised on every stage, and the engine can be called again. A failure later is
raised on the stage where it happens; the others fail when their transfer reaches the ``timeout`` of the process groups,
or when the failed process ends. The engine then refuses further steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.profiler import record_function

from ._actions import FORWARD, Schedule
from ._backward import Boundary, GradientSum, HookGate, connect, run_backward
from ._frame import Frame
from ._hooks import hooked_units
from ._microbatch import checksum, describe_inputs, digest, split_inputs
from ._mode import RunState, TraceMode
from ._program import Program, Transfer
from ._recorder import RandomGuard, Recorder
from ._split import StageSplit, split_units
from ._stub import install_stubs
from ._transport import Transport
from ._values import PipelineError, meta_of
from .plan import PipelinePlan

logger = logging.getLogger("vescale.pipe")


class PipelineEngine:
    """Train or evaluate a model as a pipeline over one mesh axis.

    The modules of other stages are replaced in ``model`` by stubs, in place: names of what remains do not change, and
    ``model.parameters()`` are this stage's. Construct the engine before parameters get storage, if the model is
    deferred: no tensor is read here.

    Args:
        model: the whole model, the same on every rank of the axis.
        axis: one-dimensional device mesh, for example ``mesh["pp"]``; its ranks are the stages, in order.
        plan: schedule, number of micro-batches, and where the model is cut.
        loss_fn: computes the loss from the model's output. Called as ``loss_fn(output)``, or as
            ``loss_fn(output, target)`` where the engine is called with ``target=``. Without it the loss is
            ``output.loss``, ``output["loss"]`` or the output itself, a scalar tensor.
        meshes: meshes for DTensors that cross stages, beside those of this stage's parameters.
        timeout: after which a transfer to or from another stage fails; the backend's default if None.

    Attributes:
        model: the model, with stubs.
        plan: as given.
        stage: index of this rank's stage, out of ``num_stages``.
        schedule: the actions of every rank.
        split: the units of every stage; None with one stage.

    Raises:
        SplitError: the model cannot be cut as the plan says.
        ValueError: the axis is not one-dimensional.

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

    def __init__(
        self,
        model: nn.Module,
        axis: DeviceMesh,
        plan: PipelinePlan,
        *,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        meshes: Sequence[DeviceMesh] = (),
        timeout: timedelta | None = None,
    ) -> None:
        if axis.ndim != 1:
            raise ValueError(f"a pipeline runs over one mesh axis, got {axis.ndim} axes {axis}; pass mesh['pp']")
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
        if self.num_stages > 1:
            self.split = split_units(model, plan, self.num_stages)
            self._units = install_stubs(model, self.split, self.stage, self._state)
        self._transport = Transport(axis, timeout=timeout)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The values that cross stages, for the form of inputs seen last; empty before the first call."""
        return tuple(self._current.transfers)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step and return its loss, the mean over micro-batches, on every stage.

        With gradients enabled the returned loss carries the step's gradients: ``loss.backward()`` delivers them. Under
        ``torch.no_grad()`` only the forwards run.

        Args:
            *args: positional arguments of the model; tensors are split along dim 0 into micro-batches.
            **kwargs: keyword arguments of the model, and ``target`` for ``loss_fn``.

        Raises:
            ValueError: an input cannot be split.
            PipelineError: the program cannot run as a pipeline, or another stage failed.
            RandomOperatorError: a random operator ran, with more than one stage.
        """
        if self._failure is not None:
            raise PipelineError(
                f"an earlier step of this engine failed ({type(self._failure).__name__}: {self._failure}), which may "
                "have left messages between the stages; restart from a checkpoint with a new engine"
            )
        microbatches = split_inputs(args, kwargs, self.plan.num_microbatches)
        program = self._program_for(*microbatches[0])
        parameters = [p for p in self.model.parameters() if p.requires_grad] if torch.is_grad_enabled() else []
        self._gate.guard(parameters)
        step = _Step(self, microbatches, program, GradientSum(parameters))
        try:
            with hooked_units(self._units, self._state, self.stage):
                step.run()
        except BaseException as error:
            self._transport.drop_sends()
            # a recording fails on all stages with nothing in flight; after that, messages may be left unreceived
            self._failure = error if program.recorded or not isinstance(error, Exception) else None
            raise
        if not program.loss_meta.requires_grad:
            return step.loss
        return connect(step.loss, step.total, self._gate)

    # --- programs ---

    def _program_for(self, args: tuple, kwargs: dict) -> Program:
        """Return the program for this form of inputs; one that is not recorded yet on all stages or on none.

        Raises:
            PipelineError: the stages were given different inputs.
        """
        if self.num_stages == 1:
            return Program()
        form = f"{describe_inputs(args, kwargs)}; {self._mode_text()}"
        key, stage_form = digest(form), self._parameters_text()
        program = self._programs.get(key)
        if program is None or program.stage_form != stage_form:
            program = None  # to be recorded
        arrivals = self._transport.gather_integers([key, int(program is None)])
        if any(other != key for other, _ in arrivals):
            forms = self._transport.gather_objects(form)
            lines = "\n".join(f"  stage {stage}: {text}" for stage, text in enumerate(forms))
            raise PipelineError(f"the stages were given different inputs; pass the same batch on every stage:\n{lines}")
        if program is None or any(stale for _, stale in arrivals):
            self._check_same_elements(args, kwargs)
            program = self._programs[key] = Program(stage_form=stage_form)
        self._current = program
        return program

    def _check_same_elements(self, args: tuple, kwargs: dict) -> None:
        sums = self._transport.gather_integers([checksum(args, kwargs)])
        if any(other != sums[0] for other in sums):
            raise PipelineError(
                "the stages were given inputs of the same form and different elements: all ranks of the pipeline axis "
                "need the same batch (shard the data over the data-parallel axis only)"
            )

    def forget(self, program: Program) -> None:
        """Drop a program whose recording failed, so that the next step records again."""
        self._programs = {key: kept for key, kept in self._programs.items() if kept is not program}

    def _mode_text(self) -> str:
        device = self._transport.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return f"grad={torch.is_grad_enabled()}, training={self.model.training}, autocast={autocast}"

    def _parameters_text(self) -> str:
        """Return what this stage alone knows and its outputs' metadata depend on."""
        return " ".join(f"{p.requires_grad:d}{p.dtype}" for p in self.model.parameters())

    # --- what a step needs ---

    def loss_of(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """Run the model (and ``loss_fn``) on one micro-batch."""
        if self._loss_fn is None:
            return _default_loss(self.model(*args, **kwargs))
        has_target = "target" in kwargs
        target = kwargs.pop("target", None)
        output = self.model(*args, **kwargs)
        loss = self._loss_fn(output, target) if has_target else self._loss_fn(output)
        return _default_loss(loss)

    def find_mesh(self, axis_names: tuple[str, ...]) -> DeviceMesh:
        """Return this stage's mesh with these axis names.

        Raises:
            PipelineError: neither the parameters' meshes nor ``meshes`` has them.
        """
        candidates = [*self._meshes, *(p.device_mesh for p in self.model.parameters() if isinstance(p, DTensor))]
        for mesh in candidates:
            names = mesh.mesh_dim_names or ()
            if names == axis_names:
                return mesh
            if set(axis_names) <= set(names):
                return mesh[axis_names]
        raise PipelineError(
            f"stage {self.stage} receives a DTensor over the mesh axes {axis_names}, and none of its parameters is on "
            "such a mesh; pass it as PipelineEngine(..., meshes=[mesh['tp']])"
        )


class _Step:
    """One step in progress: runs this rank's actions in order.

    ``boundaries`` holds what the forwards leave for their backwards; it is emptied as backwards are done, which frees a
    micro-batch's activations.
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
        self._left: dict[int, tuple[Boundary, torch.Tensor | None]] = {}
        self._losses: list[torch.Tensor] = []
        self.loss: torch.Tensor

    def run(self) -> None:
        """Run the schedule; then ``loss`` is the step's loss and ``total`` holds its gradients."""
        for action in self._engine.schedule.ranks[self._engine.stage]:
            with record_function(f"vescale.pipe/{action}"):
                if action.kind == FORWARD:
                    left = self._forward(action.microbatch)
                    if self._program.loss_meta.requires_grad:
                        self._left[action.microbatch] = left
                    del left
                elif self._program.loss_meta.requires_grad:
                    left = self._left.pop(action.microbatch)
                    run_backward(*left, self.total, transport=self._transport, program=self._program)
                    del left
        self._transport.wait_sends()
        self.loss = self._shared_loss()

    def _forward(self, microbatch: int) -> tuple[Boundary, torch.Tensor | None]:
        boundary: Boundary
        loss: torch.Tensor | None
        args, kwargs = self._microbatches[microbatch]
        self._microbatches[microbatch] = None
        if self._engine.num_stages == 1:
            boundary, loss = Boundary(), self._engine.loss_of(args, kwargs)
            self._program.loss, self._program.backward_known = meta_of(loss), True
        elif not self._program.recorded:
            boundary, loss = self._record(args, kwargs)
        else:
            boundary, loss = self._follow(args, kwargs, recorder=None)
        if loss is None:
            return boundary, None
        # each part is divided before its backward, as in a loop of (loss / n).backward()
        part = _plain_loss(loss) / len(self._microbatches)
        self._losses.append(part.detach())
        return boundary, part

    def _record(self, args: tuple, kwargs: dict) -> tuple[Boundary, torch.Tensor | None]:
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
                    with RandomGuard(lambda: mode.place):
                        loss = engine.loss_of(args, kwargs)
        finally:
            engine._state.mode = None
        return frame.boundary, frame.end(loss, last_stage=engine.num_stages - 1)

    def _shared_loss(self) -> torch.Tensor:
        """Return the sum of the micro-batches' parts, in their order, from the last stage to all."""
        if self._is_last:
            total = self._losses[0]
            for part in self._losses[1:]:
                total = total + part
        else:
            meta = self._program.loss_meta
            total = torch.zeros((), dtype=meta.dtype, device=self._transport.device_of(meta.device_type))
        return total if self._engine.num_stages == 1 else self._transport.broadcast_from_last(total)


def _default_loss(output: Any) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        TypeError: there is none.
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
