"""The recording of a call: dry runs that show which operators mix rows. ``program`` has the picture."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from vescale.dtensor import debug, extension
from vescale.dtensor.extension import bytes_text, generator_fact, random_position

from .. import _torch
from .._boundary.values import copied
from .._execution.eager import EagerScope, hook_scope
from .._gradients.sync import GradientSync
from .._static.operators import ModuleOperators
from .._static.parts import Parts, describe
from .._static.recording.calls import CallRecorder, Island, Place
from .._static.recording.compare import highest
from .._static.recording.dry_run import new_run, without_side_effects
from .._static.recording.names import Names
from .._static.recording.search import search
from .call import RecordedRows, RowsCall
from .functions import OwnFunctions
from .gradient_hooks import GradientHooks
from .joint import JointRecorder, RanksDifferError, no_draws_outside_torch
from .values import Output, all_rows, attributes_before, difference, left_in_attributes, outputs_of

__all__ = ["RowsRecorder"]

logger = logging.getLogger("vescale.dmodule")


class RowsRecorder(JointRecorder[RecordedRows]):
    """Records calls of a module whose tensors are plain.

    Args:
        module: the module.
        call: of the program; recorded calls are compared with it open.
        hook: called with the operators of parts that later calls run on DTensors, to hook these parts.
        row_wise: see `RowsProgram`.

    Attributes:
        keeps_draws: whether random operators in it are not this program's.
    """

    def __init__(
        self,
        module: nn.Module,
        call: RowsCall,
        hook: Callable[[Mapping[str, ModuleOperators]], None],
        row_wise: frozenset[str],
    ):
        super().__init__(module, call.mesh)
        self.call, self._hook, self._row_wise = call, hook, row_wise
        self.keeps_draws = self._has_gradients = False
        self._functions, self._draws = OwnFunctions(call.mesh), DrawnShapes(call.mesh)

    def record(self, args: tuple, kwargs: dict) -> RecordedRows | None:
        """Record a call, see `JointRecorder.record`; what ``torch.compile`` has compiled runs as it is written."""
        compiled = _torch.compiled_parts(self.module)
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            return super().record(args, kwargs)

    def _end(self) -> None:
        self.is_running = self.keeps_draws = self._has_gradients = self.call.checks = self.call.is_open = False

    def _works_alone(self, args: tuple, kwargs: dict) -> bool:
        self.call.checks = self.call.is_open = self.keeps_draws = False
        try:
            with torch.enable_grad():
                self._run(copied(args), copied(kwargs))
        except Exception:
            return False
        return True

    def _find(self, args: tuple, kwargs: dict) -> RecordedRows | None:
        parts, generator = self._parts(), generator_fact(self.mesh.device_type)
        recorder, outputs, moved = self._recorded_call(parts, args, kwargs)
        # none of these is compared in the search
        leaves = any(output.attribute is not None for output in outputs)
        must_be_tried = recorder.drawn or recorder.takes_gradients or self._functions or leaves
        self._compare([generator] if moved else [])
        mixes = recorder.has_quiet_islands or any(output.must_be_reduced for output in outputs)
        if not mixes and (not must_be_tried or self._runs_alone(recorder, outputs, args, kwargs, moved=moved)):
            return None
        found = RecordedRows(recorder.of_local_parts(parts, all_draws=True), tuple(outputs))
        if compiled := _torch.compiled_parts(self.module):
            raise RuntimeError(_mixes_in_compiled_code(found, compiled))
        self._check(found, parts, args, kwargs, moved=moved)
        self._tell_costs()
        return replace(found, outputs=tuple(output.without_value() for output in outputs))

    def _recorded_call(self, parts: Parts, args: tuple, kwargs: dict) -> tuple[CallRecorder, list[Output], bool]:
        """Record a call without gradients; with them if it fails, since a forward may take gradients itself."""
        found = error = None
        try:
            found = self._run_on_dtensors(parts, args, kwargs)
        except RanksDifferError:
            raise
        except Exception as raised:
            error = raised
        if not highest(float(found is None), self.mesh):
            return found
        self._has_gradients = True
        try:
            return self._run_on_dtensors(parts, args, kwargs)
        except Exception as again:
            raise error or again from again

    def _parts(self) -> Parts:
        """Return the parts of the module; what row-wise ones call inside depends on the rows, and is not watched."""
        parts = Parts.of(self.module, "", self._row_wise)
        modules = {n: part for n, part in parts.modules.items() if n in parts.eager or not parts.is_eager(n)}
        return replace(parts, modules=modules)

    def _tell_costs(self) -> None:
        texts = (f"{island} ({cost})" for island, cost in self.call.costs.items())
        logger.info("DDP runs on the rows of all ranks: %s", "; ".join(texts))
        gradients = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        if self.call.num_bytes > gradients:
            logger.warning(
                "DDP runs operators of %s on the rows of all ranks, which communicates %s per forward, more than its "
                "gradients (%s): DDP.islands() lists them; name modules that treat every row alone, such as experts, "
                "in DDP(..., row_wise=[...])",
                type(self.module).__name__,
                bytes_text(self.call.num_bytes),
                bytes_text(gradients),
            )

    def _run_on_dtensors(self, parts: Parts, args: tuple, kwargs: dict) -> tuple[CallRecorder, list[Output], bool]:
        """Record a call; again, if it has islands that were not known before.

        Returns:
            The recorder, the outputs, and whether the random stream moved.
        """
        islands: dict[Place, Island] = {}
        searches = True
        while True:
            names = Names()
            recorder = CallRecorder(names, self.mesh, islands, keeps=searches, of_rows=True)
            recorder.is_inner = lambda: self._functions.is_inside
            outputs, moved = self._recorded(recorder, names, parts, args, kwargs)
            self._compare([recorder.fact()])
            for name in filter(parts.is_eager, recorder.drawn):
                raise RuntimeError(f"{describe(name)} is named in row_wise, but draws random numbers; do not name it")
            found = {}
            if searches:
                found = search(new_run(self.mesh), recorder, parts, args, kwargs, local_means=True)
                recorder.kept.clear()  # all activations
            if found.keys() <= islands.keys():
                return recorder, outputs, moved
            searches = any(island.operands for island in found.values())  # which changes what follows it
            islands = {**islands, **found}

    def _recorded(
        self, recorder: CallRecorder, names: Names, parts: Parts, args: tuple, kwargs: dict
    ) -> tuple[list[Output], bool]:
        handles = hook_scope(self.module, "", EagerScope(True, GradientSync(), attaches=False))
        try:
            # ranks may have equal rows by chance, so what communicates mixes rows, whatever its values are
            with names.watching(parts.modules), debug.comm_log(mesh=self.mesh) as recorder.log, recorder.recording():
                hooks = GradientHooks(self.mesh, names)
                self.known_hooks = hooks.known
                self._draws = DrawnShapes(self.mesh)
                with (
                    no_draws_outside_torch(),
                    extension.on_draw(recorder.note_draw),
                    self._functions.on_all_rows(names, has_gradients=self._has_gradients),
                    self._draws,
                ):
                    return self._run(*all_rows(args, kwargs, self.mesh), hooks)
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, args: tuple, kwargs: dict, hooks: GradientHooks | None = None) -> tuple[list[Output], bool]:
        """Return the outputs of a call without side effects, and whether it drew random numbers."""
        with without_side_effects(self.module):
            before, attributes = random_position(self.mesh.device_type), attributes_before(self.module)
            gradients = torch.enable_grad() if self._has_gradients else contextlib.nullcontext()
            with gradients, hooks or contextlib.nullcontext():
                outputs = outputs_of(self.module(*args, **kwargs))
            outputs += left_in_attributes(attributes, self.module)
            return outputs, random_position(self.mesh.device_type) != before

    def _runs_alone(
        self, recorder: CallRecorder, outputs: list[Output], args: tuple, kwargs: dict, *, moved: bool
    ) -> bool:
        """Return whether calls on this rank's rows are those on all rows, if random operators draw slices for them."""
        drawn = (operator for found in recorder.drawn.values() for operator in found)
        if not all(operator.draws_rows or not operator.drawn_on for operator in drawn):
            return False  # equal values would be an accident: masks of a small rate have few zeros
        if not self._draws.have_dims:
            return False
        self.keeps_draws, own = True, DrawnShapes(self.mesh)
        with self._functions.on_own_rows(has_gradients=self._has_gradients), own:
            mine, drew = self._run(copied(args), copied(kwargs))
        self.keeps_draws = False
        differs = drew != moved or self._functions.difference or difference(outputs, mine, self.mesh)
        differs = differs or not own.are_rows_of(self._draws)
        return not highest(float(bool(differs)), self.mesh)

    def _check(self, found: RecordedRows, parts: Parts, args: tuple, kwargs: dict, *, moved: bool) -> None:
        """Run a call as later calls will run, and compare it with the recorded one. Collective over the ranks.

        Raises:
            RuntimeError: on a rank where they differ.
        """
        self._hook(found.operators)
        self.call.open(found)
        self.call.checks, self.call.num_bytes = True, 0
        with self._functions.on_own_rows(has_gradients=self._has_gradients):
            mine, drew = self._run(copied(args), copied(kwargs))
        self.call.checks = self.call.is_open = False
        differs = difference(found.outputs, mine, self.mesh)
        if highest(float(differs is not None), self.mesh):
            names = Names()
            recorder = CallRecorder(names, self.mesh, {}, keeps=False, nudges=True, of_rows=True)
            nudged, _ = self._recorded(recorder, names, parts, args, kwargs)
            differs = differs and difference(found.outputs, mine, self.mesh, nudged)
        differs = differs or self._functions.difference
        if drew != moved:
            differs = f"it {'draws' if moved else 'does not draw'} random numbers for the rows of all ranks alone"
        if differs is not None:
            raise RuntimeError(differs)


class DrawnShapes(TorchFunctionMode):
    """The global shapes of what random operators return while the mode is active, in the order of their calls."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self._mesh = mesh
        self._shapes: list[list[torch.Size]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = random_position(self._mesh.device_type)
        result = func(*args, **(kwargs or {}))
        if random_position(self._mesh.device_type) != before:
            self._shapes.append([leaf.shape for leaf in _torch.tree_leaves(result) if isinstance(leaf, Tensor)])
        return result

    @property
    def have_dims(self) -> bool:
        """Whether none is a single number, which belongs to no rows."""
        return all(shape for shapes in self._shapes for shape in shapes)

    def are_rows_of(self, whole: DrawnShapes) -> bool:
        """Return whether each has fewer rows than its counterpart for the rows of all ranks."""
        if len(self._shapes) != len(whole._shapes):
            return False
        pairs = (pair for both in zip(self._shapes, whole._shapes, strict=True) for pair in zip(*both, strict=False))
        return all(mine != theirs for mine, theirs in pairs)


def _mixes_in_compiled_code(found: RecordedRows, compiled: list[str]) -> str:
    mixing = [f"{operator} in {describe(name)}" for name, each in found.operators.items() for operator in each]
    what = "; ".join(dict.fromkeys(mixing)) or "its result is a sum over rows"
    return (
        f"torch.compile has compiled {', '.join(map(describe, compiled))}, and compiled code knows this rank's rows "
        f"alone, but rows are mixed, or drawn for, together: {what}; leave the module uncompiled, or compile its "
        'blocks by mode="compile" of vescale.dmodule'
    )
