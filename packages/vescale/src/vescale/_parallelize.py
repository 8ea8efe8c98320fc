"""`parallelize`: execute a plan by composing the parts, in this order.

1  checks                plan, optimizer, module plan, number of processes, before any communication
2  mesh                  axes pp, dp, tp in the plan's order
3  PipelineEngine        modules of other stages become stubs, so that a rank never holds them
4  parallelize_module    tensor parallelism; materializes the shards of a deferred model. It precedes 3 in a dry run:
                         other stages exist only as a copy of the model there, which has to have its layouts
5  DDP                   data parallelism and ZeRO
6  DistributedOptimizer  state of this rank's shards, gradient norm over all axes
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dmodule import parallelize_module
from vescale.dmodule.plans import FAMILIES, plan_for
from vescale.dtensor import init_device_mesh, is_deferred
from vescale.dtensor.extension import CheckedInside, checked
from vescale.optim import DDP, DistributedOptimizer
from vescale.optim.clip import check_max_norm
from vescale.pipe import PipelineEngine, PipelinePlan
from vescale.plan import Plan

from ._parallel_model import ParallelModel
from ._process_group import check_same_plan, ensure_process_group

ModulePlan = Mapping[str, Any]
OptimizerFn = type[torch.optim.Optimizer] | functools.partial


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
        optimizer_fn: an element-wise ``torch.optim`` class, or ``functools.partial`` of one with its hyperparameters.
        clip_grad_norm: clip gradients by this global norm, a positive number, in every ``optimizer.step()``;
            ``optimizer.grad_norm`` is the norm before clipping.
        loss_fn: computes the loss from the module's output, as ``loss_fn(output)`` or, if the batch has ``target``, as
            ``loss_fn(output, target)``. Not needed if the output is a scalar loss or has one as ``output.loss``.
        param_groups: called with the parallel module after its parameters are final; returns torch's parameter groups,
            for example without weight decay of norms. By default one group of all parameters.
        module_plan: tensor-parallel plan of ``vescale.dmodule``; by default the ready plan of the model's family.
        mesh: device mesh with the axes "pp", "dp" and "tp"; by default built from the plan.
        per_rank: whether every data-parallel rank and every micro-batch is a world of its own, as in torch's DDP and in
            gradient accumulation: batch statistics, losses of routers, contrasts, means over targets and random numbers
            are those of its rows alone. By default they are those of one device on the whole batch, or an error.
        row_wise: names of modules, or regular expressions for full names, that treat every row alone although their
            code sorts or selects rows, as a mixture's experts do; those of families with a ready plan are known.
        example_inputs: a batch, for pipelines of models that register modules in another order than that in which they
            run; see ``vescale.pipe.split_units``.

    Returns:
        The parallel model and its optimizer, for a training loop as in a single process.

    Raises:
        TypeError: an argument has another type.
        ValueError: the number of processes or the mesh does not match the plan, degrees do not divide heads or experts,
            the model has no ready module plan, or the plans of the ranks differ. No tensor is communicated before.

    Example:
        >>> plan = Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=4)                               # doctest: +SKIP
        >>> adamw = functools.partial(torch.optim.AdamW, lr=3e-4)
        >>> model, optimizer = parallelize(plan, model, adamw, clip_grad_norm=1.0)                  # doctest: +SKIP
        >>> for batch in batches:                                                                   # doctest: +SKIP
        ...     model(**model.local_batch(batch)).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    optimizer_class, hyperparameters = _read_arguments(plan, model, optimizer_fn)
    if module_plan is not None and not isinstance(module_plan, Mapping):
        raise TypeError(
            f"parallelize: expected a dict of sections as module_plan, got {module_plan!r}; name a ready plan with "
            "Plan(module_plan='llama')"
        )
    if clip_grad_norm is not None:
        check_max_norm("parallelize: clip_grad_norm", clip_grad_norm)
    resolved = _resolve_module_plan(plan, model, module_plan)
    ensure_process_group(plan)
    check_same_plan(plan)
    mesh = _resolve_mesh(plan, mesh)
    is_dry = dist.get_backend() == "fake"
    if is_dry:
        _parallelize_tensors(plan, model, mesh, resolved)
    engine, whole = None, dict(model.named_modules(remove_duplicate=False))
    if plan.pp > 1 or plan.num_microbatches > 1:
        pipeline = PipelinePlan(
            schedule=plan.schedule,
            num_microbatches=plan.num_microbatches,
            split=plan.split,
            stages_per_rank=plan.stages_per_rank,
        )
        engine = PipelineEngine(
            model,
            mesh["pp"],
            pipeline,
            loss_fn=loss_fn,
            meshes=[mesh["tp"]],
            per_microbatch=per_rank,
            row_wise=row_wise,
            example_inputs=_without_target(example_inputs, loss_fn),
        )
    if not is_dry:
        _parallelize_tensors(plan, model, mesh, resolved)
    ddp = DDP(
        model,
        mesh["dp"],
        zero=plan.zero,
        bucket_bytes=plan.bucket_bytes,
        per_rank=per_rank,
        row_wise=row_wise if engine is None else _of_this_rank(row_wise, model, whole),
    )
    optimizer = DistributedOptimizer(
        optimizer_class,
        model=ddp,
        param_groups=param_groups(model) if param_groups else None,
        clip_grad_norm=clip_grad_norm,
        norm_axes=(mesh["pp"],),
        **hyperparameters,
    )
    return ParallelModel(ddp, plan=plan, mesh=mesh, engine=engine, loss_fn=loss_fn), optimizer


def _parallelize_tensors(plan: Plan, model: nn.Module, mesh: DeviceMesh, module_plan: ModulePlan) -> None:
    if not is_deferred(model):
        model.to(plan.device)
    parallelize_module(model, mesh["tp"], module_plan, mode=plan.mode)


def _of_this_rank(row_wise: Sequence[str], model: nn.Module, whole: Mapping[str, nn.Module]) -> list[str]:
    """Return the names that patterns have among modules of this rank's stages.

    The engine has compared the patterns with the whole model, and replaced modules of other stages.
    """
    here = [name for name, module in model.named_modules(remove_duplicate=False) if whole.get(name) is module]
    return [name for name in here if any(re.fullmatch(pattern, name) for pattern in row_wise)]


def _without_target(batch: Mapping[str, Any] | None, loss_fn: object) -> Mapping[str, Any] | None:
    """Return the arguments of the model in a batch: the target of a loss function is none."""
    if batch is None or loss_fn is None:
        return batch
    return {name: value for name, value in batch.items() if name != "target"}


def _read_arguments(
    plan: Plan, model: nn.Module, optimizer_fn: OptimizerFn
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the optimizer's class and hyperparameters."""
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
    optimizer_class: Any = optimizer_fn
    keywords: dict[str, Any] = {}
    if isinstance(optimizer_fn, functools.partial) and not optimizer_fn.args:
        optimizer_class, keywords = optimizer_fn.func, dict(optimizer_fn.keywords)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        is_instance = isinstance(optimizer_fn, torch.optim.Optimizer)
        found = f"an instance of {type(optimizer_fn).__name__}" if is_instance else repr(optimizer_fn)
        raise TypeError(
            "parallelize: expected a torch.optim class, or functools.partial of one with keyword arguments, as "
            f"optimizer_fn, got {found}; pass functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    return optimizer_class, keywords


def _resolve_module_plan(plan: Plan, model: nn.Module, module_plan: ModulePlan | None) -> ModulePlan:
    if module_plan is not None:
        return module_plan
    family = None if plan.module_plan == "auto" else plan.module_plan
    if plan.tp == 1 and family is None:
        return {}
    name = family or getattr(getattr(model, "config", None), "model_type", None)
    if name not in FAMILIES:
        found = f"the name {name!r}" if family else f"{type(model).__name__} with model type {name!r}"
        raise ValueError(
            f"parallelize: expected a model with a ready plan ({', '.join(sorted(FAMILIES))}), got {found}; pass "
            "module_plan={...} of your own, or the ready plan of a family with the same names by "
            "Plan(module_plan='llama')"
        )
    try:
        return plan_for(model, degree=plan.tp, sequence_parallel=plan.sequence_parallel, family=family)
    except ValueError as error:
        raise type(error)(f"{error} (parallelize takes such a plan as module_plan=plan_for(model, ...))") from None


def _resolve_mesh(plan: Plan, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the given mesh, checked against the plan, or a new mesh of the plan."""
    if mesh is None:
        return init_device_mesh(plan.device, plan.mesh_shape, mesh_dim_names=plan.axis_order)
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    expected = {axis: getattr(plan, axis) for axis in plan.axis_order}
    if {axis: sizes.get(axis) for axis in expected} != expected or mesh.size() != plan.world_size:
        raise ValueError(
            f"parallelize: expected a mesh with the axes {expected}, got {sizes or 'axes without names'}; leave mesh "
            "out, or build it with init_device_mesh(..., mesh_dim_names=('pp', 'dp', 'tp'))"
        )
    if mesh.device_type != plan.device:
        raise ValueError(
            f"parallelize: expected a mesh on the plan's device {plan.device!r}, got {mesh.device_type!r}; leave mesh "
            "out, or build it on that device"
        )
    return mesh
