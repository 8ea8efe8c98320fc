"""The modes of a parallelized module and of its parts, and the state that its hooks share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.utils.hooks import RemovableHandle

from vescale.dtensor.extension import exact_num_blocks, one_of

from .._boundary.convert import bring, in_one_call, to_plain
from .._boundary.hooks import Phase
from .._boundary.rows_axis import is_over_rows
from .._boundary.values import map_tensors
from .._gradients.sync import GradientSync
from .._static import StaticProgram
from .._static.call import State
from .._static.local_modules import local_forward
from .._static.model import Rows
from .._static.recording.observe import BoundaryRecord
from .eager import EagerScope, hook_scope
from .module_hooks import hook_calls
from .rank_checks import RankChecks

__all__ = ["Execution", "Mode", "execution_of"]

Mode = Annotated[str, one_of("eager", "static", "compile")]


class Execution:
    """The state that the hooks of one parallelized module share.

    A deep copy of the module has its own execution with the same modes. It installs its hooks at its first call.

    Attributes:
        mesh: the mesh of the plan.
        phase: the current conversion of all boundaries.
        scope: the running modules in eager mode.
        sync: reduces partial gradients.
        checks: compare what the ranks of the mesh call the module with.
        local_attributes: module name -> attribute -> its value on local tensors.
        modes: mode by module name; the nearest owner with an entry decides. The root always has one.
        units: names of the modules that a pipeline runs as wholes, as they were when the hooks were installed; empty
            without a pipeline of several stages. Each is a program of its own where the module is not in eager mode.
        is_rehearsed: whether calls run in eager mode, whatever the modes are (see `_rows.rehearsal`).
        any_rank: a collective that returns whether a flag is set on any rank that must make the same calls. None means
            the ranks of the mesh, which get equal arguments. Data parallelism that communicates in forward sets it
            (ZeRO 3 of ``vescale.optim``), because a recording makes additional calls.
        rows: the call in progress on the rows of all data-parallel ranks; None in other calls (see `_rows`).
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        allow_implicit: bool,
        eager: tuple[str, ...] = (),
        local_attributes: Mapping[str, Mapping[str, object]] | None = None,
        mode: str = "eager",
    ):
        self.mesh, self.phase, self.sync, self.checks = mesh, Phase(), GradientSync(), RankChecks(mesh)
        self.scope = EagerScope(allow_implicit, self.sync)
        self.local_attributes = dict(local_attributes or {})
        self.modes: dict[str, str] = {"": mode} | dict.fromkeys(eager, "eager")
        self.any_rank: Callable[[bool], bool] | None = None
        self.rows: Rows | None = None
        self.units: tuple[str, ...] = ()
        self.is_rehearsed = False
        self.root: nn.Module | None = None
        self.program: StaticProgram | None = None
        self.parts: list[StaticProgram] = []
        self.handles: list[RemovableHandle] = []

    def __deepcopy__(self, memo: dict) -> Execution:
        new = Execution(self.mesh, allow_implicit=self.scope.allow_implicit, local_attributes=self.local_attributes)
        new.modes = dict(self.modes)
        memo[id(self)] = new
        new.phase = copy.deepcopy(self.phase, memo)  # hooks of the root may have been copied before
        return new

    def attach(self, root: nn.Module) -> None:
        """Hook the root. Called once; copies keep these two hooks."""
        vars(root)[ATTRIBUTE] = self
        vars(root)[FOLLOW] = self.follow
        root.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        root.register_forward_hook(self.leave, always_call=True)
        self.install(root)

    # --------------------------------------------------------------------------------------------- modes

    def set_mode(self, mode: str, names: Iterable[str]) -> None:
        """Change the mode of the root, ``""``, or of parts."""
        self.modes |= dict.fromkeys(names, mode)
        self.install(self.root)

    def install(self, root: nn.Module) -> None:
        """Install the hooks of the current modes."""
        self._remove()
        self.root, self.units = root, units_of(root)
        modules = dict(root.named_modules())
        eager = frozenset(name for name in self.modes if name and self.modes[name] == "eager" and name in modules)
        if self.modes[""] != "eager" and not self.units and _can_be_local(root):
            compiled = self.modes[""] == "compile"
            self.program = StaticProgram(self, "", root, eager, is_root=True, compiled=compiled)
            self.program.install()
            return
        self.handles += hook_scope(root, "", self.scope)
        for name in self._static_parts(modules):
            compiled = self._mode_of(name) == "compile"
            part = StaticProgram(self, name, modules[name], eager, is_root=False, compiled=compiled)
            part.install()
            self.handles += hook_calls(modules[name], part.enter, part.leave)
            self.parts.append(part)

    def _static_parts(self, modules: Mapping[str, nn.Module]) -> Iterator[str]:
        """Yield the names of the outermost static parts of an eager root."""
        candidates = dict.fromkeys([*self.units, *filter(None, self.modes)])
        static = [name for name in candidates if name in modules and self._mode_of(name) != "eager"]
        static = [name for name in static if _can_be_local(modules[name])]
        for name in static:
            if not any(name.startswith(f"{other}.") for other in static):
                yield name

    def _mode_of(self, name: str) -> str:
        """Return the mode of a module: its own, or that of the nearest module around it that has one."""
        while name not in self.modes:
            name = name.rpartition(".")[0]
        return self.modes[name]

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for program in (*self.parts, *([self.program] if self.program else [])):
            program.remove()
        self.handles, self.parts, self.program = [], [], None

    def boundary_record(self, where: str, local_shape: tuple[int, ...]) -> BoundaryRecord | None:
        """Return the boundary record of a local tensor in static mode, or None."""
        programs = (*self.parts, *([self.program] if self.program else []))
        found = (program.call.layouts.records.known.get((where, local_shape), ()) for program in programs)
        return next((records[0] for records in found if len(records) == 1), None)

    # --------------------------------------------------------------------------------------------- calls

    def follow(self, root: nn.Module) -> bool:
        """Install the hooks anew for a copy, or for the units of a pipeline, and return whether that was due."""
        is_due = self.root is not root or self.units is not units_of(root)
        if is_due:
            self.install(root)
        return is_due

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Begin a call of the root."""
        if self.follow(module) and self.program is None:
            self.scope.enter(module, "")  # a hook that is registered during a call misses it
        if self.program is not None:
            entered = self.program.enter(module, args, kwargs)
            if exact_num_blocks() is None or self.program.call.state is not State.EAGER_ONCE:
                return entered
        else:
            self.checks.enter(module, args, kwargs)
        return None if self.rows is None else self.rows.distribute(args, kwargs)

    def leave(self, module: nn.Module, args: tuple, output: object) -> object:
        """End a call of the root: replicated results become plain tensors, partial results are reduced first."""
        if self.program is not None:
            left = self.program.leave(module, args, output)
            if left is not None and self.program.call.state is not State.RECORDING:
                return left  # the program has converted replicated results
            output = output if left is None else left
        else:
            self.checks.leave(output)
            if self.rows is not None and self.rows.keeps_results:
                return None
        return None if output is None else map_tensors(self._to_plain, output)

    def _to_plain(self, tensor: Tensor) -> Tensor:
        if exact_num_blocks() is None:
            return self._plain_result(tensor)
        return in_one_call(self._plain_result, tensor)  # also where it stands for one on the rows of all ranks

    def _plain_result(self, tensor: Tensor) -> Tensor:
        if not is_over_rows(tensor, self.mesh):
            return to_plain(tensor)
        settled = [Replicate() if p.is_partial() else p for p in tensor.placements[1:]]
        tensor = bring(tensor, tuple(settled), self.mesh, is_result=True)
        is_recorded = self.program is not None and exact_num_blocks() is None
        return tensor if self.rows is None or is_recorded else to_plain(self.rows.part_of(tensor))


def _can_be_local(module: nn.Module) -> bool:
    """Return whether the root of a program may be this module: the patch cannot change a forward that is running."""
    return local_forward(module) is None


ATTRIBUTE = "_vescale_execution"
UNITS = "_vescale_units"
FOLLOW = "_vescale_follow_units"


def units_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that a pipeline runs as wholes (``docs/protocols.md``)."""
    return vars(module).get(UNITS, ())


def execution_of(module: nn.Module) -> Execution | None:
    """Return the execution of a parallelized module; None on a mesh of one rank.

    Raises:
        ValueError: the module is not parallelized, or only a part of a parallelized one.
    """
    if ATTRIBUTE not in vars(module):
        raise ValueError(
            f"expected a parallelized module, got a {type(module).__name__} that is none; call parallelize_module "
            "first, and pass the module that it returned"
        )
    return vars(module)[ATTRIBUTE]
