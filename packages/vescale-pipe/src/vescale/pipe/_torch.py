"""The only module of this package with private names of torch.

- ``make_wrapper``: a tensor that reports sizes and a device and owns no storage.
- ``no_torch_function``: the ``__torch_function__`` of a subclass that leaves functions to modes and the dispatcher.
- ``function_mode_on_top``: the innermost active TorchFunctionMode; ``push_mode`` and ``pop_mode`` change it.
- ``OperatorMode``: base class of a mode that intercepts every operator below autograd.
- ``set_grad_enabled``: the function that contexts such as ``torch.no_grad`` call.
- ``tree_flatten`` / ``tree_unflatten``: torch's pytree.
- ``profiled``: names a part of a step in profiles; without a profiler it costs nothing.
- ``tensor_hooks``: the dictionary of hooks that ``Tensor.register_hook`` fills, or None.
- ``graph_task_id``: identity of the backward pass in progress.
- ``has_forward_hooks``: whether a module has hooks of its own; ``forward_hooks``: those of its forward.
- ``clear_forward_hooks`` removes these; ``without_data``: a mode in which tensors have shapes and no data.
- ``switches``: what the process has set for operators; ``modes``: the modes through which functions and operators go.
- ``has_own_generator``: whether an operator gets a generator other than the default ones.
- ``has_saved_tensor_hooks``: whether operators save tensors through hooks now, as in a checkpoint.
- ``is_transformed``: whether a tensor stands for others in a transform of ``torch.func``.
- ``new_group``: a process group created by its members alone, under a name that does not depend on other groups.
- ``default_store``: the store by which the processes found each other.
- ``bound_device``: the device of ``init_process_group(device_id=...)``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _disabled_torch_function_impl as no_torch_function
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode as OperatorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "FakeTensorMode",
    "OperatorMode",
    "bound_device",
    "default_store",
    "forward_hooks",
    "function_mode_on_top",
    "graph_task_id",
    "has_forward_hooks",
    "has_own_generator",
    "has_saved_tensor_hooks",
    "is_random",
    "is_transformed",
    "make_wrapper",
    "modes",
    "new_group",
    "no_torch_function",
    "pop_mode",
    "profiled",
    "push_mode",
    "set_grad_enabled",
    "switches",
    "tensor_hooks",
    "tree_flatten",
    "tree_unflatten",
    "version_of",
    "waited",
]

Subclass = TypeVar("Subclass", bound=torch.Tensor)

_NOTHING = contextlib.nullcontext()


def make_wrapper(
    cls: type[Subclass], shape: Any, *, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Subclass:
    """Return a tensor of subclass ``cls`` that reports these properties and owns no storage."""
    wrapper: Any = torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )
    return cast(Subclass, wrapper)


def function_mode_on_top() -> TorchFunctionMode | None:
    """Return the innermost active function mode."""
    mode: TorchFunctionMode | None = _get_current_function_mode()
    return mode


def push_mode(mode: TorchFunctionMode) -> None:
    """Make ``mode`` the innermost function mode."""
    _push_mode(mode)


def pop_mode() -> None:
    """Remove the innermost function mode."""
    _pop_mode()


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """Return the live dictionary of a tensor's hooks, by handle id."""
    return tensor._backward_hooks


def graph_task_id() -> int:
    """Return the identity of the backward pass in progress, or -1 outside of one."""
    return torch._C._current_graph_task_id()


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has hooks that run in its forward or backward."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(kinds)


def forward_hooks(module: torch.nn.Module, *, before: bool) -> list[tuple[Callable[..., Any], bool]]:
    """Return the hooks that run before or after a module's forward, in order, and whether they get keywords."""
    hooks: dict[int, Callable[..., Any]] = module._forward_pre_hooks if before else module._forward_hooks
    with_kwargs = module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs
    return [(hook, number in with_kwargs) for number, hook in hooks.items()]


@contextlib.contextmanager
def without_data(mode: FakeTensorMode) -> Iterator[None]:
    """Make all new tensors fake ones, which have shapes and no data; torch logs no operator that fails on them."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was_off, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = was_off


def fake_tensors() -> FakeTensorMode:
    """Return a mode for `without_data`; tensors with data may take part as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def clear_forward_hooks(module: torch.nn.Module) -> None:
    """Remove the hooks that run in a module's forward or backward, without their handles."""
    for table in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
        table.clear()


def modes() -> list[Any]:
    """Return the modes through which functions and operators go at present."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def switches() -> dict[str, Any]:
    """Return what decides how operators run, other than gradients, autocast and modes: kernels, precision, hooks."""
    return {name: _asked(getter) for name, getter in _SWITCHES.items()}


def _asked(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError as error:  # the precision was set through another function
        return str(error)


def profiled(kind: str, what: object) -> contextlib.AbstractContextManager[Any]:
    """Return a context that a profile shows under the name ``kind`` and ``what``."""
    return record_function(f"{kind}{what}") if torch.autograd._profiler_enabled() else _NOTHING


def has_saved_tensor_hooks() -> bool:
    """Return whether operators save tensors for the backward through hooks (``torch.autograd.graph``) at present."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for others, inside of ``torch.vmap`` or another transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_random(operator: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether an operator call advances a generator; attention with ``dropout_p=0`` does not."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def has_own_generator(args: tuple, kwargs: dict) -> bool:
    """Return whether an operator gets a generator other than the default ones."""
    given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
    return any(not _is_default(generator) for generator in given)


def _is_default(generator: torch.Generator) -> bool:
    kind = generator.device.type
    defaults = getattr(torch if kind == "cpu" else torch.get_device_module(kind), "default_generators", ())
    every: tuple[Any, ...] = (torch.default_generator, *defaults)
    given: Any = generator
    return any(given._cdata == default._cdata for default in every)  # the dispatcher wraps it anew


def version_of(tensor: torch.Tensor) -> int:
    """Return the counter of in-place writes, shared by all views; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor after its functional collective, if any, completes."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def new_group(ranks: tuple[int, ...], number: int, **kwargs: Any) -> dist.ProcessGroup:
    """Return a new process group of ``ranks``, created by them alone; ``number`` makes its name unique.

    Torch derives the name of such a group from the number of groups of the calling rank. Stages may belong to different
    numbers of groups; their names would differ, and the creation would deadlock.
    """
    stock = distributed_c10d._process_group_name
    named: Any = lambda *_, **__: f"vescale.pipe:{ranks}:{number}"  # noqa: E731
    distributed_c10d._process_group_name = named
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **kwargs)
    finally:
        distributed_c10d._process_group_name = stock
    return group


def bound_device() -> torch.device | None:
    """Return the device bound by ``init_process_group(device_id=...)``, with which NCCL splits communicators."""
    return torch.distributed.distributed_c10d._get_default_group().bound_device_id


def default_store() -> dist.Store:
    """Return the store by which the processes of the default process group found each other."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


_NAMES = re.compile("_get_.*(accumul|benchmark|blas|cudnn|determin|mkldnn|nnpack|reduc|sdp|tf32|float32).*")
_PRECISIONS = [("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn"))]


def _find_switches() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        "inference mode": torch.is_inference_mode_enabled,
        "the default dtype": torch.get_default_dtype,
        "anomaly detection": torch.is_anomaly_enabled,
        "the number of threads": torch.get_num_threads,
        "hooks for saved tensors, as of a checkpoint,": has_saved_tensor_hooks,
    }
    for name in filter(_NAMES.fullmatch, dir(torch._C)):
        try:
            _asked(getattr(torch._C, name))
        except TypeError:  # it needs arguments
            continue
        found[name.removeprefix("_get_")] = getattr(torch._C, name)
    for pair in _PRECISIONS if hasattr(torch._C, "_get_fp32_precision_getter") else ():
        found[f"precision of {pair}"] = functools.partial(torch._C._get_fp32_precision_getter, *pair)
    return found


_SWITCHES = _find_switches()
