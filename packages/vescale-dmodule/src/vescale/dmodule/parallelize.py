"""``parallelize_module``: shard a module over a mesh by a plan, without touching its code."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import is_deferred, materialize
from vescale.dtensor.extension import (
    check_facts,
    checked,
    describe_difference,
    differing_texts,
    generator_fact,
    module_facts,
)

from ._boundary.hooks import install_inputs, install_outputs
from ._boundary.local_region import install_local
from ._execution.modes import ATTRIBUTE, Execution, Mode
from ._execution.patch import set_attributes
from ._experts import install_experts
from ._plan.parameters import distribute
from ._plan.resolve import ResolvedPlan, resolve
from .errors import PlanError

__all__ = ["execute", "parallelize_module"]

logger = logging.getLogger("vescale.dmodule")


@checked
def parallelize_module(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, object],
    *,
    mode: Mode = "eager",
    allow_implicit: bool = False,
    allow_empty: bool = False,
) -> nn.Module:
    """Shard ``module`` in place over ``mesh`` as ``plan`` says and return it.

    The result is the same object with the same class and names; parameters are DTensors (``Replicate`` unless the plan
    says otherwise), tied parameters stay tied, frozen ones frozen. It takes and returns what the plain module does:
    plain inputs are read as equal on all ranks of the mesh, and outputs come back as plain tensors where one device
    would have them. On a mesh of one rank the module is only checked and, if deferred, materialized.

    Args:
        module: any module; a deferred one (:func:`vescale.dtensor.deferred_init`) is materialized shard by shard.
        mesh: device mesh whose axes the plan names, for example ``mesh["tp"]``.
        plan: ``{"parameter": {regex: placements}, "forward": {regex + ".input" | ".output": entry}, "expert": {regex:
            placements}}``. Regexes match full names. Placements are ``{axis: Placement}`` or a list of
            one placement per mesh axis. A forward entry mirrors the values: a list by position, a dict by name, None to
            leave one as it is.
        mode: how it runs, see :func:`set_mode`. ``"eager"``: every activation is a DTensor; for writing, debugging, and
            as the reference. ``"static"``: the same code on plain local tensors, communication at the boundaries of the
            plan alone. ``"compile"``: static, with its repeated blocks compiled. All three give the same numbers.
        allow_implicit: let operators communicate on their own where their operands do not fit. By default that is an
            error, because it is a cost that no plan entry shows. In static mode operators that are wrong on local
            tensors then run on DTensors, each an island between local tensors, whatever the reason is: communication,
            a size in a formula, a hard-coded number of heads. They are logged at level INFO.
        allow_empty: let a parameter be sharded so finely that some rank holds nothing of it.

    Raises:
        PlanError: a key that matches nothing (with the nearest names), contradicting keys, a dim out of range, an
            unknown axis, experts that do not divide, tied parameters placed in two ways. These are raised before
            any communication. A plan that differs between ranks is found by a comparison of its text.
        ValueError: unknown mode, or the module is parallelized already; on every rank, if parameters, buffers or (of a
            deferred module) the random state differ between ranks.

    The module's forward raises :class:`ImplicitRedistributionError` where an operator would communicate on its own, and
    ``ValueError`` where its inputs, or the random state that it draws from, differ between ranks. The ranks compare
    them in the first call with new shapes and then every 100 calls, see :func:`vescale.dtensor.check_ranks`; in eager
    mode on the CPU they compare shapes in every call.

    Example:
        >>> plan = {
        ...     "parameter": {r"up\\.weight": {"tp": Shard(0)}, r"down\\.weight": {"tp": Shard(1)}},
        ...     "forward": {r"down\\.output": [{"tp": Replicate()}]},
        ... }
        >>> model = parallelize_module(model, mesh["tp"], plan)         # doctest: +SKIP
    """
    if ATTRIBUTE in vars(module):
        raise ValueError(f"this {type(module).__name__} is parallelized already; build a new one to change the plan")
    if not mesh.mesh_dim_names:
        raise PlanError("the mesh has no axis names; give init_device_mesh(..., mesh_dim_names=('tp',))")
    resolved = resolve(module, mesh, plan, allow_empty=allow_empty)
    _compare(module, mesh, "\n".join([*resolved.lines(), f"mode: {mode}", f"allow_implicit: {allow_implicit}"]))
    vars(module)[ATTRIBUTE] = None
    if mesh.size() == 1:
        if is_deferred(module):
            materialize(module, mesh)
        return module

    distribute(module, mesh, resolved.tensors)
    execute(module, mesh, resolved, mode=mode, allow_implicit=allow_implicit)
    num_sharded = sum(any(p.is_shard() for p in placements) for placements in resolved.tensors.values())
    logger.info("parallelized %s over %s: %d sharded tensors", type(module).__name__, mesh, num_sharded)
    return module


def execute(
    module: nn.Module, mesh: DeviceMesh, resolved: ResolvedPlan, *, mode: str = "eager", allow_implicit: bool = False
) -> None:
    """Install the hooks that carry out a plan in a module whose tensors are placed."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, changes in resolved.attributes.items():
        set_attributes(modules[name], changes)
    for name, layout in resolved.experts.items():
        install_experts(modules[name], layout, mesh)
    execution = Execution(
        mesh,
        allow_implicit=allow_implicit,
        eager=resolved.eager,
        local_attributes=resolved.local_attributes,
        mode=mode,
    )
    for name, inputs in resolved.inputs.items():
        install_inputs(modules[name], inputs, mesh, execution.phase)
    for name, region in resolved.local.items():
        attributes = resolved.local_attributes.get(name, {})
        install_local(modules[name], name, region, mesh, execution.phase, attributes)
    for name, entry in resolved.outputs.items():
        install_outputs(modules[name], name, entry, mesh, execution.phase)
    execution.attach(module)


def _compare(module: nn.Module, mesh: DeviceMesh, text: str) -> None:
    """Compare the plan and the module over the ranks of the mesh.

    Raises:
        PlanError: the plan differs.
        ValueError: parameters, buffers, or the random state that a deferred module is made from, differ.
    """
    if texts := differing_texts(text, mesh):
        raise PlanError(describe_difference("the plan", texts))
    check_facts([*module_facts(module), *([generator_fact(mesh.device_type)] if is_deferred(module) else [])], mesh)
