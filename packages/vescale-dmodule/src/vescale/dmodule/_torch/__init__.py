"""The only folder of ``vescale.dmodule`` that uses private names of torch."""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as _c10d
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map

from vescale.dtensor.extension import group_of_ranks, name_group, waits_of

from .fakes import (
    READS_VALUES,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    argument_names,
    fake_only,
    fake_tensors,
    ghost_mesh,
    ghost_world,
    quiet_fakes,
)
from .hooks import (
    direct_apply,
    functions_applied_by,
    gradient_hooks,
    has_global_hooks,
    have_backward_hooks,
    hook_first,
    hook_tables,
    hooks_registered_by,
    module_hook_tables,
    nodes_before,
    share_hooks,
    without_hooks,
)

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "CHILDREN",
    "DIRECT_CALL",
    "READS_VALUES",
    "Collectives",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "alias",
    "argument_names",
    "awaited",
    "backward_number",
    "compiled_parts",
    "direct_apply",
    "fake_only",
    "fake_tensors",
    "flat_group",
    "for_each",
    "function_mode_on_top",
    "functions_applied_by",
    "ghost_mesh",
    "ghost_world",
    "gradient_hooks",
    "has_dispatch_mode",
    "has_global_hooks",
    "have_backward_hooks",
    "hook_first",
    "hook_tables",
    "hooks_registered_by",
    "in_backward",
    "is_compiler_error",
    "is_full_cache",
    "is_in_own_forward",
    "is_profiling",
    "is_traced",
    "leaf_over",
    "leaf_states",
    "local_of",
    "memory_of",
    "module_hook_tables",
    "no_function_modes",
    "nodes_before",
    "on_backward_end",
    "ordinary_call",
    "plain_operands_replicated",
    "quiet_fakes",
    "repeated",
    "replicate_plain_operands",
    "run_backward",
    "saving_unseen",
    "share_hooks",
    "sum_later",
    "tensor_tables",
    "train_flags",
    "tree_leaves",
    "tree_map",
    "unseen",
    "without_hooks",
    "wrap",
    "wrap_like",
    "wrapper_like",
]


def replicate_plain_operands(allow: bool) -> bool:
    """Set whether DTensor operators treat plain operands as replicated; return the previous setting.

    ``torch.distributed.tensor.experimental.implicit_replication`` is a context for the same switch, but it always
    leaves the switch off, even if it was on before.
    """
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = allow
    return before


@contextlib.contextmanager
def plain_operands_replicated() -> Iterator[None]:
    """Treat plain operands of DTensor operators as replicated while the context is open."""
    before = replicate_plain_operands(allow=True)
    try:
        yield
    finally:
        replicate_plain_operands(allow=before)


def no_function_modes() -> contextlib.AbstractContextManager:
    """Return a context that disables every ``TorchFunctionMode`` and ``__torch_function__``."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def repeated() -> Iterator[None]:
    """Make calls that are no part of the user's program: modes that must see each of its calls once do not see these.

    Such a mode says so in an attribute (``docs/protocols.md``).
    """
    modes = _get_current_function_mode_stack()
    kept = [mode for mode in modes if not getattr(mode, "_vescale_sees_once", False)]
    if len(kept) < len(modes):
        _exchange_modes(kept)
    try:
        yield
    finally:
        if len(kept) < len(modes):
            _exchange_modes(modes)


def _exchange_modes(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls of torch functions are seen by no function mode."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_torch_function_mode_enabled() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with no_function_modes():
            return function(*args, **kwargs)

    return run


def tensor_tables(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], dict[str, Tensor | None]]:
    """Return the tables of the parameters and the buffers of ``module``, without submodules; they may be changed."""
    return module._parameters, module._buffers


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """Return a reference to the memory of a tensor that does not keep it; equal for tensors with the same memory."""
    return StorageWeakRef(tensor.untyped_storage())


def local_of(tensor: DTensor) -> Tensor:
    """Return the local tensor that a DTensor wraps, without autograd."""
    return tensor._local_tensor


wrap: Callable[[Tensor, object], DTensor] = functools.partial(DTensor.__new__, DTensor, requires_grad=False)
"""Return a local tensor as a DTensor of a layout, without autograd; skips ``DTensor.__init__``, which is empty."""


def wrap_like(local: Tensor, like: DTensor) -> DTensor:
    """Return ``local`` as a DTensor with the layout and shape of ``like``, without autograd."""
    return wrap(local, like._spec)


def wrapper_like(like: DTensor) -> Callable[[Tensor], DTensor]:
    """Return :func:`wrap_like` with its second argument fixed."""
    layout = like._spec
    return lambda local: wrap(local, layout)


def leaf_states(leaves: Sequence[DTensor]) -> tuple[list[bool], list[int]]:
    """Return whether each DTensor requires a gradient, and the address of its local tensor.

    Skips ``__torch_function__`` of subclasses: a parameter with an all-gather in flight would block.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_requires_grad, leaves)), list(map(Tensor.data_ptr, map(_local, leaves)))


_requires_grad, _local = operator.attrgetter("requires_grad"), operator.attrgetter("_local_tensor")


def train_flags(leaves: Sequence[Tensor]) -> list[bool]:
    """Return whether each tensor requires a gradient; skips ``__torch_function__`` of subclasses."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_requires_grad, leaves))


def leaf_over(tensor: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a leaf parameter over the memory of a tensor; skips ``__torch_function__`` of subclasses."""
    return Tensor._make_subclass(nn.Parameter, tensor, requires_grad)


def alias(tensor: Tensor) -> Tensor:
    """Return a plain tensor over the memory of another, outside autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def awaited(tensor: Tensor) -> Tensor:
    """Return a tensor whose values can be read outside of torch functions: a guard waits for them, or refuses."""
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter, DTensor):
        with no_function_modes():
            kind.__torch_function__(Tensor.detach, (kind,), (tensor,), {})
    return tensor


def for_each(function: Callable, *columns: Iterable) -> None:
    """Call a function once per row of some columns, without a Python loop."""
    collections.deque(map(function, *columns), maxlen=0)


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def _needs_operators(tensor: Tensor) -> bool:
    """Return whether collectives must run as operators: under a compiler or dispatch mode, or for a complex tensor."""
    return torch.compiler.is_compiling() or has_dispatch_mode() or tensor.is_complex()


class Collectives:
    """Collectives of one process group on plain tensors, outside autograd, complete on return.

    Under a compiler or a dispatch mode, and for complex tensors, they are functional operators. Otherwise they call the
    process group directly and skip the checks of arguments of ``torch.distributed``, which take as long as the call.

    Arguments are contiguous; results are new, contiguous tensors.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.name, self.size, self.waits = group, group.group_name, group.size(), waits_of(group)
        self.gather_options, self.reduce_options = _c10d.AllgatherOptions(), {}
        self.scatter_options, self.exchange_options = {}, _c10d.AllToAllOptions()
        self.gather_options.asyncOp = self.exchange_options.asyncOp = False
        for name, op in _REDUCE_OPS.items():
            self.reduce_options[name], self.scatter_options[name] = dist.AllreduceOptions(), dist.ReduceScatterOptions()
            for options in (self.reduce_options[name], self.scatter_options[name]):
                options.reduceOp, options.asyncOp = op, False

    def all_gather(self, local: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along the first dim."""
        if _needs_operators(local):
            came = torch.ops._c10d_functional.all_gather_into_tensor(local.resolve_conj(), self.size, self.name)
            return torch.ops._c10d_functional.wait_tensor(came)
        out = local.new_empty((self.size * local.size(0), *local.shape[1:]))
        self.waits.wait(self.group._allgather_base(out, local, self.gather_options), "all-gather", out)
        return out

    def all_reduce(self, local: Tensor, op: str) -> Tensor:
        """Return the reduced tensor."""
        if _needs_operators(local):
            came = torch.ops._c10d_functional.all_reduce(local.resolve_conj(), op, self.name)
            return torch.ops._c10d_functional.wait_tensor(came)
        out = local.clone(memory_format=torch.contiguous_format)
        self.waits.wait(self.group.allreduce([out], self.reduce_options[op]), "all-reduce", out)
        return out

    def reduce_scatter(self, parts: Tensor, op: str, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's reduced part, of ``shape``; ``parts`` concatenates the parts of all ranks."""
        if _needs_operators(parts):
            came = torch.ops._c10d_functional.reduce_scatter_tensor(parts.resolve_conj(), op, self.size, self.name)
            return torch.ops._c10d_functional.wait_tensor(came).view(shape)
        out = parts.new_empty(shape)
        if out.is_cpu:  # as gloo does it, but with a wait that has a limit
            parts = parts.clone()
            self.waits.wait(self.group.allreduce([parts], self.reduce_options[op]), "reduce-scatter", parts)
            return out.copy_(parts.view(self.size, -1)[self.group.rank()].view(shape))
        self.waits.wait(self.group._reduce_scatter_base(out, parts, self.scatter_options[op]), "reduce-scatter", out)
        return out

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return the parts that the ranks send to this one; the first dim of argument and result is the rank."""
        if _needs_operators(parts):
            splits = [1] * self.size
            came = torch.ops._c10d_functional.all_to_all_single(parts.resolve_conj(), splits, splits, self.name)
            return torch.ops._c10d_functional.wait_tensor(came)
        out = torch.empty_like(parts)
        self.waits.wait(self.group.alltoall_base(out, parts, [], [], self.exchange_options), "all-to-all", out)
        return out


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def sum_later(group: dist.ProcessGroup) -> Callable[[Tensor], dist.Work | None]:
    """Return a function that launches the in-place sum of a tensor over the ranks of ``group`` and returns the work."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, True
    return lambda tensor: group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], options)


def flat_group(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """Return the ranks that differ from this one along ``axes`` only, in the order of their coordinates.

    The mesh's own group of an axis has them in ascending order. All of these ranks must call this together.
    """
    coord = mesh.get_coordinate()
    ranks = mesh.mesh[tuple(slice(None) if axis in axes else coord[axis] for axis in range(mesh.ndim))]
    ranks = ranks.flatten().tolist()
    if len(axes) == 1 and ranks == sorted(ranks):
        group = mesh.get_group(axes[0])
    else:
        group = group_of_ranks(ranks, keep_order=True)
    name_group(group, mesh, axes)
    return group


CHILDREN = "_modules"
"""The attribute of a module that holds the table of its children, by name."""


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that is running in this thread, -1 outside."""


def run_backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run ``torch.autograd.backward`` without disabling function modes, which it would do."""
    run = torch.autograd.graph._engine_run_backward  # as vescale.dtensor has replaced it
    run(tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the running backward pass, before ``backward()`` returns.

    Only the pass holds ``callback``: after an exception it is freed without a call.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_profiling() -> bool:
    """Return whether a profiler of torch is running, also one that emits NVTX or ITT ranges."""
    return torch.autograd.profiler._is_profiler_enabled


DIRECT_CALL = "_compiled_call_impl"
"""The attribute of a module that replaces its call, hooks included, if it is set."""


def ordinary_call(module: nn.Module) -> Callable:
    """Return the normal call of a module: its hooks and its forward."""
    return module._call_impl


def is_in_own_forward(module: nn.Module) -> bool:
    """Return whether another call of ``module`` encloses the running one; for hooks of the running call."""
    frame, num_calls = sys._getframe(1), 0
    while frame is not None and num_calls < 2:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        num_calls += is_call and frame.f_locals.get("self") is module
        frame = frame.f_back
    return num_calls > 1


def is_full_cache(error: Exception) -> bool:
    """Return whether a compiler refused because it has recompiled a function too often."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def compiled_parts(module: nn.Module) -> list[str]:
    """Return the names of a module and of its parts that have been given to ``torch.compile``."""
    dynamo = sys.modules.get("torch._dynamo")
    return [
        name
        for name, part in module.named_modules()
        if part._compiled_call_impl is not None or (dynamo is not None and isinstance(part, dynamo.OptimizedModule))
    ]


def is_compiler_error(error: Exception) -> bool:
    """Return whether an error is one of the compiler, raised before the compiled function runs."""
    return any(cls.__name__ == "TorchDynamoException" for cls in type(error).__mro__)


def function_mode_on_top() -> TorchFunctionMode | None:
    """Return the innermost active function mode."""
    return _get_current_function_mode()


def has_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` is active; a compiler refuses to run then."""
    return torch._C._len_torch_dispatch_stack() > 0


def saving_unseen() -> contextlib.AbstractContextManager:
    """Return a context in which hooks for saved tensors that are active see nothing of what autograd saves.

    Hooks that return what they get make cycles of references, which keep memory: without active ones there are none.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def is_traced() -> bool:
    """Return whether values may stand for others: a function mode says so, as in a pipeline, or a transform runs."""
    modes = _get_current_function_mode_stack()
    return any(getattr(mode, "_vescale_traces", False) for mode in modes) or (
        torch._C._functorch.peek_interpreter_stack() is not None
    )
