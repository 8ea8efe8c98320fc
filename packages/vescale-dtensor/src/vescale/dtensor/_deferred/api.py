"""Public functions: `deferred_init` records a constructor, `materialize` makes a module's tensors real.

Guarantee: after the same seed, materialized parameters and buffers are bit for bit those of the eager constructor (or
this rank's shard of them), and the default generators end in the same state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._checked import Condition, checked
from .._torch.dispatch import dispatch_modes
from .materialize import Job, Layout, compute, place_real, target_device
from .mode import Recorder
from .slots import Placements, collect, replace, resolve
from .tensor import DeferredTensor

__all__ = ["deferred_init", "is_deferred", "materialize"]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def _is_device(device: torch.device | str) -> bool:
    try:
        return bool(torch.device(device).type)
    except RuntimeError:
        return False


Device = Annotated[torch.device | str, Condition("a device such as 'cuda' or 'cpu'", _is_device)]


@checked
def deferred_init(ctor: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run a constructor without allocating its parameters and without drawing random numbers.

    Args:
        ctor: a module class, a factory such as `AutoModelForCausalLM.from_config`, or any callable.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Returns:
        What `ctor` returns. Its tensors report the shape, dtype, device and `requires_grad` of the eager ones, but
        have no contents until :func:`materialize`. Reading contents inside `ctor` (`item()`, `tolist()`, …) works.

    Raises:
        NotImplementedError: `ctor` runs an operation on a tensor that cannot be recorded.

    Note:
        Seed before this call, and call :func:`materialize` before any other code draws random numbers. The parameters
        equal those of an eager constructor in place of this call.

    Example:
        >>> torch.manual_seed(0)                                                # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> model = deferred_init(nn.Linear, 4096, 4096)
        >>> is_deferred(model), model.weight.shape
        (True, torch.Size([4096, 4096]))
        >>> model = materialize(model)
        >>> is_deferred(model)
        False
    """
    if any(isinstance(mode, Recorder) for mode in dispatch_modes()):
        return ctor(*args, **kwargs)  # part of the constructor that is being recorded
    recorder = Recorder()
    try:
        with recorder:
            result = ctor(*args, **kwargs)
    finally:
        recorder.finish()
    if isinstance(result, nn.Module):
        for target in collect(result):
            if isinstance(target.tensor, DeferredTensor):
                target.tensor.deferred.name = target.names[0]
    return result


@checked
def is_deferred(module_or_tensor: nn.Module | Tensor) -> bool:
    """Return whether a tensor, or any tensor of a module, is not materialized yet.

    Example:
        >>> is_deferred(nn.Linear(2, 2))
        False
    """
    if isinstance(module_or_tensor, nn.Module):
        return any(isinstance(target.tensor, DeferredTensor) for target in collect(module_or_tensor))
    return isinstance(module_or_tensor, DeferredTensor)


@checked
def materialize(
    module: M,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    device: Device | None = None,
) -> M:
    """Make the deferred tensors of a module real, in place; each rank gets its shards of the eager module's tensors.

    The full recorded program is replayed. Random operators on tensors that this rank does not hold, or of a removed
    module, advance the generator as in the eager constructor. There is no communication; seed every rank alike.

    Args:
        module: a module made by :func:`deferred_init`, or part of one. Real tensors are kept; a second call changes
            nothing.
        mesh: the mesh that `placements` refer to.
        placements: FQN -> one placement (any but Partial) for each mesh axis, as a dictionary or as a function of
            `(fqn, tensor)`. None for a tensor makes it plain and full. It applies to parameters and buffers, also to
            those that were real from the start; tied tensors need it under one name only.
        device: the device of the materialized tensors; default: the mesh's device, else that of the constructor.

    Returns:
        The same module. Parameters are new objects with the Python attributes of the old ones: tied ones stay tied,
        also over several calls for parts of one model; frozen ones stay frozen.

    Raises:
        ValueError: a generator has been used since :func:`deferred_init`, or the placements do not fit.
        NotImplementedError: Partial placements, shards of tensors that share memory but not
            geometry, or tensors with autograd history.

    Example:
        >>> model = deferred_init(nn.Linear, 8, 8)
        >>> model = materialize(model, mesh, {"weight": [Shard(0)]})            # doctest: +SKIP
        >>> model.weight.to_local().shape                                       # doctest: +SKIP
        torch.Size([4, 8])
    """
    targets = collect(module)
    device = target_device(device, mesh)
    chosen = resolve(targets, placements, mesh, module)
    layouts = [Layout(None if found is None else mesh, found, device) for found in chosen]
    jobs = [Job(target, layout) for target, layout in zip(targets, layouts, strict=True)]
    deferred = [job for job in jobs if isinstance(job.target.tensor, DeferredTensor)]
    real = [job for job in jobs if job not in deferred]
    compute(deferred)
    for job in deferred:
        replace(job.target, job.target.tensor.deferred.result[1])
    for job in real:
        place_real(job)
    return module
