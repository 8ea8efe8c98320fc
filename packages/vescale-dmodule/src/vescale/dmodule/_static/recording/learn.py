"""How a static program is made: rehearse a call, adopt the layouts that were found, check the program against them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ... import _torch
from ..._boundary.convert import as_dtensor
from ..._boundary.values import copied, map_leaves
from ..._execution.eager import hook_scope
from ...errors import NotLocalFriendlyError
from ..draws import Draw, Listening
from ..experts import experts_gradients
from ..movement.conversions import Conversion, compile_conversion
from ..names import describe, is_inside, join, ways_out
from .compare import Names, Run, check_same, differentiate, nothing_happens, raise_together
from .observe import Crossing, Crossings, Observer, replicated

if TYPE_CHECKING:
    from ..program import StaticProgram

__all__ = ["learn", "watch_arguments"]


logger = logging.getLogger("vescale.dmodule")


def learn(program: StaticProgram, args: tuple, kwargs: dict) -> None:
    """Make ``program`` able to run a call like this one. Collective over the mesh.

    Raises:
        NotLocalFriendlyError: on all ranks, if the module is not right on local tensors.
        Exception: what the module itself raises in eager mode.
    """
    error = None
    meter, program.model.phase.meter = program.model.phase.meter, None  # a rehearsal is no step of the user's
    try:
        eager, listening = _rehearse_eagerly(program, args, kwargs)
        _adopt(program, eager, listening)
        check_same(eager, _rehearse_locally(program, args, kwargs))
        program.is_quiet = eager.is_quiet
    except Exception as found:
        error = found
        logger.warning("static mode: the rehearsal failed on this rank: %s", found)  # should others not get that far
    finally:
        program.model.phase.meter = meter
    raise_together(error, program.model.mesh)


def _rehearse_eagerly(program: StaticProgram, args: tuple, kwargs: dict) -> tuple[Run, Listening]:
    run, model, layouts = _new_run(program), program.model, _layouts(program)
    listening = Listening(lambda: run.names.running, model.mesh)
    handles = hook_scope(program.module, program.name, model.scope)
    program.rehearsing, program.observer, model.phase.convert = True, run.observer, run.observer.convert
    model.scope.attaches = False
    try:
        with nothing_happens(program.module), run.names.watching(program.modules):
            before = program.position()
            with listening:
                output = program.module(*copied(args), **copied(kwargs))
                run.is_quiet = program.position() == before
                if torch.is_grad_enabled():
                    differentiate(output)
            run.gradients.update(_gradients(program))
            run.buffers.update(_buffers(program, layouts))
    finally:
        program.rehearsing, program.observer, model.phase.convert = False, None, None
        model.scope.attaches = True
        for handle in handles:
            handle.remove()
    return run, listening


def watch_arguments(program: StaticProgram, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Note what enters the module in eager mode; plain inputs that need a gradient become replicated DTensors."""

    def watch(tensor: Tensor, where: str) -> Tensor:
        if isinstance(tensor, DTensor):
            return program.observer.watch(tensor, where)
        if tensor.requires_grad:
            return program.observer.watch(as_dtensor(tensor, program.model.mesh), where)
        return tensor

    where = program.place("enters")
    return map_leaves(watch, args, where), map_leaves(watch, kwargs, where)


def _rehearse_locally(program: StaticProgram, args: tuple, kwargs: dict) -> Run:
    run, layouts = _new_run(program), _layouts(program)
    program.observer, program.checked, program.model.scope.attaches = run.observer, run, False
    program.refresh_twins()
    program.tell_twins()
    try:
        with nothing_happens(program.module), run.names.watching(program.modules):
            output = _call_locally(program, run, copied(args), copied(kwargs))
            if torch.is_grad_enabled():
                _differentiate_locally(output)
            _add_gradients(run, _gradients(program))
            run.buffers.update(_buffers(program, layouts))
    finally:
        program.observer, program.checked, program.model.scope.attaches = None, None, True
        program.tell_twins()
    return run


def _add_gradients(run: Run, others: dict[str, tuple[Tensor, tuple | None]]) -> None:
    """Add gradients that came to DTensors, in parts that stay in eager mode, to those that came to local tensors.

    Raises:
        NotLocalFriendlyError: a tied parameter has both, and one of them is a sum that is yet to be done.
    """
    for name, (gradient, layout) in others.items():
        if name in run.gradients:
            local, _ = run.gradients[name]
            if local.shape != gradient.shape or any(p.is_partial() for p in layout):
                raise NotLocalFriendlyError(
                    f"parameter {name!r} is used on local tensors and by a part that stays in eager mode, where its "
                    f"gradient is {layout}; keep both uses in one mode"
                )
            gradient = gradient + local
        run.gradients[name] = gradient, layout


def _call_locally(program: StaticProgram, run: Run, args: tuple, kwargs: dict) -> object:
    try:
        return program.module(*args, **kwargs)
    except NotLocalFriendlyError:
        raise
    except Exception as error:
        name = run.names.failed or program.name
        raise NotLocalFriendlyError(
            f"on local tensors {describe(name)} fails, which runs in eager mode: {type(error).__name__}: {error}. "
            f"Its code is written for global shapes (a hard-coded number of heads, a size); {ways_out(name)}"
        ) from error


def _differentiate_locally(output: object) -> None:
    try:
        differentiate(output)
    except NotLocalFriendlyError:
        raise
    except Exception as error:
        raise NotLocalFriendlyError(
            f"on local tensors backward fails, which runs in eager mode: {type(error).__name__}: {error}. Activation "
            "checkpointing of a function may be why, whose own code draws random numbers or reads parameters: "
            'checkpoint a module instead, or run the model on DTensors (mode="eager")'
        ) from error


def _new_run(program: StaticProgram) -> Run:
    names = Names()
    return Run(Observer(program.model.mesh, lambda: names.running), names)


def _gradients(program: StaticProgram) -> dict[str, tuple[Tensor, tuple | None]]:
    """Return local gradients and their layouts.

    Only sums are left to be done: along an axis where eager mode computes a gradient in another layout than its
    parameter's without being partial (of a sharded vocabulary it computes the whole), it is brought to the parameter's,
    as local code does.
    """
    found = {}
    for name, parameter in program.module.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            pairs = zip(grad.placements, parameter.placements, strict=True)
            grad = grad.redistribute(placements=[here if here.is_partial() else whole for here, whole in pairs])
            found[join(program.name, name)] = (_torch.local_of(grad), tuple(grad.placements))
    return found


def _layouts(program: StaticProgram) -> dict[str, DTensor]:
    """Return the buffers that are DTensors."""
    buffers = program.module.named_buffers()
    return {join(program.name, name): buffer for name, buffer in buffers if isinstance(buffer, DTensor)}


def _buffers(program: StaticProgram, before: dict[str, DTensor]) -> dict[str, Tensor]:
    """Return the local values of the buffers after a call, in the layouts that they had before it."""
    found = {}
    for name, buffer in program.module.named_buffers():
        old, new = before.get(join(program.name, name)), buffer
        if old is not None and not isinstance(new, DTensor):
            new = as_dtensor(new, program.model.mesh)
        if isinstance(new, DTensor):
            same = old is not None and old.shape == new.shape
            new = new.redistribute(placements=old.placements if same else replicated(program.model.mesh))
        local = _torch.local_of(new) if isinstance(new, DTensor) else new
        found[join(program.name, name)] = local.detach().clone()
    return found


# ------------------------------------------------------------------------------------------------- adopting


def _adopt(program: StaticProgram, eager: Run, listening: Listening) -> None:
    """Make the program from what the eager run found."""
    crossings = list(eager.observer.crossings())
    _check_one_layout(crossings)
    draws = {name: draws for name, draws in listening.draws.items() if not program.is_in_region(name)}
    sharded = [name for name, found in draws.items() if any(draw.is_sharded for draw in found)]
    draws = {name: found for name, found in draws.items() if any(is_inside(name, owner) for owner in sharded)}
    _check_one_draw(draws)
    tokens = {n: region.last_tokens for n, region in program.experts.items() if region.last_tokens is not None}
    fitting = (findings for findings in program.all_findings if findings.fits(crossings, draws, tokens))
    program.use(next(fitting, None) or program.new_findings())
    for crossing in crossings:
        program.crossings.add(crossing)
        _add_step(program, program.crossings.known[crossing.key])
    for name, (_, layout) in eager.gradients.items():
        program.gradients[name] = layout
    for name, found in draws.items():
        program.add_draws(name, found)
    if program.blocks is not None:
        program.blocks.hear(listening)
    program.tokens.update(tokens)
    program.gradients = experts_gradients(program) | program.gradients
    for name in eager.names.recomputed:
        program.add_recomputed(name)


def _check_one_layout(crossings: list[Crossing]) -> None:
    """Refuse two layouts in one call that look the same on local tensors.

    Raises:
        NotLocalFriendlyError: naming the place and the layouts.
    """
    seen = Crossings()
    for crossing in crossings:
        other = seen.conflict(crossing)
        if other is not None:
            raise NotLocalFriendlyError(
                f"{crossing.where}: in one call values of local shape {crossing.arriving} come in two layouts, "
                f"{other.source} of shape {other.shape} and {crossing.source} of shape {crossing.shape} (their "
                f"gradients in {other.gradient} and {crossing.gradient}); bring them to one by a boundary, or keep the "
                "module in eager mode"
            )
        seen.add(crossing)


def _check_one_draw(draws: dict[str, list[Draw]]) -> None:
    """Refuse two draws of one module in one call that look the same on local tensors.

    Raises:
        NotLocalFriendlyError: naming the module and the draws.
    """
    for name, found in draws.items():
        known: dict[tuple, Draw] = {}
        for draw in found:
            other = known.setdefault(draw.key, draw)
            if not draw.agrees(other):
                raise NotLocalFriendlyError(
                    f"{describe(name)} draws random numbers for two layouts that look alike on local tensors: {other}, "
                    f"and {draw}; {ways_out(name, is_draw=True)}"
                )


def _add_step(program: StaticProgram, crossing: Crossing) -> None:
    """Compile the conversion of a value that moves or whose gradient does."""
    if crossing.source is None:
        return
    mesh, target, gradient = program.model.mesh, crossing.target, crossing.gradient
    if program.is_root and crossing.where.startswith(program.place("returns")):
        if any(p.is_shard() for p in crossing.source):
            return  # stays a DTensor
        target = replicated(mesh)
        gradient = None if gradient is None else target
    conversion = Conversion(crossing.shape, crossing.source, target, gradient)
    try:
        step = compile_conversion(conversion, mesh)
    except ValueError as error:
        raise NotLocalFriendlyError(f"{crossing.where}: {error}") from error
    program.steps.setdefault(crossing.where, {})[torch.Size(crossing.arriving)] = step
