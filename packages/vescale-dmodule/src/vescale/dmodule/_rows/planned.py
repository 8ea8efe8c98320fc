"""A module with a plan, on this rank's rows, with the results that one device has on the rows of all ranks.

The axis of data-parallel ranks becomes one more mesh axis, ahead of those of the plan. What a rank has of a tensor of
rows is Shard(0) on it; parameters, which are DTensors on the mesh of the plan, are replicated on it::

    eager      arguments -> DTensors on the wider mesh -> the module's own code -> this rank's part of the results
    static     recorded like that; later calls run on local tensors as ever, with recorded operators on the wider mesh
    compile    as static

So boundaries move values over the axes of the plan alone, and operators that mix rows communicate over the axis of
rows. ``_boundary.rows_axis`` has the gradients.

Experts, local regions, and modules that are named ``row_wise``, run on this rank's rows in all modes.

Inside of ``vescale.dtensor.exact`` nothing is recorded: every call runs like those of eager mode, all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import debug
from vescale.dtensor.extension import exact_num_blocks, generator_fact, in_batch_window, random_position

from .. import _torch
from .._boundary.convert import as_dtensor, is_plain, to_plain
from .._boundary.local_region import LocalRegion
from .._boundary.rows_axis import OverRows, is_over_rows, lift, lower
from .._boundary.values import copied, map_leaves, map_tensors
from .._execution.modes import execution_of
from .._experts import experts_region, listed_gradients
from .._static.operator_mode import inactive
from .._static.parts import describe, join
from .._static.recording.calls import CallRecorder
from .._static.recording.dry_run import without_side_effects
from .._static.recording.names import Names
from ..errors import ImplicitRedistributionError, NotLocalFriendlyError, PlanError
from .calls import JointCalls
from .functions import OwnFunctions
from .joint import JointRecorder, no_draws_outside_torch
from .values import WAY_OUT, has_rows, num_rows

__all__ = ["OnAxis", "PlannedRows", "RowWisePart", "placement_of_rows"]


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call.

    Attributes:
        rows: number of this rank's rows.
        mixes_rows: whether operators communicate over the axis of rows.
    """

    rows: int | None
    mixes_rows: bool


class PlannedRows(JointCalls[RecordedCall]):
    """Run a parallelized module on this rank's rows as one device runs it on the rows of all ranks; see `JointCalls`.

    Args:
        module: the module that `parallelize_module` returned.
        rows: 1-D, the data-parallel ranks in the order of their rows.
        meet: bound method, called with a text before a recording, in which all ranks must take part; held weakly.
        row_wise: names of modules that run on this rank's rows as they are.

    Attributes:
        mesh: the axis of rows, ahead of the axes of the plan.
        row_wise: names of all modules that run on this rank's rows.
        keeps_results: whether the module returns DTensors on this mesh.
    """

    keeps_results = runs_on_rows = False

    def __init__(
        self,
        module: nn.Module,
        rows: DeviceMesh | None,
        *,
        meet: Callable[[str], None] | None,
        row_wise: Iterable[str] = (),
    ):
        self.execution = None if rows is None else execution_of(module)
        super().__init__(module, None if rows is None else _wider(rows, self.execution.mesh), meet=meet)
        self.row_wise = frozenset((*row_wise, *_local_parts(module)))
        self._is_open = self._has_run = False
        self._rows: int | None = None  # of this rank
        if rows is not None:
            self.recorder = PlannedRecorder(self)

    def attach(self) -> None:
        """Hook the module, outside of all hooks that it has."""
        super().attach()
        self.execution.scope.rows = self.mesh
        for name in self.row_wise:
            RowWisePart(self, name).register(self.module.get_submodule(name))

    @property
    def covers_rows(self) -> bool:
        """Whether what runs now has the results of all rows: draws, statistics."""
        is_recomputation = self._has_run and _torch.in_backward() and not in_batch_window()
        return self._is_open or self.recorder.is_running or is_recomputation

    def islands(self) -> dict[str, str]:
        """Return the operators that run on the rows of all ranks in static mode, and what each communicates."""
        program = self.execution.program
        return {} if program is None else dict(program.call.costs)

    def _mixes_rows(self, recorded: RecordedCall | None) -> bool:
        return recorded is not None and recorded.mixes_rows

    def _open(self, recorded: RecordedCall | None) -> None:
        if recorded is not None:
            self._is_open = self._has_run = True
            self._rows, self.execution.rows = recorded.rows, self

    def _open_exactly(self, args: tuple, kwargs: dict) -> None:
        self._open(RecordedCall(num_rows(args, kwargs), mixes_rows=True))

    def _close(self, result: object) -> object:
        was_open, self._is_open, self.execution.rows = self._is_open, False, None
        program = self.execution.program
        if not was_open or result is None or program is None or exact_num_blocks() is not None:
            return None
        returned = iter(program.recordings.returned[program.call.signature])
        return map_leaves(lambda tensor, _where: self._reduced(tensor, next(returned, None)), result, "")

    def _begin(self, args: tuple, kwargs: dict) -> None:
        if exact_num_blocks() is not None or not in_batch_window():
            super()._begin(args, kwargs)
        elif any(map(self._mixes_rows, self.recorded.values())):
            raise RuntimeError(
                f"expected no random.micro_batches around {type(self.module).__name__}, which mixes rows: those of a "
                "micro-batch are not those of the batch; accumulate gradients with DDP.no_sync()"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Run calls of the module on the rows of all ranks while the context is open."""
        self.execution.rows = self
        try:
            yield
        finally:
            self.execution.rows = None

    # ----------------------------------------------------------------------------------------- edges of a call

    def distribute(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of the model with DTensors in place of tensors of rows."""
        if self._depth > 1:
            return args, kwargs  # the module calls itself
        rows, plan = num_rows(args, kwargs), self.execution.mesh
        self._rows = rows

        def convert(tensor: Tensor, _where: str) -> Tensor:
            if not has_rows(tensor, rows) or is_over_rows(tensor, plan):
                return tensor
            return lift(as_dtensor(tensor, plan) if is_plain(tensor) else tensor, self.mesh, Shard(0))

        return map_leaves(convert, (args, kwargs), "")

    def part_of(self, tensor: DTensor) -> DTensor:
        """Return what this rank returns of a result on the rows of all ranks, on the mesh of the plan."""
        own, size = tensor.placements[0], self.mesh.size(0)
        is_loss = not tensor.ndim and tensor.requires_grad
        if is_loss and own.is_partial("sum"):
            return lower(tensor, self.execution.mesh) * size  # whose mean over ranks is the sum, without communication
        if not own.is_shard() and not (is_loss and own.is_partial("avg")):
            has_all_rows = tensor.ndim and self._rows and tensor.shape[0] == self._rows * size
            tensor = tensor.redistribute(placements=(Shard(0) if has_all_rows else Replicate(), *tensor.placements[1:]))
        return lower(tensor, self.execution.mesh)

    def _reduced(self, tensor: Tensor, returned: OverRows | None) -> Tensor:
        """Return a result of static mode with the sum over ranks in place of a summand."""
        own = None if returned is None else returned.placement
        if own is None or own.is_shard() or tensor.shape[:1] == (self._rows,):
            return tensor
        if not tensor.ndim and (own.is_replicate() or (own.is_partial("avg") and tensor.requires_grad)):
            return tensor
        summand = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, self.execution.mesh)
        part = self.part_of(lift(summand, self.mesh, returned.placement, shape=returned.shape))
        return part if isinstance(tensor, DTensor) else to_plain(part)

    @contextlib.contextmanager
    def log(self) -> Iterator[Sized]:
        """Log the collectives over the axis of rows while the context is open."""
        with debug.comm_log(mesh=self.mesh) as log:
            yield OnAxis(log, self.mesh.mesh_dim_names[0])


class PlannedRecorder(JointRecorder[RecordedCall]):
    """Records calls of a parallelized module. All ranks record the same calls together."""

    own_errors = (ImplicitRedistributionError, NotLocalFriendlyError, PlanError)

    def __init__(self, rows: PlannedRows):
        super().__init__(rows.module, rows.mesh)
        self._rows, self.execution = rows, rows.execution
        self._fails_alone = False

    def _end(self) -> None:
        super()._end()
        self.execution.scope.attaches = True

    def _find(self, args: tuple, kwargs: dict) -> RecordedCall:
        program = self.execution.program
        self.execution.scope.attaches = False  # a dry run restores the hooks of parameters
        with torch.enable_grad(), no_draws_outside_torch():
            self._fails_alone = True
            if program is None:
                self.execution.checks.enter(self.module, args, kwargs)
                self.execution.checks.leave(None)
            else:
                program.prepare(args, kwargs)  # on this rank's rows: what the plan does not allow is refused as ever
            self._fails_alone = False
            with self._rows.opened(), OwnFunctions(self.mesh).on_dtensors():
                return self._run_eagerly(args, kwargs) if program is None else self._record(args, kwargs)

    def _record(self, args: tuple, kwargs: dict) -> RecordedCall:
        program = self.execution.program
        try:
            program.prepare(args, kwargs)
        except NotLocalFriendlyError as error:
            raise NotLocalFriendlyError(f"on the rows of all ranks: {error}; or, {WAY_OUT}") from error
        layouts = program.recordings.by_signature[program.call.signature]
        mixes_rows = any(operators.has_islands for operators in layouts.operators.values())
        return RecordedCall(num_rows(args, kwargs), mixes_rows)

    def _run_eagerly(self, args: tuple, kwargs: dict) -> RecordedCall:
        names, generator = Names(), generator_fact(self.mesh.device_type)
        recorder = CallRecorder(names, self.mesh, {}, keeps=False, over_rows=True)
        with without_side_effects(self.module), names.watching(dict(self.module.named_modules())):
            before = random_position(self.mesh.device_type)
            with self._rows.log() as log, recorder.recording():
                self.module(*copied(args), **copied(kwargs))
            moved = random_position(self.mesh.device_type) != before
        self._compare([recorder.fact(), *([generator] if moved else [])])
        return RecordedCall(num_rows(args, kwargs), len(log) > 0)

    def _works_alone(self, args: tuple, kwargs: dict) -> bool:
        if self._fails_alone or self.execution.program is not None:
            return not self._fails_alone
        try:
            with without_side_effects(self.module):
                self.module(*copied(args), **copied(kwargs))
        except Exception:
            return False
        return True


class RowWisePart:
    """Hooks that run a part of the module on this rank's rows: its code sees DTensors on the mesh of the plan.

    Args:
        rows: of the module.
        name: of the part.
    """

    def __init__(self, rows: PlannedRows, name: str):
        self.rows, self.name = rows, name
        self._running: list[tuple[list[DTensor], contextlib.AbstractContextManager]] = []

    def __deepcopy__(self, memo: dict) -> RowWisePart:
        return RowWisePart(PlannedRows(nn.Module(), None, meet=None), self.name)  # of a copy, which runs as it is

    def register(self, part: nn.Module) -> list[RemovableHandle]:
        """Hook the part, outside of its boundaries."""
        return [
            part.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            part.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, _part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Bring the arguments to the mesh of the plan."""
        execution = self.rows.execution
        if execution is None or exact_num_blocks() is not None:  # then it runs on the rows of all ranks
            return None
        program = execution.program
        is_local = program is not None and program.call.is_open and program.call.mesh.ndim > execution.mesh.ndim
        context = inactive() if is_local else contextlib.nullcontext()
        context.__enter__()
        wide: list[DTensor] = []
        self._running.append((wide, context))

        def convert(tensor: Tensor) -> Tensor:
            if not is_over_rows(tensor, execution.mesh):
                return tensor
            if tensor.placements[0].is_partial():
                tensor = tensor.redistribute(placements=(Replicate(), *tensor.placements[1:]))
            wide.append(tensor)
            return lower(tensor, execution.mesh)

        return map_tensors(convert, (args, kwargs))

    def leave(self, part: nn.Module, _args: tuple, output: object) -> object:
        """Bring the results to the mesh of the rows of all ranks."""
        if not self._running:
            return None
        wide, context = self._running.pop()
        context.__exit__(None, None, None)
        if output is None or not wide:
            return None
        plan, mesh = self.rows.execution.mesh, wide[0].device_mesh

        def convert(tensor: Tensor) -> Tensor:
            tensor = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, plan)
            return lift(tensor, mesh, placement_of_rows(self.name, part, tensor, wide))

        return map_tensors(convert, output)


def placement_of_rows(name: str, part: nn.Module, result: Tensor, arguments: Sequence[DTensor]) -> Shard | Replicate:
    """Return the placement, on the axis of rows, of a result of a part that ran on this rank's rows.

    Args:
        name: of the part.
        part: the module.
        result: on this rank's rows.
        arguments: those that were DTensors over the axis of rows.

    Raises:
        RuntimeError: no dim of the result has the rows of the arguments.
    """
    sharded = [tensor for tensor in arguments if tensor.placements[0].is_shard()]
    if not sharded:
        return Replicate()
    sizes = {t.placements[0].dim: t.shape[t.placements[0].dim] for t in reversed(sharded)}
    for dim, size in sizes.items():
        if dim < result.ndim and result.shape[dim] * sharded[0].device_mesh.size(0) == size:
            return Shard(dim)
    raise RuntimeError(
        f"{describe(name)} ({type(part).__name__}) runs on the rows of each rank alone: expected results with the rows "
        f"of its arguments, (dim, global size) in {sorted(sizes.items())}, got one of shape {tuple(result.shape)}; "
        f"return statistics of rows from a module of its own, or, {WAY_OUT}"
    )


class OnAxis:
    """The number of collectives in a log that one axis has."""

    def __init__(self, log: debug.CommLog, axis: str):
        self._log, self._axis = log, axis
        self._seen = self._count = 0

    def __len__(self) -> int:
        new = [self._log[i] for i in range(self._seen, len(self._log))]
        self._seen += len(new)
        self._count += sum(record.axis == self._axis for record in new)
        return self._count


def _wider(rows: DeviceMesh, plan: DeviceMesh) -> DeviceMesh:
    """Return the mesh with an axis of rows ahead of those of a plan. Collective over the ranks of ``rows``."""
    groups = [rows.get_group(), *(plan.get_group(axis) for axis in range(plan.ndim))]
    mine = plan.mesh.to(plan.device_type)
    if dist.get_backend(groups[0]) == "fake":
        ranks = torch.stack([mine + rank - dist.get_rank() for rank in rows.mesh.tolist()])
    else:
        found = [torch.empty_like(mine) for _ in range(rows.size())]
        dist.all_gather(found, mine.contiguous(), group=groups[0])
        ranks = torch.stack(found)
    names = (rows.mesh_dim_names or ("dp",))[0], *plan.mesh_dim_names
    names = names if len(set(names)) == len(names) else ("rows", *names[1:])
    return DeviceMesh.from_group(groups, plan.device_type, mesh=ranks.cpu(), mesh_dim_names=names)


def _local_parts(module: nn.Module) -> Iterator[str]:
    """Yield the names of experts and local regions, whose code sees local tensors in every mode."""
    for name, part in module.named_modules():
        hooks = (hook for table in _torch.module_hook_tables(part) for hook in table.values())
        if experts_region(part) or any(isinstance(getattr(hook, "__self__", None), LocalRegion) for hook in hooks):
            yield name
        if listed_gradients(part):
            yield from (join(name, inner) for inner, _ in part.named_children())
