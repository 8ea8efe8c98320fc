"""Dry runs: one call of a module, forward and backward, without side effects.

The first dry run is the recording: the module runs on DTensors, and an observer records the layouts of all values and
gradients at the boundaries. The program adopts them. The second is the check: the same call on local tensors, for
``compare``. Both start from the same inputs, random state, buffers and attributes::

    arguments of the caller --copied--> forward -> backward from the results -> gradients, buffers
                                        then restore random state, buffers, attributes, gradients, hooks

Backward starts from the scalars that the module returns (losses). Without a scalar it starts from all returned tensors.
The incoming gradients are the cosines of the values: they differ between elements, so a permutation is visible.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import extension, random

from ... import _torch
from ..._boundary.convert import as_dtensor
from ..._boundary.edges import aligned
from ..._boundary.rows_axis import OverRows, is_over_rows, lower
from ..._boundary.values import copied, map_leaves
from ..._execution.eager import EagerScope, hook_scope
from ...errors import NotLocalFriendlyError
from ..local_parameters import MEMORY, LocalParameter
from ..parts import Parts, describe, join, keep_on_dtensors, likely_cause
from .calls import CallRecorder
from .held import BUILTIN, Held
from .layouts import Recording
from .names import Names
from .observe import BoundaryRecords, Observer, replicated

__all__ = ["Run", "call_locally", "check", "in_dry_run", "keep_or_refuse", "new_run", "record", "without_side_effects"]

SET_DATA = Tensor.data.__set__
IN_PLACE = [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")]
IN_PLACE += ["__iand__", "__ior__", "__ixor__", "__setitem__"]
HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)

Gradients = dict[str, tuple[Tensor, tuple[Placement, ...] | None]]


@dataclass
class Run:
    """The results of one dry run.

    Attributes:
        observer: the boundary records.
        names: the running and recomputed modules.
        gradients: local gradients of the parameters by name; in the recording with their layouts.
        buffers: local values of the buffers after the call, by name.
        seeds: the gradients from which backward starts, if the call runs on the rows of all data-parallel ranks.
    """

    observer: Observer
    names: Names
    gradients: Gradients = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    seeds: list[DTensor | None] = field(default_factory=list)


def new_run(mesh: DeviceMesh, changed: frozenset[str] = frozenset()) -> Run:
    """Return an empty run; ``changed`` are the boundaries whose results are changed in place."""
    names = Names()
    return Run(Observer(mesh, lambda: names.running, changed), names)


# ------------------------------------------------------------------------------------------------- the two runs


def record(
    run: Run, recorder: CallRecorder, parts: Parts, scope: EagerScope, args: tuple, kwargs: dict
) -> Recording | None:
    """Run a call on DTensors. Return None if results are changed in place that the observer does not know of yet.

    Args:
        run: receives the results.
        recorder: notes the calls of torch functions.
        parts: the module.
        scope: of the parallelized model.
        args: of the call.
        kwargs: of the call.

    Raises:
        Exception: any error of the module itself in eager mode.
    """
    mesh, module = run.observer.mesh, parts.module
    buffers = _dtensor_buffers(parts)
    handles = hook_scope(module, parts.name, scope)
    returned: list[OverRows | None] = []
    try:
        with without_side_effects(module), run.names.watching(parts.modules):
            before = extension.random_position(mesh.device_type)
            with recorder.recording():
                output = module(*copied(args), **copied(kwargs))
                if run.observer.newly_changed():
                    return None
                is_quiet = extension.random_position(mesh.device_type) == before
                map_leaves(lambda tensor, _where: returned.append(_rows_of(tensor, mesh)) or tensor, output, "")
                if torch.is_grad_enabled():
                    leaves = _starts(output)
                    seeds = list(map(_weights, leaves))
                    run.seeds += [_of_rows(*pair, mesh) for pair in zip(leaves, seeds, strict=True)]
                    if leaves:
                        _torch.run_backward(leaves, seeds)
            run.gradients.update(_gradients(parts))
            run.buffers.update(_buffers(parts, buffers, mesh))
    finally:
        for handle in handles:
            handle.remove()
    return Recording(
        records=BoundaryRecords(run.observer.records()),
        changed=run.observer.changed,
        operators=recorder.of_local_parts(parts),
        drawn=recorder.drawn,
        tokens={n: region.last_tokens for n, region in parts.experts.items() if region.last_tokens is not None},
        gradients={name: layout for name, (_, layout) in run.gradients.items()},
        recomputed=run.names.recomputed,
        is_quiet=is_quiet,
        mesh=recorder.mesh,
        returned=tuple(returned),
    )


def check(run: Run, eager: Run, parts: Parts, args: tuple, kwargs: dict) -> None:
    """Run a call on local tensors.

    Args:
        run: receives the results; the hooks of local parameters add gradients to it.
        eager: the recording.
        parts: the module.
        args: of the call.
        kwargs: of the call.

    Raises:
        NotLocalFriendlyError: the module raises; names the innermost part.
    """
    mesh, buffers = run.observer.mesh, _dtensor_buffers(parts)
    with without_side_effects(parts.module), run.names.watching(parts.modules):
        output = call_locally(run, parts, copied(args), copied(kwargs))
        if torch.is_grad_enabled():
            _differentiate_locally(output, eager.seeds)
        _add_gradients(run, _gradients(parts))
        run.buffers.update(_buffers(parts, buffers, mesh))


def call_locally(run: Run, parts: Parts, args: tuple, kwargs: dict) -> object:
    """Make a call of a module on local tensors.

    Raises:
        NotLocalFriendlyError: the module raises; names the innermost part.
    """
    try:
        return parts.module(*args, **kwargs)
    except NotLocalFriendlyError:
        raise
    except Exception as error:
        name = run.names.failed or parts.name
        raise NotLocalFriendlyError(
            f"on local tensors {describe(name)} fails, which runs in eager mode: {type(error).__name__}: {error}. "
            f"{likely_cause(parts, name)}"
        ) from error


def _differentiate_locally(output: object, seeds: list[DTensor | None]) -> None:
    try:
        leaves = _starts(output)
        seeds = seeds if len(seeds) == len(leaves) else [None] * len(leaves)
        if leaves:
            _torch.run_backward(leaves, [_seed(*pair) for pair in zip(leaves, seeds, strict=True)])
    except NotLocalFriendlyError:
        raise
    except Exception as error:
        raise NotLocalFriendlyError(
            f"on local tensors backward fails, which runs in eager mode: {type(error).__name__}: {error}. Activation "
            "checkpointing of a function with random operators or parameters of its own may be the cause: checkpoint a "
            'module instead, or run the model on DTensors (mode="eager")'
        ) from error


def _starts(output: object) -> list[Tensor]:
    """Return the results of a module from which backward starts; the docstring of this file says which."""
    leaves: list[Tensor] = []
    map_leaves(lambda tensor, _where: leaves.append(tensor) or tensor, output, "")
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    scalars = [leaf for leaf in leaves if leaf.ndim == 0]
    return scalars or leaves


def _weights(output: Tensor) -> Tensor:
    value = output.detach()
    if isinstance(value, DTensor) and any(isinstance(p, Partial) for p in value.placements):
        value = value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return value.cos()


def _rows_of(tensor: Tensor, mesh: DeviceMesh) -> OverRows | None:
    return OverRows(tensor.placements[0], tensor.shape) if is_over_rows(tensor, mesh) else None


def _of_rows(value: Tensor, seed: Tensor, mesh: DeviceMesh) -> DTensor | None:
    """Return what this rank has of the gradient of a result, where each data-parallel rank gives a summand."""
    if not is_over_rows(value, mesh):
        return None
    wide, own = value.device_mesh, value.placements[0]
    seed = lower(seed, mesh)
    if own.is_partial("avg"):
        return seed / wide.size(0)
    return seed if own.is_shard() or own.is_partial() or not wide.get_local_rank(0) else torch.zeros_like(seed)


def _seed(result: Tensor, of_rows: DTensor | None) -> Tensor:
    if of_rows is None or is_over_rows(result, of_rows.device_mesh):
        return _weights(result)
    return of_rows if isinstance(result, DTensor) else of_rows.full_tensor()


# ------------------------------------------------------------------------------------------------- results


def _gradients(parts: Parts) -> Gradients:
    """Return local gradients and their layouts: those of the parameters, or partial.

    Eager mode may compute a gradient in a layout that is neither (for a sharded vocabulary it computes the full
    gradient). Along that axis the gradient is redistributed to the layout of the parameter, which local code computes.
    """
    found = {}
    for name, parameter in parts.module.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = aligned(grad, parameter.placements)
            found[join(parts.name, name)] = (_torch.local_of(grad), tuple(grad.placements))
    return found


def _add_gradients(run: Run, others: Gradients) -> None:
    """Add the gradients of eager parts, which DTensors received, to those of local parameters.

    Raises:
        NotLocalFriendlyError: a tied parameter has both, and the one of the eager part is partial.
    """
    for name, (gradient, layout) in others.items():
        if name in run.gradients:
            local, _ = run.gradients[name]
            if local.shape != gradient.shape or any(p.is_partial() for p in layout):
                raise NotLocalFriendlyError(
                    f"parameter {name!r} is used on local tensors and by a part in eager mode: expected a gradient in "
                    f"the layout of the parameter there, got {layout}; run both uses in one mode"
                )
            gradient = gradient + local
        run.gradients[name] = gradient, layout


def keep_or_refuse(parameter: LocalParameter, checked: Run | None, leaf: Tensor) -> None:
    """Keep a gradient for the dry run that checks; outside of it, refuse a gradient that is not recorded."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return  # autograd runs this hook once per pass, even if the gradient is None
    if checked is None:
        raise NotLocalFriendlyError(
            f"parameter {parameter.name!r}: expected no gradient, as when static mode recorded this call, but got one; "
            f"if a branch depends on data, {keep_on_dtensors(parameter.name.rpartition('.')[0])}, otherwise call "
            'set_mode(model, "static"), which discards recordings'
        )
    earlier, _ = checked.gradients.get(parameter.name, (None, None))
    checked.gradients[parameter.name] = (gradient if earlier is None else earlier + gradient, None)


def _dtensor_buffers(parts: Parts) -> dict[str, DTensor]:
    buffers = parts.module.named_buffers()
    return {join(parts.name, name): buffer for name, buffer in buffers if isinstance(buffer, DTensor)}


def _buffers(parts: Parts, before: dict[str, DTensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the local values of the buffers after a call, in their layouts before it."""
    found = {}
    for name, buffer in parts.module.named_buffers():
        old, new = before.get(join(parts.name, name)), buffer
        if old is not None and not isinstance(new, DTensor):
            new = as_dtensor(new, mesh)
        if is_over_rows(new, mesh):
            new = lower(new.redistribute(placements=(Replicate(), *new.placements[1:])), mesh)
        if isinstance(new, DTensor):
            same = old is not None and old.shape == new.shape
            new = new.redistribute(placements=old.placements if same else replicated(mesh))
        local = _torch.local_of(new) if isinstance(new, DTensor) else new
        found[join(parts.name, name)] = local.detach().clone()
    return found


# ------------------------------------------------------------------------------------------------- side effects


_open: list[nn.Module] = []  # of the calls that run without side effects


def in_dry_run() -> bool:
    """Return whether a dry run is in progress: a call that the program did not make, whose effects are undone."""
    return bool(_open)


@contextlib.contextmanager
def without_side_effects(module: nn.Module) -> Iterator[None]:
    """Restore random streams, buffers, attributes of modules and gradients at the end; remove user hooks meanwhile.

    Of lists, sets and dicts that are attributes, or that hooks of modules can change, items that were added or removed
    are restored, as are the variables of these hooks. Hooks for saved tensors see nothing: a checkpoint around the call
    counts what it saves, and the call that is repeated in backward has no dry runs.
    """
    state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in random.get_state().items()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    tables = [(table, dict(table)) for part in module.modules() for table in _torch.tensor_tables(part)]
    # Models install hooks in their first call and set an attribute for that: restore both.
    tables += [(table, dict(table)) for part in module.modules() for table in _torch.module_hook_tables(part)]
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    hooks = [hook for part in module.modules() for table in _torch.module_hook_tables(part) for hook in table.values()]
    held = Held(hooks, [value for _, own in attributes for value in own.values() if type(value) in BUILTIN])
    parameters = list(module.parameters())
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    _open.append(module)
    try:
        with _torch.without_hooks(parameters), _Restored(parameters), _torch.saving_unseen():
            yield
    finally:
        _open.pop()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for part, before in attributes:
            _restore(vars(part), before)
        held.restore()
        for table, before in tables:
            _restore(table, before)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(_local(buffer), _local(before)):
                    buffer.copy_(before)
        random.set_state(state)


def _restore(table: dict, before: dict) -> None:
    for name in [name for name in table if name not in before]:
        del table[name]
    for name, value in before.items():
        if table.get(name) is not value:
            table[name] = value


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor


class _Restored(TorchFunctionMode):
    """Restore what calls of torch functions change: generators that they are given, and parameters that they write.

    Without gradients, hooks on tensors are left out, which would be an error there.

    Args:
        parameters: of the module.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__()
        self._parameters = list(parameters)
        self._generators: dict[torch.Generator, Tensor] = {}
        self._values: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in (*args, *kwargs.values()):
            if isinstance(leaf, torch.Generator) and leaf not in self._generators:
                self._generators[leaf] = leaf.get_state()
        written = kwargs.get("out", args[0] if args and _writes(func) else None)
        if isinstance(written, Tensor):
            self._save(written)
        if func in HOOKS and not torch.is_grad_enabled():
            return RemovableHandle(OrderedDict())
        return func(*args, **kwargs)

    @_torch.unseen
    def _save(self, written: Tensor) -> None:
        """Keep the values of the parameters that share memory with a tensor."""
        start, end = _memory(written)
        for parameter in self._parameters:
            first, last = _memory(parameter)
            if start < last and first < end and parameter not in self._values:
                if (memory := vars(parameter).get(MEMORY)) is not None and memory.frees:
                    raise RuntimeError(
                        "expected a forward that writes no parameter, since it runs several times before its first "
                        f"call, got one that writes a parameter of shape {tuple(parameter.shape)}, whose memory data "
                        "parallelism frees; write it between steps"
                    )
                self._values[parameter] = _local(parameter).detach().clone()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for generator, state in self._generators.items():
            generator.set_state(state)
        with torch.no_grad():
            for parameter, value in self._values.items():
                _local(parameter).copy_(value)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the range of addresses of a tensor's elements."""
    local = _local(tensor)
    if not local.numel():
        return 0, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return local.data_ptr(), local.data_ptr() + span * local.element_size()


def _writes(function: Callable) -> bool:
    name = getattr(function, "__name__", "")
    is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return is_in_place or function == SET_DATA
