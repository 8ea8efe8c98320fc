"""Waits for collectives on the CPU with errors that name lost ranks, wherever DTensors communicate.

DTensors communicate by torch's functional operators, in eager mode, in backward and in compiled code alike. A work that
they launch cannot be seen from Python, so they launch it on another group with the same ranks::

    all_reduce(x, "sum", "0")     kernel of CPU tensors: the same operator on the group "0/listening 3"
      torch's own kernel          allocates, launches on that group, keeps the work
        ListeningGroup            launches on the group "0" and returns its work, with another wait
    wait_tensor(y)                torch's own kernel waits for that work: `Failures.wait`

Tensors, values and collectives are torch's own. Groups of one rank, of other backends than gloo and on accelerators run
torch's kernels alone. Other collectives of ours are launched with a `Work` at hand and awaited by `Waits`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _api, _collective_utils, placement_types

from .._lost_ranks import Failures, first_line
from .._waiting import METERS, waiting
from .patches import AttributePatch, PatchGroup

__all__ = [
    "FunctionalCollectivesPatch",
    "Waits",
    "distribution_patch",
    "name_axes",
    "name_group",
    "waits_of",
    "waits_over",
]

_CPU = torch.device("cpu")

_NAMES: dict[str, str] = {}  # what errors call a process group, by its name

_WAITS: weakref.WeakKeyDictionary[dist.ProcessGroup, Waits] = weakref.WeakKeyDictionary()

_latest: Callable[[], DeviceMesh | None] = lambda: None  # noqa: E731  (a weak reference)


# ------------------------------------------------------------------------------------------------- names in errors


def name_group(group: dist.ProcessGroup, mesh: DeviceMesh, axes: Sequence[int]) -> None:
    """Let errors call a process group by the axes of a mesh."""
    names = mesh.mesh_dim_names or [f"mesh axis {axis}" for axis in range(mesh.ndim)]
    _NAMES[group.group_name] = f"axis {', '.join(repr(names[axis]) for axis in axes)}"


def name_axes(mesh: DeviceMesh) -> None:
    """Let errors call the process groups of a mesh by its axes, until they are used by another mesh."""
    global _latest
    if _latest() is mesh or type(mesh) is not DeviceMesh:
        return
    _latest = weakref.ref(mesh)
    for axis in range(mesh.ndim if mesh.get_coordinate() is not None else 0):
        with contextlib.suppress(RuntimeError):  # a mesh without process groups
            name_group(mesh.get_group(axis), mesh, (axis,))


# ------------------------------------------------------------------------------------------------- waits


class _Caller(threading.Thread):
    """A thread that calls functions one after the other: one goes into ``functions``, its error or None to ``ends``."""

    def __init__(self) -> None:
        super().__init__(name="vescale waits for objects", daemon=True)
        self.functions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            try:
                self.functions.get()()
                self.ends.put(None)
            except Exception as error:
                self.ends.put(error)


class Waits:
    """Waits for collectives of one process group; an error names the collective and the ranks that are gone.

    Attributes:
        failures: those that the ranks of the group have seen.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._name = weakref.ref(group), group.group_name  # destroying a group must free it
        ranks = dist.get_process_group_ranks(group)
        self._ranks = f"ranks {', '.join(map(str, ranks))}"
        self.failures = Failures(ranks, dist.get_rank(), distributed_c10d._get_default_store())
        self._caller: _Caller | None = None

    @property
    def where(self) -> str:
        """What errors call the group: the mesh axis whose group it is, or its ranks."""
        return _NAMES.get(self._name, self._ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group() or _c10d._resolve_process_group(self._name)

    def wait(self, work: Any, kind: str, out: Tensor) -> None:
        """Wait for a collective whose result is ``out``: on the CPU the process, else the current stream.

        Raises:
            RuntimeError: the collective failed, here or on another rank; the text names the lost ranks.
        """
        if work is None:  # some backends complete before they return
            return
        if not METERS:
            self._wait(work, kind, out)
            return
        with waiting(out.device.type):
            self._wait(work, kind, out)

    def _wait(self, work: Any, kind: str, out: Tensor) -> None:
        try:
            if work.is_completed() or not out.is_cpu:
                work.wait()
                return
        except RuntimeError:
            if not out.is_cpu:
                raise
        self.failures.wait(work, f"the {kind} over {self.where}")  # a failed work raises again

    def launch(self, kind: str, collective: Callable, *args: Any, **options: Any) -> Any:
        """Return the work of ``collective(*args)``.

        Raises:
            RuntimeError: an earlier failure has closed the connections; the text names the lost ranks.
        """
        try:
            return collective(*args, **options)
        except dist.DistError as error:  # an error of the backend; wrong arguments raise other errors
            raise RuntimeError(self.failures.describe(f"the {kind} over {self.where}", first_line(error))) from error

    def run(self, kind: str, collective: Callable, out: Tensor, *args: Any, **options: Any) -> None:
        """Run a function of ``torch.distributed`` that writes to ``out``, and wait for it.

        Raises:
            RuntimeError: as `wait`.
        """
        options = {"group": self.group, "async_op": True, **options}
        self.wait(self.launch(kind, collective, out, *args, **options), kind, out)

    def reduce_scatter(self, out: Tensor, parts: Tensor, op: dist.ReduceOp) -> None:
        """Give ``out`` this rank's part of the reduced ``parts``, which are those of all ranks along the first dim.

        On the CPU ``parts`` is overwritten: gloo's own reduce-scatter is such an all-reduce of a copy, too, but a wait
        for it has no limit.

        Raises:
            RuntimeError: as `wait`.
        """
        if not out.is_cpu:
            self.run("reduce-scatter", _reduce_scatter, out, parts, op=op)
            return
        work = self.launch("reduce-scatter", dist.all_reduce, parts, op, group=self.group, async_op=True)
        self.wait(work, "reduce-scatter", parts)
        _take_part(out, parts, self.group)

    def call(self, kind: str, function: Callable[[], object]) -> None:
        """Run a function that makes collectives of objects and waits for them.

        gloo closes a connection over which a wait with a limit has ended, and these waits have none. So a thread calls
        it, and this one listens for failures of other ranks.

        Raises:
            RuntimeError: as `wait`.
        """
        if not _is_gloo(self.group):
            function()
            return
        what = f"the {kind} over {self.where}"
        caller, self._caller = self._caller or _Caller(), None  # one whose call never ends is not used again
        caller.functions.put(function)
        while True:
            try:
                error = caller.ends.get(timeout=self.failures.POLL.total_seconds())
                break
            except queue.Empty:
                if self.failures.seen():
                    raise RuntimeError(self.failures.describe(what, "")) from None
        self._caller = caller
        if isinstance(error, RuntimeError):
            raise RuntimeError(self.failures.describe(what, first_line(error))) from error
        if error is not None:
            raise error


# renamed in torch 2.13, which warns of the old name
_reduce_scatter: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def waits_of(group: dist.ProcessGroup) -> Waits:
    """Return the waits for collectives of a process group."""
    if group not in _WAITS:
        _WAITS[group] = Waits(group)
    return _WAITS[group]


def waits_over(over: dist.ProcessGroup | DeviceMesh) -> list[Waits]:
    """Return the waits for collectives of a process group, or of each axis of a mesh, of more ranks than this one.

    A group of the backend "fake" carries no data and is left out.
    """
    if isinstance(over, DeviceMesh):
        name_axes(over)
    groups = [over.get_group(axis) for axis in range(over.ndim)] if isinstance(over, DeviceMesh) else [over]
    return [waits_of(group) for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo carries out the collectives of CPU tensors."""
    try:
        return isinstance(group._get_backend(_CPU), dist.ProcessGroupGloo)
    except RuntimeError:  # it has none for the CPU
        return False


def _take_part(out: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
    out.copy_(parts.narrow(0, group.rank() * len(out), len(out)))


# ------------------------------------------------------------------------------------------------- functional operators


class ListeningWork(dist.Work):
    """A work whose wait names lost ranks.

    Args:
        work: launched by the group's backend.
        kind: of the collective.
        waits: of the group.
        out: what the collective writes to.
        at_end: called when it has succeeded.
    """

    def __init__(self, work: Any, kind: str, waits: Waits, out: Tensor, at_end: Callable[[], None] | None = None):
        super().__init__()
        self._work, self._kind, self._waits, self._out, self._at_end = work, kind, waits, out, at_end

    def wait(self, *_: timedelta) -> bool:
        """Wait until the collective has ended.

        Raises:
            RuntimeError: it failed, here or on another rank; the text names the lost ranks.
        """
        self._waits.wait(self._work, self._kind, self._out)
        if self._at_end is not None:
            self._at_end()
        return True


class ListeningGroup(dist.ProcessGroup):
    """A process group for functional operators, which launches its collectives on another one.

    Its methods are named as the operators of any supported version of torch call them.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group.rank(), group.size())
        self.waits = waits_of(group)

    def getBackendName(self) -> str:  # noqa: N802
        return "listening"

    def allreduce(self, tensors: list[Tensor], options: object) -> dist.Work:
        return self._start("all-reduce", "allreduce", tensors[0], tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], options: object) -> dist.Work:
        return self._start("all-reduce", "allreduce_coalesced", tensors[0], tensors, options)

    def broadcast(self, tensors: list[Tensor], options: object) -> dist.Work:
        return self._start("broadcast", "broadcast", tensors[0], tensors, options)

    def allgather_into_tensor_coalesced(self, outs: list[Tensor], parts: list[Tensor], options: object) -> dist.Work:
        return self._start("all-gather", "allgather_into_tensor_coalesced", outs[0], outs, parts, options)

    def alltoall_base(self, out: Tensor, parts: Tensor, *splits_and_options: object) -> dist.Work:
        return self._start("all-to-all", "alltoall_base", out, out, parts, *splits_and_options)

    def reduce_scatter_tensor_coalesced(self, outs: list[Tensor], parts: list[Tensor], options: Any) -> dist.Work:
        """Start all-reduces of copies, as gloo does, whose waits have a limit."""
        sums = [each.clone(memory_format=torch.contiguous_format) for each in parts]
        to_sum = dist.AllreduceOptions()
        to_sum.reduceOp = options.reduceOp
        works = [self._start("reduce-scatter", "allreduce", each, [each], to_sum) for each in sums]

        def end() -> None:
            for work in works[:-1]:
                work.wait()
            for out, each in zip(outs, sums, strict=True):
                _take_part(out, each, self.waits.group)

        works[-1]._at_end = end
        return works[-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _start(self, kind: str, method: str, out: Tensor, *args: object) -> ListeningWork:
        work = self.waits.launch(kind, getattr(self.waits.group, method), *args)
        return ListeningWork(work, kind, self.waits, out)


_numbers = itertools.count()

# By the name of a group: the group, the name of the group to launch on, and that one, which torch does not keep alive.
_listening: dict[str, tuple[weakref.ref[dist.ProcessGroup], str, ListeningGroup | None]] = {}


def _listening_name(name: str) -> str:
    """Return the name of the group on which functional operators launch collectives of the group ``name``."""
    group = _c10d._resolve_process_group(name)
    found = _listening.get(name)
    if found is None or found[0]() is not group:
        found = _listening[name] = (weakref.ref(group), *_listener(group, name))
    return found[1]


def _listener(group: dist.ProcessGroup, name: str) -> tuple[str, ListeningGroup | None]:
    if group.size() == 1 or not _is_gloo(group):
        return name, None
    listener, new = ListeningGroup(group), f"{name}/listening {next(_numbers)}"
    _c10d._register_process_group(new, listener)
    return new, listener


class FunctionalCollectivesPatch:
    """Let functional operators on CPU tensors launch their collectives on a `ListeningGroup`."""

    place = "torch.ops._c10d_functional: the kernels of CPU tensors, of which torch has none"

    def __init__(self) -> None:
        self.library: torch.library.Library | None = None

    def install(self) -> None:
        """Register the kernels."""
        if self.library is not None:
            return
        self.library = torch.library.Library("_c10d_functional", "IMPL")
        for name, position in _launching_operators().items():
            stock = torch.library.get_kernel(f"_c10d_functional::{name}", "CPU")
            self.library.impl(name, _launcher(stock, position), "CPU", with_keyset=True)

    def remove(self) -> None:
        """Remove the kernels."""
        if self.library is not None:
            self.library._destroy()
            self.library = None

    def is_installed(self) -> bool:
        """Return whether the kernels are registered."""
        names = (f"_c10d_functional::{name}" for name in _launching_operators())
        return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in names)


def _launcher(stock: Any, position: int) -> Callable:
    """Return the kernel that is ``stock``, with another group in place of the argument at ``position``."""

    def launch(keys: Any, *args: Any, **options: Any) -> Any:
        name = args[position]
        if isinstance(name, str):
            args = (*args[:position], _listening_name(name), *args[position + 1 :])
        return stock.call_boxed(keys, *args, **options)

    return launch


@functools.cache
def _launching_operators() -> dict[str, int]:
    """Return the functional collectives by name, with the position of the argument that is the group."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "_c10d_functional" and operator.startswith(("all_", "broadcast", "reduce_scatter")):
            arguments = getattr(torch.ops._c10d_functional, operator).default._schema.arguments
            found[operator] = [argument.name for argument in arguments].index("group_name")
    return found


# ------------------------------------------------------------------------------------------------- distribution


def distribution_patch() -> PatchGroup:
    """Return the patch of the functions by which torch distributes a tensor; they wait as `Waits` does."""
    owners = _collective_utils, placement_types
    patches = [
        AttributePatch(owners, "mesh_scatter", _waiting("scatter")),
        AttributePatch((*owners, _api), "mesh_broadcast", _waiting("broadcast")),
    ]
    return PatchGroup("torch.distributed.tensor._collective_utils: mesh_scatter and mesh_broadcast", patches)


def _waiting(kind: str) -> Callable[[Callable], Callable]:
    """Return a decorator of torch's ``mesh_broadcast`` or ``mesh_scatter``, which then waits as `Waits` does."""

    def decorate(stock: Callable) -> Callable:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def run(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options)
            given.apply_defaults()
            out, mesh, axis, wants_work = (given.arguments[name] for name in signature.parameters if name in _TAKEN)
            if wants_work or out.is_meta or not _is_gloo(group := mesh.get_group(axis)):
                return stock(*args, **options)
            name_axes(mesh)
            given.arguments["async_op"] = True
            waits = waits_of(group)
            waits.wait(waits.launch(kind, stock, *given.args, **given.kwargs), kind, out)
            return None

        return run

    return decorate


_TAKEN = ("output", "tensor", "mesh", "mesh_dim", "async_op")  # parameters of these functions, in order
