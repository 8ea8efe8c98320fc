"""`parallelize`: execute a plan by composing the parts, in this order.

1  checks                plan, optimizer, names, module plan, number of processes, before any communication
2  mesh                  axes pp, dp, tp in the plan's order, dp as a grid if there are replicas or spread experts
3  recomputation         classes of the modules whose calls run again in backward
4  PipelineEngine        modules of other stages become stubs, so that a rank never holds them
5  parallelize_module    tensor parallelism; materializes the shards of a deferred model. It precedes 4 in a dry run:
                         other stages exist only as a copy of the model there, which has to have its layouts
6  DDP                   data parallelism and ZeRO
7  DistributedOptimizer  state of this rank's shards, gradient norm over all axes
8  random stream, exact  the last step, so that initialization is that of one process
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dmodule import parallelize_module
from vescale.dtensor import is_deferred, random, set_exact
from vescale.dtensor.extension import CheckedInside, checked, exact_num_blocks
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale.optim.clip import check_max_norm
from vescale.pipe import PipelineEngine, PipelinePlan, StageSplit, split_units
from vescale.plan import Plan

from ._mesh import PlanMesh
from ._module_plan import ModulePlan, _resolve_module_plan
from ._names import check_parameters, matching_modules, of_this_rank
from ._optimizer import OptimizerChoice, OptimizerFn, dtype_of
from ._parallel_model import ParallelModel, autocast
from ._process_group import check_same_plan, ensure_process_group
from ._recompute import recompute, recomputed_modules
from ._rows import check_rows
from ._state import state_names


@checked
def parallelize(
    plan: CheckedInside[Plan],
    model: CheckedInside[nn.Module],
    optimizer_fn: CheckedInside[OptimizerFn],
    *,
    clip_grad_norm: CheckedInside[float | None] = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    param_groups: Callable[[nn.Module], Iterable[dict[str, Any]]] | None = None,
    module_plan: CheckedInside[ModulePlan | None] = None,
    mesh: DeviceMesh | None = None,
    per_rank: bool = False,
    row_wise: Sequence[str] = (),
    example_inputs: Mapping[str, Any] | None = None,
) -> tuple[ParallelModel, DistributedOptimizer]:
    """Parallelize a model and its optimizer by a plan. Every process calls it with the same arguments.

    On torch's fake process group one process makes a dry run: it runs the part of its rank in a world that does not
    exist, with zeros for what other ranks would send, and so shows shapes, memory and collectives.

    Args:
        plan: degrees and choices, written by hand or by `generate_plan`.
        model: the user's module, modified in place; real, or deferred so that no rank holds the full model.
        optimizer_fn: an element-wise ``torch.optim`` class, ``functools.partial`` of one with its hyperparameters, any
            function from parameters to an optimizer, or `MuonWithAdamW`. ``optimizer.grad_norm`` is the global norm of
            the gradients in the last step, before clipping.
        clip_grad_norm: short for ``Plan(clip_grad_norm=...)``, where the plan says nothing.
        loss_fn: computes the loss from the module's output, as ``loss_fn(output)`` or, if the batch has ``target``, as
            ``loss_fn(output, target)``. Not needed if the output is a scalar loss or has one as ``output.loss``.
        param_groups: called with the parallel module after its parameters are final; returns torch's parameter groups,
            for example without weight decay of norms. By default one group of all parameters.
        module_plan: tensor-parallel plan of ``vescale.dmodule``; by default the ready plan of the model's family, or
            else the one that ``vescale.dmodule.plans.derive`` makes. What it replicates is logged at level INFO.
        mesh: device mesh with the axes "pp", "dp" and "tp" (in place of "dp" also "dp_replicate", "dp_shard" and
            "ep", where the plan has them); by default built from the plan.
        per_rank: whether every data-parallel rank and every micro-batch is a world of its own, as in torch's DDP and in
            gradient accumulation: batch statistics, losses of routers, contrasts, means over targets and random numbers
            are those of its rows alone. By default they are those of one device on the whole batch, or an error.
        row_wise: names of modules, or regular expressions for full names, that treat every row alone although their
            code sorts or selects rows, as experts do; stacked ones, and those of ready plans, are known.
        example_inputs: a batch, from which a plan is derived for a model without a ready one, by default from inputs
            that are guessed; for pipelines of models that register modules in another order than that in which they
            run, see ``vescale.pipe.split_units``; and to refuse a model that mixes rows before there is a process group
            where rows are computed in parts. Without one the first step refuses it, on all ranks.

    Returns:
        The parallel model and its optimizer, for a training loop as in a single process.

    Raises:
        TypeError: an argument has another type.
        ValueError: the number of processes or the mesh does not match the plan, degrees do not divide heads or experts,
            the model mixes rows that the plan computes apart, or the plans of the ranks differ. No tensor is
            communicated before.

    Example:
        >>> plan = Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=4)                               # doctest: +SKIP
        >>> adamw = functools.partial(torch.optim.AdamW, lr=3e-4)
        >>> model, optimizer = parallelize(plan, model, adamw, clip_grad_norm=1.0)                  # doctest: +SKIP
        >>> for batch in batches:                                                                   # doctest: +SKIP
        ...     model(**model.local_batch(batch)).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    plan = _read_arguments(plan, model, clip_grad_norm, module_plan)
    choice = OptimizerChoice.of(optimizer_fn, model)
    _check_exact(plan, choice, loss_fn=loss_fn, per_rank=per_rank)
    _check_stream(plan)
    names = _Names.of(plan, model)
    inputs = _without_target(example_inputs, loss_fn)
    resolved = _resolve_module_plan(plan, model, module_plan, inputs)
    if plan.exact is None and (not per_rank or plan.ep > 1):  # exact mode computes nothing in parts
        check_rows(plan, model, example_inputs, loss_fn=loss_fn, row_wise=row_wise)
    if plan.pp > 1:
        _check_split(plan, split_units(model, _pipeline_of(plan), plan.num_stages, example_inputs=inputs))
    ensure_process_group(plan)
    check_same_plan(plan)
    meshes = PlanMesh.of(plan, mesh)
    recompute(model, names.recomputed)
    is_dry = dist.get_backend() == "fake"
    if is_dry:
        _parallelize_tensors(plan, model, meshes.tensor, resolved)
    engine, whole = None, dict(model.named_modules(remove_duplicate=False))
    if plan.pp > 1 or (plan.num_microbatches > 1 and plan.exact is None):
        settings: dict[str, Any] = {"loss_fn": loss_fn, "per_rank": per_rank, "row_wise": row_wise}
        engine = _engine(plan, model, meshes, example_inputs=inputs, **settings)
    if not is_dry:
        _parallelize_tensors(plan, model, meshes.tensor, resolved)
    ddp = _data_parallel(
        plan,
        model,
        meshes,
        units=None if names.units is None else of_this_rank(names.units, model, whole),
        per_rank=per_rank,
        row_wise=row_wise if engine is None else _rows_of_this_rank(row_wise, model, whole),
    )
    ddp.parameter_order = names.state
    groups = param_groups(model) if param_groups else None
    optimizer = choice.build(plan, ddp, param_groups=groups, norm_axes=(meshes.pipeline,))
    _enter_modes(plan)
    found = {"state_names": names.state, "recomputed": names.recomputed}
    return ParallelModel(ddp, plan=plan, mesh=meshes.whole, engine=engine, loss_fn=loss_fn, **found), optimizer


def _enter_modes(plan: Plan) -> None:
    """Let this process draw from the plan's stream, and compute in exact mode if the plan says so."""
    if random.current_stream() != plan.random_stream:
        random.set_stream(plan.random_stream)
    if plan.exact is not None:
        set_exact(plan.exact)


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of the full model, found before modules of other stages are replaced.

    Attributes:
        recomputed: modules whose activations are computed again.
        units: modules whose parameters are gathered together; None for the default.
        state: of the state dict.
    """

    recomputed: list[str]
    units: list[str] | None
    state: list[str]

    @classmethod
    def of(cls, plan: Plan, model: nn.Module) -> "_Names":
        """Return the names; an entry of the plan that matches nothing is an error."""
        check_parameters(model, plan.granularity or (), field="granularity")
        units = None if plan.units is None else matching_modules(model, plan.units, field="units")
        return cls(recomputed_modules(model, plan.recompute), units, state_names(model))


def _pipeline_of(plan: Plan) -> PipelinePlan:
    return PipelinePlan(
        schedule=plan.schedule,
        num_microbatches=1 if plan.exact is not None else plan.num_microbatches,  # exact mode has no parts of a batch
        split=plan.split,
        stages_per_rank=plan.stages_per_rank,
    )


def _check_split(plan: Plan, split: StageSplit) -> None:
    """Raise `ValueError`, before there is a group, if stages share a weight of which ranks hold shards alone."""
    if split.ties and plan.zero == 3 and plan.dp > plan.dp_replicate:
        raise ValueError(
            f"parallelize: expected no weight that stages share for Plan(zero=3, dp={plan.dp}), since each rank holds "
            f"a shard of it between forwards, got {'; '.join(map(str, split.ties))}; use zero=2, or pp=1"
        )


def _engine(
    plan: Plan,
    model: nn.Module,
    meshes: PlanMesh,
    *,
    loss_fn: Callable[..., torch.Tensor] | None,
    per_rank: bool,
    row_wise: Sequence[str],
    example_inputs: Mapping[str, Any] | None,
) -> PipelineEngine:
    return PipelineEngine(
        model,
        meshes.pipeline,
        _pipeline_of(plan),
        loss_fn=loss_fn,
        meshes=[meshes.tensor],
        per_microbatch=per_rank,
        row_wise=row_wise,
        example_inputs=example_inputs,
        forward_context=functools.partial(autocast, plan),
    )


def _data_parallel(
    plan: Plan,
    model: nn.Module,
    meshes: PlanMesh,
    *,
    units: Sequence[str] | None,
    per_rank: bool,
    row_wise: Sequence[str],
) -> DDP:
    granularity: Any = plan.granularity  # the plan has checked it
    return DDP(
        model,
        meshes.data,
        zero=plan.zero,
        bucket_bytes=plan.bucket_bytes,
        reduction=plan.reduction,
        param_dtype=dtype_of(plan.param_dtype),
        grad_dtype=dtype_of(plan.grad_dtype),
        reduce_dtype=dtype_of(plan.reduce_dtype),
        units=units,
        granularity=granularity,
        reshard_after_forward=plan.reshard_after_forward,
        offload=plan.offload,
        per_rank=per_rank,
        row_wise=row_wise,
    )


def _parallelize_tensors(plan: Plan, model: nn.Module, mesh: DeviceMesh, module_plan: ModulePlan) -> None:
    if not is_deferred(model):
        model.to(plan.device)
    parallelize_module(model, mesh, module_plan, mode=plan.mode)


def _rows_of_this_rank(row_wise: Sequence[str], model: nn.Module, whole: Mapping[str, nn.Module]) -> list[str]:
    """Return the names that patterns have among modules of this rank's stages.

    The engine has compared the patterns with the whole model, and replaced modules of other stages.
    """
    here = of_this_rank(whole, model, whole)
    return [name for name in here if any(re.fullmatch(pattern, name) for pattern in row_wise)]


def _without_target(batch: Mapping[str, Any] | None, loss_fn: object) -> Mapping[str, Any] | None:
    """Return the arguments of the model in a batch: the target of a loss function is none."""
    if batch is None or loss_fn is None:
        return batch
    return {name: value for name, value in batch.items() if name != "target"}


def _read_arguments(plan: Plan, model: nn.Module, clip_grad_norm: float | None, module_plan: ModulePlan | None) -> Plan:
    """Check arguments, and return the plan with what they add to it."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"parallelize: expected a vescale.Plan as plan, got {type(plan).__name__}; pass vescale.Plan(dp=..., "
            "tp=...)"
        )
    if isinstance(model, ParallelModel | DDP):
        raise TypeError(f"parallelize: expected a plain module, got {type(model).__name__}; pass the plain module")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"parallelize: expected an nn.Module as model, got {type(model).__name__}; pass the plain module"
        )
    if module_plan is not None and not isinstance(module_plan, Mapping):
        raise TypeError(
            f"parallelize: expected a dict of sections as module_plan, got {module_plan!r}; name a ready plan with "
            "Plan(module_plan='llama')"
        )
    if module_plan is not None and plan.module_plan not in (None, "auto"):
        raise ValueError(
            f"parallelize: expected one module plan, got the argument and Plan(module_plan={plan.module_plan!r}); "
            "leave one of them out"
        )
    if clip_grad_norm is None:
        return plan
    check_max_norm("parallelize: clip_grad_norm", clip_grad_norm)
    if plan.clip_grad_norm not in (None, clip_grad_norm):
        raise ValueError(
            f"parallelize: expected one norm to clip by, got clip_grad_norm={clip_grad_norm} and "
            f"Plan(clip_grad_norm={plan.clip_grad_norm}); leave the argument out"
        )
    return plan if clip_grad_norm == math.inf else dataclasses.replace(plan, clip_grad_norm=clip_grad_norm)


def _check_stream(plan: Plan) -> None:
    """Raise `ValueError` if the program draws from another stream than the default, and the plan from the default."""
    current = random.current_stream()
    if current not in ("torch", plan.random_stream):
        raise ValueError(
            f"parallelize: expected the plan's random stream {plan.random_stream!r}, got {current!r}, which is in "
            f"force; use Plan(random_stream={current!r}), or call vescale.dtensor.random.set_stream('torch')"
        )


def _check_exact(plan: Plan, choice: OptimizerChoice, *, loss_fn: object, per_rank: bool) -> None:
    """Raise `ValueError` for what ``Plan(exact=...)`` cannot combine with."""
    if plan.exact is None:
        return
    if exact_num_blocks() not in (None, plan.exact):
        raise ValueError(
            f"parallelize: expected the exact mode of this process, of {exact_num_blocks()} blocks, got Plan(exact="
            f"{plan.exact}); call vescale.dtensor.set_exact(None) before, or leave the context"
        )
    if choice.optimizer_class is Muon:
        raise ValueError(
            f"parallelize: expected an element-wise optimizer for Plan(exact={plan.exact}), got Muon, whose products "
            "run on whole matrices of some ranks; use torch.optim.AdamW"
        )
    for given, what in ((loss_fn is not None, "loss_fn"), (per_rank, "per_rank=True")):
        if given and plan.dp > 1:
            raise ValueError(
                f"parallelize: expected no {what} for Plan(exact={plan.exact}, dp={plan.dp}), got one: it would see "
                "this rank's rows alone; compute the loss on all rows in the module's forward"
            )
