"""Run forward with this rank's batch window applied to random operators, at full speed in modules without them.

Inside ``vescale.dtensor.random.local_batch`` dropout on a rank's local batch produces this rank's slice of the mask
that one device would produce. The context must be active whenever the module runs a random operator: when the user
calls ``DDP``, when a pipeline engine calls the module underneath, and when activation checkpointing recomputes a part
of it during backward, outside of any call of the user's. So hooks of the module and of its submodules enter it.

The context checks every operator, which takes the host some microseconds each. So the first call of each module is
watched completely, for training and for evaluation, and records which modules ran a random operator in their own code.
Own code is all code outside of hooked submodules. In later calls only those modules enter the context:

    first call      watched | embed | block (attn drop mlp) | block (attn drop mlp) | head |       the dropouts drew
    later calls     watched |                   drop                        drop            |
    full speed              | embed | block (attn        mlp) | block (attn        mlp) | head |

A module that draws later, while it is not watched, would draw as if there were no other ranks. The position of the
random stream shows this (`extension.random_position`, a microsecond per call). It is an error, raised at the end of the
call.

Some modules are watched in every call: torch's dropout modules, whose rate may change; modules that hold their own
generator, whose draws do not change that position, or that draw from one in their first call; and full modules that
`vescale.dmodule` runs (it checks only the modules that need it) or that have parts compiled by ``part.compile()``.

No compiler runs while operators are watched. The result of ``torch.compile(part)`` is watched as one module, in its
first call and if it draws, and then runs as plain Python. Otherwise it is compiled in its second call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dmodule.rows import JointCalls
from vescale.dtensor import extension, random

from .. import _torch
from .._checks import executions_of

__all__ = ["attach_local_batch"]

#: Leaf modules that never draw and are not recomputed alone: hooks on them would only cost time.
_QUIET = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Conv1d,
    nn.Conv2d,
    nn.Identity,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
)


#: Modules whose rate may be 0 in their first call.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class _Draws:
    """The modules that draw in their own code, recorded in their first calls.

    Args:
        root: The module given to DDP.
        always: Whether all modules count as such.

    Attributes:
        wrappers: For each module inside the result of a ``torch.compile``, the wrapping modules; if it draws, they do.
    """

    def __init__(self, root: nn.Module, *, always: bool):
        self._always = always
        self._names = {module: fqn for fqn, module in root.named_modules()}
        self.wrappers: dict[nn.Module, list[nn.Module]] = {}
        for wrapper in filter(_torch.is_compiler_wrapper, self._names):
            for inner in filter(lambda module: module is not wrapper, wrapper.modules()):
                self.wrappers.setdefault(inner, []).append(wrapper)
        self._in_training: dict[nn.Module, bool] = {}
        self._in_evaluation: dict[nn.Module, bool] = {}
        for module in self._names:
            holds_generator = any(isinstance(value, torch.Generator) for value in vars(module).values())
            if holds_generator or isinstance(module, _DROPOUTS):
                self._in_training[module] = True
            if holds_generator:
                self._in_evaluation[module] = True

    def __call__(self, module: nn.Module) -> bool | None:
        """Return whether a module draws; None if it has not been called yet."""
        return self._always or self._of(module).get(module)

    def learn(self, module: nn.Module, *, draws: bool) -> None:
        """Record whether a module has drawn; one recorded draw is kept."""
        for each in (module, *(self.wrappers.get(module, ()) if draws else ())):
            known = self._of(each)
            known[each] = known.get(each, False) or draws

    def name(self, module: nn.Module) -> str:
        fqn = self._names.get(module)
        return repr(fqn) if fqn else f"the module ({type(module).__name__})"

    def _of(self, module: nn.Module) -> dict[nn.Module, bool]:
        return self._in_training if module.training else self._in_evaluation


class _LocalBatch(threading.local):
    """The state of one thread: the hooked modules that are running, and the context that is entered for one of them.

    A copy of a module that has its hooks is not part of the DDP: the copied state has no effect.
    """

    def __init__(
        self,
        meshes: Sequence[DeviceMesh],
        draws: _Draws | None,
        rows: JointCalls | None = None,
        *,
        compiles: bool = False,
    ):
        self.meshes = meshes
        self.draws = draws
        self.rows = rows
        self.compiles = compiles  # keep the compiler away: it would give up on watched code for good
        self.running: list[nn.Module] = []
        self.context = contextlib.ExitStack()
        self.watched_from = 0  # modules running when the context was entered, itself included; 0: none
        self.learns = False  # entered because nothing is recorded for the module yet
        self.position: extension.Position | None = None  # of the random stream, at the last attribution of a draw

    def __reduce__(self) -> Any:
        return type(self), ((), None)

    def enter(self, module: nn.Module, _args: tuple) -> None:
        if not self.meshes or (self.rows is not None and self.rows.covers_rows):
            return
        self.running.append(module)
        if self.watched_from:
            if self.learns:
                self._attribute(self.running[-2])
        elif (draws := self.draws(module)) is not False:
            if len(self.running) > 1:
                self._check(self.running[0])
            self._watch(learns=draws is None)
        elif len(self.running) == 1:
            self.position = self._now()

    def leave(self, module: nn.Module, _args: tuple, output: object) -> None:
        if module not in self.running:  # a user's hook has raised before this one
            return
        if self.learns and self.watched_from:
            self._attribute(module)
            if output is not None:  # otherwise an exception may have ended the call before it drew
                self.draws.learn(module, draws=False)
        while self.running.pop() is not module:
            pass
        if len(self.running) < self.watched_from:
            self.watched_from = 0
            self.context.close()
            self.position = self._now() if self.running else None
        elif not self.running:
            self._check(module)

    def _watch(self, *, learns: bool) -> None:
        self.watched_from = len(self.running)
        self.learns = learns
        if self.compiles and not torch.compiler.is_compiling():
            with contextlib.suppress(RuntimeError):  # unavailable inside a compiled caller
                self.context.enter_context(torch.compiler.set_stance("force_eager"))
        for mesh in self.meshes:
            self.context.enter_context(random.local_batch(mesh))
        if learns:
            self.position = self._now()
            self.context.enter_context(_torch.GeneratorListener(self._note_generator))

    def _note_generator(self) -> None:
        self.draws.learn(self.running[-1], draws=True)

    def _attribute(self, module: nn.Module) -> None:
        """Record a draw of a module since the last position of the stream."""
        now = self._now()
        if now != self.position:
            self.draws.learn(module, draws=True)
        self.position = now

    def _check(self, module: nn.Module) -> None:
        """Raise RuntimeError if there was an unwatched draw since the outermost module was entered."""
        before, self.position = self.position, self._now()
        if self.position != before:
            mode = "training" if module.training else "evaluation"
            raise RuntimeError(
                f"{self.draws.name(module)}, or a module in it, drew random numbers, or seeded: expected none, as in "
                f"its first call in {mode}. So it was not watched, and rank {dist.get_rank()} drew as if it were "
                "alone. (A rate that was 0? Another thread that draws? A seed that is set in forward?) Pass "
                "watch_draws=True to DDP, which then watches every call"
            )

    def _now(self) -> extension.Position:
        return extension.random_position(self.meshes[0].device_type)

    def enter_compiled(self, module: nn.Module, args: tuple) -> None:
        """Enter a module inside the result of ``torch.compile``: a no-op in a graph."""
        if not torch.compiler.is_compiling():
            self.enter(module, args)

    def leave_compiled(self, module: nn.Module, args: tuple, output: object) -> None:
        """Leave that module."""
        if not torch.compiler.is_compiling():
            self.leave(module, args, output)

    # `vescale.dmodule` omits these hooks inside of compiled code: the hooks of the compiled module itself count
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"


def attach_local_batch(
    module: nn.Module,
    meshes: Sequence[DeviceMesh],
    *,
    watch_draws: bool = False,
    rows: JointCalls | None = None,
) -> None:
    """Make every call of ``module``, or of a part of it, run as this rank's part of the batch.

    Args:
        module: The module.
        meshes: 1-D meshes over which the batch is divided: over the first, then each part over the second, and so on.
        watch_draws: Whether to watch every call of every module for random operators.
        rows: What may take care of random operators in some calls.
    """
    if not meshes:
        return
    always = watch_draws or bool(executions_of(module)) or _torch.has_compiled_calls(module)
    draws = _Draws(module, always=always)
    state = _LocalBatch(meshes, draws, rows, compiles=not always and bool(draws.wrappers))
    for part in module.modules():
        if part is module or not isinstance(part, _QUIET):
            compiled = part in draws.wrappers
            part.register_forward_pre_hook(state.enter_compiled if compiled else state.enter, prepend=True)
            part.register_forward_hook(state.leave_compiled if compiled else state.leave, always_call=True)
