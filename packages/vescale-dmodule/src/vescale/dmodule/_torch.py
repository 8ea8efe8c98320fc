"""The only file of ``vescale.dmodule`` that touches private torch names."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

from vescale.dtensor.extension import group_of_ranks

__all__ = [
    "CHILDREN",
    "DIRECT_CALL",
    "Collectives",
    "alias",
    "backward_number",
    "direct_apply",
    "flat_group",
    "for_each",
    "has_dispatch_mode",
    "has_global_hooks",
    "hook_tables",
    "in_backward",
    "is_compiler_error",
    "is_full_cache",
    "is_in_own_forward",
    "is_profiling",
    "leaf_over",
    "leaf_states",
    "local_of",
    "module_hook_tables",
    "no_function_modes",
    "on_backward_end",
    "ordinary_call",
    "plain_operands_replicated",
    "replicate_plain_operands",
    "run_backward",
    "sum_later",
    "tensor_tables",
    "train_flags",
    "tree_leaves",
    "tree_map",
    "without_hooks",
    "wrap",
    "wrap_like",
    "wrapper_like",
]


def replicate_plain_operands(allow: bool) -> bool:
    """Set whether DTensor operators take plain operands as replicated, and return what was set before.

    ``torch.distributed.tensor.experimental.implicit_replication`` is the same as a context, but it always leaves the
    switch off, also when it was on outside.
    """
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = allow
    return before


@contextlib.contextmanager
def plain_operands_replicated() -> Iterator[None]:
    """Take plain operands of DTensor operators as replicated inside."""
    before = replicate_plain_operands(allow=True)
    try:
        yield
    finally:
        replicate_plain_operands(allow=before)


def no_function_modes() -> contextlib.AbstractContextManager:
    """Return a context whose calls reach no ``TorchFunctionMode`` and no ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


def tensor_tables(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """Return the tables of the parameters and of the buffers that ``module`` itself holds; changing them changes it."""
    return module._parameters, module._buffers


def local_of(tensor: DTensor) -> Tensor:
    """Return the local tensor that a DTensor wraps, without autograd."""
    return tensor._local_tensor


wrap: Callable[[Tensor, object], DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)
"""Return a local tensor as a DTensor of a layout, without autograd. (``DTensor.__init__`` does nothing, slowly.)"""


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """Return ``local`` as a DTensor with the layout and shape of ``like``, without autograd."""
    return wrap(local, like._spec)


def wrapper_like(like: DTensor) -> Callable[[Tensor], DTensor]:
    """Return :func:`wrap_like` for one tensor, prepared."""
    layout = like._spec
    return lambda local: wrap(local, layout)


def leaf_states(leaves: Sequence[DTensor]) -> tuple[list[bool], list[int]]:
    """Return of some DTensors whether each requires a gradient, and the address of its local storage.

    Their classes are not asked: one whose values are on their way would wait.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_requires_grad, leaves)), list(map(Tensor.data_ptr, map(_local, leaves)))


_requires_grad, _local = operator.attrgetter("requires_grad"), operator.attrgetter("_local_tensor")


def train_flags(leaves: Sequence[Tensor]) -> list[bool]:
    """Return of some tensors, whatever their classes answer at the moment, whether each requires a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_requires_grad, leaves))


def leaf_over(tensor: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a leaf parameter over the memory of a tensor, whatever that one's class answers at the moment."""
    return Tensor._make_subclass(nn.Parameter, tensor, requires_grad)


def alias(tensor: Tensor) -> Tensor:
    """Return a plain tensor over the memory of another, outside autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def for_each(function: Callable, *columns: Iterable) -> None:
    """Call a function once per row of some columns, without a loop in Python."""
    collections.deque(map(function, *columns), maxlen=0)


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def hook_tables(leaf: Tensor) -> tuple[dict, dict]:
    """Return the tables of the gradient and of the post-accumulate hooks of a leaf, made where there are none.

    Hooks that are registered later appear in them.
    """
    if leaf._backward_hooks is None:
        leaf._backward_hooks = OrderedDict()
    if leaf._post_accumulate_grad_hooks is None:
        leaf._post_accumulate_grad_hooks = OrderedDict()
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Take the gradient hooks off some leaf tensors while the context lasts."""
    hooked = [t for t in tensors if t._backward_hooks or t._post_accumulate_grad_hooks]
    kept = [(t, t._backward_hooks, t._post_accumulate_grad_hooks) for t in hooked]
    for tensor in hooked:
        # None would leave the second as it is
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for tensor, before, after in kept:
            tensor._backward_hooks = OrderedDict() if before is None else before
            tensor._post_accumulate_grad_hooks = OrderedDict() if after is None else after


def _needs_operators(tensor: Tensor) -> bool:
    """Return whether operators are traced, such as by a compiler, or the tensor is complex."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or tensor.is_complex()


class Collectives:
    """Collectives of one process group on plain tensors, outside autograd, complete on return.

    A compiler sees the functional operators. Otherwise the process group itself is called, as ``torch.distributed``
    does after its checks of arguments, which take as long as the call. Complex tensors take the functional way too.

    Arguments are contiguous; results are new, contiguous tensors.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.name, self.size = group, group.group_name, group.size()
        self.gather_options, self.reduce_options = _c10d.AllgatherOptions(), {}
        self.scatter_options, self.exchange_options = {}, _c10d.AllToAllOptions()
        self.gather_options.asyncOp = self.exchange_options.asyncOp = False
        for name, op in _REDUCE_OPS.items():
            self.reduce_options[name], self.scatter_options[name] = dist.AllreduceOptions(), dist.ReduceScatterOptions()
            for options in (self.reduce_options[name], self.scatter_options[name]):
                options.reduceOp, options.asyncOp = op, False

    def all_gather(self, local: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one or more dims, one after the other along the first."""
        if _needs_operators(local):
            came = torch.ops._c10d_functional.all_gather_into_tensor(local.resolve_conj(), self.size, self.name)
            return torch.ops._c10d_functional.wait_tensor(came)
        out = local.new_empty((self.size * local.size(0), *local.shape[1:]))
        _wait(self.group._allgather_base(out, local, self.gather_options))
        return out

    def all_reduce(self, local: Tensor, op: str) -> Tensor:
        """Return the reduced tensor."""
        if _needs_operators(local):
            came = torch.ops._c10d_functional.all_reduce(local.resolve_conj(), op, self.name)
            return torch.ops._c10d_functional.wait_tensor(came)
        out = local.clone(memory_format=torch.contiguous_format)
        _wait(self.group.allreduce([out], self.reduce_options[op]))
        return out

    def reduce_scatter(self, parts: Tensor, op: str, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's reduced part, of ``shape``; ``parts`` has those of all ranks one after the other."""
        if _needs_operators(parts):
            came = torch.ops._c10d_functional.reduce_scatter_tensor(parts.resolve_conj(), op, self.size, self.name)
            return torch.ops._c10d_functional.wait_tensor(came).view(shape)
        out = parts.new_empty(shape)
        _wait(self.group._reduce_scatter_base(out, parts, self.scatter_options[op]))
        return out

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return what each rank has for this one; the first dim of ``parts`` and of the result counts the ranks."""
        if _needs_operators(parts):
            splits = [1] * self.size
            came = torch.ops._c10d_functional.all_to_all_single(parts.resolve_conj(), splits, splits, self.name)
            return torch.ops._c10d_functional.wait_tensor(came)
        out = torch.empty_like(parts)
        _wait(self.group.alltoall_base(out, parts, [], [], self.exchange_options))
        return out


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # some backends complete before they return
        work.wait()


def sum_later(group: dist.ProcessGroup) -> Callable[[Tensor], dist.Work | None]:
    """Return the function that begins to add a tensor over the ranks of ``group``, in place; its result is awaited."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, True
    return lambda tensor: group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)


def direct_apply(function: type[torch.autograd.Function]) -> Callable:
    """Return ``function.apply`` without the part that serves transforms of ``torch.func``, which takes half its time.

    Backward calls ``function.backward`` without asking what else there may be. A compiler traces ``function.apply``
    only.
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


def flat_group(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """Return the ranks that differ from this one along ``axes`` only, in the order of their coordinates.

    The mesh's own group of an axis has them in ascending order. All of them must ask for it together.
    """
    coord = mesh.get_coordinate()
    ranks = mesh.mesh[tuple(slice(None) if axis in axes else coord[axis] for axis in range(mesh.ndim))]
    ranks = ranks.flatten().tolist()
    if len(axes) == 1 and ranks == sorted(ranks):
        return mesh.get_group(axes[0])
    return group_of_ranks(ranks, keep_order=True)


CHILDREN = "_modules"
"""The attribute of a module that holds the table of its children, by name."""


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that is running in this thread, -1 outside."""


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Do as ``torch.autograd.backward``, which turns function modes off while it runs."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has computed everything, before it returns to the user.

    The pass alone keeps ``callback`` alive: after an exception it is freed without a call.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_profiling() -> bool:
    """Return whether a profiler of torch is running, which may be one that emits NVTX or ITT ranges."""
    return torch.autograd.profiler._is_profiler_enabled


DIRECT_CALL = "_compiled_call_impl"
"""The attribute of a module that its call runs in place of everything else, where it is set."""


def ordinary_call(module: nn.Module) -> Callable:
    """Return what a call of a module runs where nothing else is set: its hooks and its forward."""
    return module._call_impl


def has_global_hooks() -> bool:
    """Return whether there are hooks for the calls of all modules."""
    return nn.modules.module._has_any_global_hook()


def is_in_own_forward(module: nn.Module) -> bool:
    """Return whether a call of ``module`` encloses the running one; asked in a hook of the running call."""
    frame, num_calls = sys._getframe(1), 0
    while frame is not None and num_calls < 2:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        num_calls += is_call and frame.f_locals.get("self") is module
        frame = frame.f_back
    return num_calls > 1


def module_hook_tables(module: nn.Module) -> list[dict]:
    """Return the tables of a module's own forward and backward hooks."""
    return [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]


def is_full_cache(error: Exception) -> bool:
    """Return whether a compiler gives up because it has compiled a function too often."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def is_compiler_error(error: Exception) -> bool:
    """Return whether an error comes from a compiler, which has not run anything yet, and not from what it compiled."""
    return any(cls.__name__ == "TorchDynamoException" for cls in type(error).__mro__)


def has_dispatch_mode() -> bool:
    """Return whether operators are watched by a ``TorchDispatchMode``; a compiler refuses to run then."""
    return _get_current_dispatch_mode() is not None
