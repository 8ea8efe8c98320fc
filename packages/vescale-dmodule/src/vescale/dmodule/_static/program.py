"""A module that runs on local tensors.

``StaticProgram`` belongs to one module, the whole model or a part of one that otherwise runs in eager mode. It is
opened before the module's forward and closed after it::

    open     parameters -> local twins, sizes -> local sizes, arguments -> local tensors
             boundaries run the conversion that the rehearsal found, by place and local shape
    close    results -> what eager mode returns (plain, or a DTensor where it is sharded), everything put back

Between boundaries runs the module's own code on plain tensors, at the speed of plain PyTorch.

A call with a new signature (shapes, dtypes and layouts of its tensors, values of its Python arguments, train or eval
mode, autocast, grad mode) is rehearsed first. Calls that record no gradient run in eager mode the first time and are
rehearsed the second, because a generation loop never repeats a shape.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from vescale.dtensor import extension

from .. import _torch
from .._boundary.edges import unwrapped, wrapped
from .._boundary.hooks import Phase
from .._boundary.values import describe_value, map_leaves
from .._compile.blocks import CompiledBlocks
from .._execution.eager import EagerScope, hook_scope
from .._execution.module_hooks import hook_calls
from .._experts import experts_region, listed_gradients
from .._gradients.sync import GradientSync
from .._report.ranges import is_watched
from ..errors import NotLocalFriendlyError
from .attributes import Swaps
from .direct_calls import DirectCalls
from .draws import Draw, DrawHooks, QuietCall
from .eager_region import EagerRegion
from .experts import ExpertsHere
from .local_modules import local_forward, silent_axes
from .local_parameters import LocalParameters, Twin, held_by
from .movement.conversions import Conversion, compile_conversion
from .names import describe, is_inside, join
from .recording.compare import Run
from .recording.learn import learn, watch_arguments
from .recording.observe import Crossing, Observer
from .recording.recorded import Findings, Recomputations

__all__ = ["Model", "StaticProgram"]

logger = logging.getLogger("vescale.dmodule")

CHECKPOINTING = "gradient_checkpointing"  # what Hugging Face calls the switch of a layer
MANY = 32  # rehearsals after which a warning says that shapes keep changing


class Model(Protocol):
    """What a program needs to know of the parallelized model that it is a part of."""

    mesh: DeviceMesh
    root: nn.Module
    phase: Phase
    scope: EagerScope
    sync: GradientSync
    any_rank: Callable[[bool], bool] | None
    local_attributes: dict[str, dict[str, object]]


class StaticProgram:
    """Runs ``module`` on local tensors; see the module's docstring.

    Args:
        model: the parallelized model.
        name: name of the module in the model.
        module: the module.
        eager: full names of the parts of it that stay in eager mode.
        is_root: whether callers expect plain tensors back (the whole model) or DTensors (a part of it).
        compiled: whether its blocks are compiled.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        module: nn.Module,
        eager: frozenset[str],
        *,
        is_root: bool,
        compiled: bool = False,
    ):
        self.model, self.name, self.module, self.is_root = model, name, module, is_root
        self.modules = {join(name, inner): part for inner, part in module.named_modules()}
        inside = [region for region in eager if region in self.modules]
        self.regions = [r for r in inside if not any(r != other and is_inside(r, other) for other in inside)]
        self.experts = {n: r for n, m in self.modules.items() if (r := experts_region(m)) and not self.is_in_region(n)}
        # what rehearsals have found
        self.known: dict[Hashable, Findings] = {}
        self.is_compiled = compiled
        self.all_findings: list[Findings] = []
        self.use(self.new_findings())
        self.gradients: dict[str, tuple[Placement, ...]] = {}
        self.drawing: set[str] = set()
        self.own_draws: DrawHooks | None = None
        self.recomputed: set[str] = set()
        self.recomputations = Recomputations()
        self.switches = [part for part in self.modules.values() if hasattr(part, CHECKPOINTING)]
        self.quiet: set[Hashable] = set()  # calls that draw no random numbers
        self.has_warned = False  # that blocks are not compiled because of somebody who watches operators
        self.device_type = model.mesh.device_type
        self.position = functools.partial(extension.random_position, self.device_type)
        # the state of a call
        self.depth = 0
        self.quiet_call = QuietCall(self.device_type)
        self.parameters: LocalParameters | None = None
        self.swaps = Swaps()
        self.compiled = Swaps()
        self.direct: DirectCalls | None = None
        self.seen: set[Hashable] = set()  # calls without gradients
        self.once: list[RemovableHandle] | None = None  # hooks of a call that runs in eager mode
        # the state of a rehearsal
        self.rehearsing = self.is_quiet = False
        self.observer: Observer | None = None
        self.checked: Run | None = None
        self.handles: list[RemovableHandle] = []

    # --------------------------------------------------------------------------------------------- hooks

    def install(self) -> None:
        """Install the hooks of the parts of the module; those of the module itself are its owner's."""
        for name in self.regions:
            region = EagerRegion(self, name)
            self.handles += hook_scope(self.modules[name], name, self.model.scope)
            self.handles += hook_calls(self.modules[name], region.enter, region.leave)
        for name, region in self.experts.items():
            hooks = ExpertsHere(self, name, region)
            self.handles += hook_calls(self.modules[name], hooks.enter, hooks.leave)
        for name, part in self.modules.items():
            if isinstance(part, nn.ModuleList):  # its elements are what activation checkpointing runs again
                for inner, _ in part.named_children():
                    self.add_recomputed(join(name, inner))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.recomputed.clear()
        self.drawing.clear()
        self.own_draws = None

    def add_recomputed(self, name: str) -> None:
        """Open the program for a part that autograd calls in backward."""
        if name in self.recomputed or not name or self.is_in_region(name):
            return
        self.recomputed.add(name)
        opened: list[bool] = []

        def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            opened.append(self.depth == 0 and not self.rehearsing and self.once is None and _torch.in_backward())
            if len(self.all_findings) > 1:
                self._choose(name, args, kwargs, again=opened[-1])
            if opened[-1]:
                self._open()

        def leave(_module: nn.Module, _args: tuple, _output: object) -> None:
            if opened and opened.pop():
                self._close()

        self.handles += hook_calls(self.modules[name], enter, leave)

    def add_draws(self, name: str, draws: list[Draw]) -> None:
        """Let the random operators of a part draw as they did in a rehearsal."""
        self.findings.add_draws(name, draws)
        if name not in self.drawing:
            self.drawing.add(name)
            hooks = DrawHooks(name, lambda: self.draws.get(name, []) if self.depth else [], self.model.mesh)
            if name == self.name:
                self.own_draws = hooks  # a hook that comes while the module is called comes too late for that call
            else:
                self.handles += hooks.register(self.modules[name])

    def new_findings(self) -> Findings:
        """Return empty findings, for calls that contradict all others."""
        self.all_findings.append(Findings(blocks=CompiledBlocks() if self.is_compiled else None))
        return self.all_findings[-1]

    def use(self, findings: Findings) -> None:
        """Run by these findings from now on, while no call runs."""
        self.findings, self.blocks, self.direct = findings, findings.blocks, None
        self.crossings, self.steps, self.draws, self.tokens = (
            findings.crossings,
            findings.steps,
            findings.draws,
            findings.tokens,
        )

    def _choose(self, name: str, args: tuple, kwargs: dict, *, again: bool) -> None:
        """Note by which findings a part runs; take the same when it runs ``again``."""
        if not again:
            self.recomputations.note(name, args, kwargs, self.findings)
            return
        findings = self.recomputations.find(name, args, kwargs) or self.all_findings[0]
        if findings is not self.findings:
            self.use(findings)
            self._recompile()

    @property
    def opaque(self) -> list[str]:
        """Names of the parts that no compiler sees."""
        listed = [name for name, part in self.modules.items() if listed_gradients(part)]
        return [*self.regions, *self.experts, *listed]

    def is_in_region(self, name: str) -> bool:
        """Tell whether a part stays in eager mode."""
        return any(is_inside(name, region) for region in self.regions)

    # --------------------------------------------------------------------------------------------- a call

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Open the program; rehearse a call with a new signature first."""
        if self.rehearsing:
            return watch_arguments(self, args, kwargs)
        if self.observer is None:
            self.refresh_twins()
            signature = self._signature(args, kwargs)
            findings = self._find(signature)
            if findings is None and not self._learn(signature, args, kwargs):
                self.once = hook_scope(module, self.name, self.model.scope)
                self.model.scope.enter(module, self.name)  # too late for the hook of the module itself
                return None
            if findings is not None and findings is not self.findings:
                self.use(findings)
                self._recompile()
            if signature in self.quiet:
                self.quiet_call.begin()
        self._open(is_fresh=True)
        if self.own_draws is not None:
            self.own_draws.enter(module, args)
        where = self.place("enters")
        args = map_leaves(self._localize, args, where)
        return args, map_leaves(self._localize, kwargs, where) if kwargs else kwargs

    def leave(self, module: nn.Module, args: tuple, output: object) -> object:
        """Close the program; return what eager mode returns, before it makes plain tensors of whole ones."""
        if self.rehearsing:
            return None if output is None else map_leaves(self.observer.watch, output, self.place("returns"))
        if self.once is not None:
            for handle in self.once:
                handle.remove()
            self.once = None
            self.model.scope.leave(self.name)
            return None
        if self.depth == 0:
            return None  # it failed before it was opened
        if self.own_draws is not None:
            self.own_draws.leave(module, args, output)
        self._close()
        self.quiet_call.end(self.name, well=output is not None)
        return None if output is None else map_leaves(self._globalize, output, self.place("returns"))

    def _signature(self, args: tuple, kwargs: dict) -> Hashable:
        device = self.device_type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        switches = [getattr(part, CHECKPOINTING) for part in self.switches]
        values = *map(describe_value, args), describe_value(kwargs) if kwargs else None
        return torch.is_grad_enabled(), self.module.training, dtype, *switches, *values

    def _find(self, signature: Hashable) -> Findings | None:
        """Return what is known of a call; nothing if another rank rehearses it, which takes this one, too."""
        findings, any_rank = self.known.get(signature), self.model.any_rank
        if any_rank is not None:
            is_due = findings is None and (torch.is_grad_enabled() or signature in self.seen)
            if any_rank(is_due):
                self.seen.add(signature)
                return None
        return findings

    def _learn(self, signature: Hashable, args: tuple, kwargs: dict) -> bool:
        """Rehearse a call, unless it should run in eager mode this time."""
        if not torch.is_grad_enabled() and signature not in self.seen:
            self.seen.add(signature)
            return False
        learn(self, args, kwargs)
        self.known[signature] = self.findings
        if self.is_quiet:
            self.quiet.add(signature)
        else:
            self.quiet.discard(signature)
        self._recompile()
        if len(self.known) == MANY:
            logger.warning(
                "static mode has rehearsed %d different calls of %r; each costs forward and backward passes, so pad "
                "batches to few lengths",
                MANY,
                self.name or type(self.module).__name__,
            )
        return True

    def place(self, side: str) -> str:
        """Return the name of the module's own edge, ``enters`` or ``returns``."""
        return f"{self.name} {side}" if self.name else side

    # --------------------------------------------------------------------------------------------- open and close

    def _open(self, *, is_fresh: bool = False) -> None:
        if self.depth == 0:
            if not is_fresh:
                self.refresh_twins()
            self.parameters.put()
            if self.swaps.places:
                self.swaps.put()
            if self.observer is None:
                self._put_calls()
            phase = self.model.phase
            phase.convert, phase.local = self.convert, True
        self.depth += 1

    def _put_calls(self) -> None:
        if self.is_compiled:
            if self.may_compile:
                self.compiled.put()
            elif not self.has_warned:
                self.has_warned = True
                logger.warning(
                    "blocks of %s run as in static mode while somebody watches operators (a TorchDispatchMode), which "
                    "no compiler allows",
                    describe(self.name),
                )
        elif not is_watched(self.model.phase.meter):
            if self.direct is None:
                self.direct = DirectCalls(self)
            self.direct.put()

    @property
    def may_compile(self) -> bool:
        """Whether compiled code may run now: a compiler refuses where somebody watches operators, except who looks for
        random ones only, which compiled blocks see to themselves.
        """
        return not _torch.has_dispatch_mode() or extension.is_watched_alone()

    def _close(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            phase = self.model.phase
            phase.convert, phase.local = None, False
            if self.direct is not None:
                self.direct.take_back()
            if self.is_compiled:
                self.compiled.take_back()
            if self.swaps.places:
                self.swaps.take_back()
            self.parameters.take_back()

    def _recompile(self) -> None:
        """Make the compiled blocks anew, after what they are made of has changed."""
        if self.blocks is not None:
            self.compiled = self.blocks.swaps(self)

    def refresh_twins(self) -> None:
        """Make local tensors for the parameters where there are none or they are stale."""
        if self.parameters is not None and not self.parameters.stale():
            return
        own = {name: module for name, module in self.modules.items() if not self.is_in_region(name)}
        self.model.sync.attach(self.module)
        before, is_hooked = self.parameters, self.model.sync.has_other_hooks
        elsewhere = held_by(set(self.model.root.modules()) - set(own.values()))
        self.parameters = LocalParameters(own.items(), is_hooked, silent_axes, elsewhere)
        if before is not None and before.trained != self.parameters.trained:
            self.known.clear()
        self.swaps = Swaps.of(own, self.model.local_attributes, local_forward)
        self.tell_twins()
        self._recompile()

    def tell_twins(self) -> None:
        """Tell the twins in what layouts their gradients come, and what takes them: in a rehearsal, its record."""
        layouts = {} if self.checked is not None else self.gradients
        delivered = [twin for twin in self.parameters if twin.trained and twin.name in layouts]
        hooks = self.model.sync.hooks([(twin.whole, layouts[twin.name]) for twin in delivered])
        taken = {id(twin): hook for twin, hook in zip(delivered, hooks, strict=True)}
        for twin in self.parameters:
            otherwise = functools.partial(self._arrived, twin)
            twin.expect(self.gradients.get(twin.name), taken.get(id(twin)), otherwise)

    def _arrived(self, twin: Twin, leaf: Tensor) -> None:
        """Keep a gradient of a rehearsal; refuse one that a rehearsal has not seen."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:
            return  # as in ``_deliveries``
        if self.checked is None:
            raise NotLocalFriendlyError(
                f"parameter {twin.name!r} got a gradient, which it had not when static mode recorded this model: a "
                "branch that depends on data? Run the model in mode 'eager', or keep the module that branches on "
                f'DTensors: "eager": [r"{twin.name.rpartition(".")[0]}"]'
            )
        earlier, _ = self.checked.gradients.get(twin.name, (None, None))
        self.checked.gradients[twin.name] = (gradient if earlier is None else earlier + gradient, None)

    # --------------------------------------------------------------------------------------------- values

    def convert(self, tensor: Tensor, _placements: object, where: str) -> Tensor:
        """Run the conversion of one value at a planned boundary."""
        step = self.steps.get(where, {}).get(tensor.shape)
        if step is None:
            raise self._unknown(where, tensor)
        out = step(tensor)
        return out if self.observer is None else self.noted(out, where)

    def noted(self, local: Tensor, where: str) -> Tensor:
        """Show a value to the observer of a rehearsal; returns an alias, whose gradient is this crossing's alone."""
        if self.observer is not None and not self.rehearsing:
            local = local.view_as(local) if local.requires_grad else local
            self.observer.note_local(local, where)
        return local

    def crossing(self, where: str, local: Tensor) -> Crossing:
        """Return what a rehearsal found at an edge.

        Raises:
            NotLocalFriendlyError: it has not seen a value of this shape there.
        """
        crossing = self.crossings.known.get((where, tuple(local.shape)))
        if crossing is None:
            raise self._unknown(where, local)
        return crossing

    def _unknown(self, where: str, local: Tensor) -> NotLocalFriendlyError:
        shapes = [shape for place, shape in self.crossings.known if place == where]
        return NotLocalFriendlyError(
            f"{where}: a value of local shape {tuple(local.shape)} came; recorded are {shapes}. Its shape depends on "
            "data, or on state that is not in the arguments; keep the modules around it in eager mode"
        )

    def _localize(self, tensor: Tensor, where: str) -> Tensor:
        if isinstance(tensor, DTensor):
            local = _torch.local_of(tensor)
            if tensor.requires_grad:
                local = unwrapped(tensor, self.crossing(where, local).gradient)
        elif tensor.requires_grad:
            self.crossing(where, tensor)
            local = self.steps[where][tensor.shape](tensor)
        else:
            return tensor
        return self.noted(local, where)

    def _globalize(self, local: Tensor, where: str) -> Tensor:
        crossing = self.crossing(where, local)
        local = self.noted(local, where)
        if crossing.source is None:
            return local
        step = self.steps.get(where, {}).get(local.shape) if self.is_root else None
        return self.wrap(local, crossing) if step is None else step(local)

    def wrap(self, local: Tensor, crossing: Crossing, *, region: bool = False) -> DTensor:
        """Return a local value as the DTensor that it is in eager mode.

        Args:
            local: the value.
            crossing: what it is.
            region: whether eager code follows, whose gradient comes as recorded; else the caller's code does.
        """
        mesh = self.model.mesh
        if crossing.gradient is None and local.requires_grad:
            # backward raises: nothing is known of this gradient
            local = compile_conversion(Conversion(crossing.shape, crossing.source, crossing.source), mesh)(local)
        gradient = None if region else crossing.gradient
        return wrapped(local, mesh, crossing.source, shape=crossing.shape, gradient=gradient)
