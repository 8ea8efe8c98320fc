"""Compiled mode: the repeated blocks of a static program run as compiled functions, each one graph.

A block is an element of the outermost ``ModuleList`` or ``Sequential`` of a model. While the program is open, the
forward of each block is a function of ``torch.compile``; the modules around the blocks run as in static mode::

    program opens     forward of each block  -> compiled function
                      hooks inside blocks    -> the conversions of the boundaries, without names
    program closes    the patch is restored

Collectives are functional operators in the graph, so the compiler sees them. Equal blocks share their compiled code
(see ``hooks``). Blocks of another class or with other hooks have their own code object and so their own cache, because
a compiler does not guard the absence of hooks. New shapes, and a full cache (blocks that read their own index), make
another code object.

Data parallelism opens a mode that intercepts random operators on a rank's rows of the batch (see
``vescale.dtensor.random.local_batch``). No compiler runs under such a mode, so compiled blocks run without it. In a
graph dropout is an opaque operator, which opens the mode for its own call. A block with other random operators stays in
static mode.

A block that the compiler refuses (control flow that depends on data, random operators other than dropout on sharded
tensors or on rows of a batch) stays in static mode, with a warning that says why.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import types
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import extension

from .. import _torch
from .._execution.patch import ModulePatch, Row
from .._static.operator_mode import inactive
from .._static.operators import RecordedOperator
from .._static.parts import Parts, describe, is_inside, join
from .._static.recording.layouts import RecordedLayouts
from .dropout import CompiledDropout, accounted, dropout_obstacle, is_dropout
from .hooks import compiled_hooks, hook_kinds, stays_outside

__all__ = ["CompiledProgram", "find_blocks"]

logger = logging.getLogger("vescale.dmodule")

# the same random numbers as without a compiler
OPTIONS = {"fallback_random": True}

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class CompiledProgram:
    """The compiled blocks of a static program, for all its recorded layouts.

    Args:
        parts: of the program.
        mesh: of the layouts.
    """

    def __init__(self, parts: Parts, mesh: DeviceMesh):
        self.parts, self.mesh = parts, mesh
        self._blocks: dict[RecordedLayouts, CompiledBlocks] = {}
        self._has_warned = False

    def patch(self, layouts: RecordedLayouts) -> ModulePatch | None:
        """Return the patch that runs compiled blocks with some layouts; None while no compiler may run."""
        if may_compile():
            if layouts not in self._blocks:
                self._blocks[layouts] = CompiledBlocks(self.parts, layouts.mesh or self.mesh, layouts)
            return self._blocks[layouts].patch()
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "blocks of %s run as in static mode while a TorchDispatchMode watches operators, which no compiler "
                "allows",
                describe(self.parts.name),
            )
        return None


def may_compile() -> bool:
    """Return whether compiled code may run now.

    A compiler refuses to run under a dispatch mode. The mode that intercepts random operators is an exception: compiled
    blocks run without it, and their dropout opens it.
    """
    return not _torch.has_dispatch_mode() or extension.is_watched_alone()


class CompiledBlocks:
    """The compiled functions of one static program for some layouts.

    Args:
        parts: of the program.
        mesh: of the layouts.
        layouts: recorded.

    Attributes:
        functions: kind of block -> its newest compiled function.
        refused: names of the blocks that stay in static mode.
    """

    def __init__(self, parts: Parts, mesh: DeviceMesh, layouts: RecordedLayouts):
        self.parts, self.mesh, self.layouts = parts, mesh, layouts
        self.functions: dict[Hashable, Callable] = {}
        self.refused: set[str] = set()
        self._made: tuple[Hashable, ModulePatch] | None = None
        self._tables: list[dict] = []  # hook tables of the modules inside blocks
        self._is_late = False  # whether the call in progress is one of a block, and has looked up its `forward` before

    def patch(self) -> ModulePatch:
        """Return the rows of all blocks. The first call of a block compiles it.

        The rows are made again after another recording, a change of hooks inside blocks, the refusal of a block, and at
        the beginning and end of a batch window.
        """
        if self._made is None or self._is_late or self._made[0] != self._state():
            patch = self._make()
            self._made = self._state(), patch
        return self._made[1]

    def _state(self) -> Hashable:
        return *self._recorded(), sum(map(len, self._tables)), len(self.refused), extension.is_watched()

    def _recorded(self) -> tuple[int, int]:
        return sum(map(len, self.layouts.steps.values())), sum(map(len, self.layouts.drawn.values()))

    def _make(self) -> ModulePatch:
        rows: list[Row] = []
        self._tables, self._is_late = [], False
        shared: dict[Hashable, Callable] = {}
        is_watched = extension.is_watched()
        for name, block in find_blocks(self.parts):
            drawn = [op for owner, found in self.layouts.drawn.items() if is_inside(owner, name) for op in found]
            reason = None
            if name not in self.refused:
                obstacle = self._order_obstacle(name) or self._island_obstacle(name)
                reason = obstacle or dropout_obstacle(drawn, is_watched=is_watched)
            if reason is not None:
                self.refuse(name, reason)
            if name in self.refused:
                continue
            if block is self.parts.module and not _Entry.is_in(block):
                _Entry.of(block)
                self._is_late = True  # this call runs as in static mode, the next one compiled
                continue
            kind: list[Hashable] = [type(block), self._recorded()]
            for inner, part in block.named_modules():
                if part is not block:
                    hooks = compiled_hooks(self.layouts.steps, part, shared)
                    rows += hooks
                    kind.append((inner, type(part), hook_kinds(part, hooks)))
                    self._tables += _torch.module_hook_tables(part)
            entry = _Entry.of(block)
            mode = _mode(drawn, self.mesh, is_watched=is_watched)
            rows.append((vars(entry), "run", self._run(name, entry, tuple(kind), mode)))
        return ModulePatch(rows)

    def _order_obstacle(self, name: str) -> str | None:
        """Return why the order of calls matters in a block, which a graph does not keep; None if it does not."""
        for where, shape in self.layouts.in_order:
            if where.startswith(f"{name}."):
                return f"{where} has several layouts of the local shape {tuple(shape)}"
        return None

    def _island_obstacle(self, name: str) -> str | None:
        """Return why a block has operators that run on DTensors, which a graph does not hold; None if it has none."""
        for owner, operators in self.layouts.operators.items():
            island = next((op for op in operators if op.is_island and not op.draws), None)
            if island is not None and is_inside(owner, name):
                return f"{island} in {describe(owner)} runs on DTensors"
        return None

    def refuse(self, name: str, reason: object) -> None:
        """Leave a block in static mode."""
        self.refused.add(name)
        logger.warning("block %r is not compiled and stays in static mode: %s", name, reason)

    def _run(self, name: str, entry: _Entry, kind: tuple, mode: CompiledDropout | None) -> Callable:
        """Return the forward of a block while the program is open."""
        key = (kind, id(entry.function), None if mode is None else tuple(mode.layouts.items()))
        if key not in self.functions:
            self.functions[key] = _compiled(entry)
        compiled = self.functions[key]

        def call(function: Callable, args: tuple, kwargs: dict) -> object:
            with inactive(), mode or contextlib.nullcontext():
                return function(*entry.first, *args, **kwargs)

        def run(*args: object, **kwargs: object) -> object:
            nonlocal compiled
            if name in self.refused or not may_compile():  # the dropout of `mode` still draws
                return call(entry.function, args, kwargs)
            try:
                with _unwatched(name, self.mesh):
                    return call(compiled, args, kwargs)
            except Exception as error:  # an error of the compiler is raised before the block runs
                if _torch.is_full_cache(error):
                    if self.functions[key] is compiled:
                        self.functions[key] = _compiled(entry)
                    compiled = self.functions[key]
                elif _torch.is_compiler_error(error):
                    self.refuse(name, str(error).partition("\n")[0])
                else:
                    raise
            return run(*args, **kwargs)

        return run


class _Entry:
    """The attribute ``forward`` of a block: its code, or the compiled function while a program is open.

    It stays in the block when the program closes. Activation checkpointing calls the block in backward, and only the
    hooks of that call open the program, after ``nn.Module`` has looked up ``forward``. A deep copy is the plain
    forward.

    Attributes:
        function: the code of the block.
        first: the block, if the code takes it as its first argument.
        run: the compiled function while the program is open, else None.
    """

    def __init__(self, block: nn.Module):
        own = vars(block).get("forward")
        if getattr(own, "__func__", None) is type(block).forward:  # set by a deep copy
            own = None
        self.block, self.own, self.run = block, own, None
        self.function, self.first = (type(block).forward, (block,)) if own is None else (own, ())
        self.__wrapped__ = block.forward  # for `inspect.signature`

    @classmethod
    def of(cls, block: nn.Module) -> _Entry:
        """Return the entry of a block; install one if there is none."""
        if not cls.is_in(block):
            vars(block)["forward"] = cls(block)
        return vars(block)["forward"]

    @classmethod
    def is_in(cls, block: nn.Module) -> bool:
        """Return whether a block has an entry."""
        return isinstance(vars(block).get("forward"), cls)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.run is not None:
            return self.run(*args, **kwargs)
        return self.function(*self.first, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        return types.MethodType(self.function, copy.deepcopy(self.block, memo))


def _mode(drawn: list[RecordedOperator], mesh: DeviceMesh, *, is_watched: bool) -> CompiledDropout | None:
    """Return the mode that runs the dropout of a block; None if no dropout differs between ranks."""
    found = [operator for operator in drawn if is_dropout(operator) and (operator.is_sharded or is_watched)]
    return CompiledDropout(found, mesh, is_watched=is_watched) if found else None


@contextlib.contextmanager
def _unwatched(name: str, mesh: DeviceMesh) -> Iterator[None]:
    """Run a compiled block without the mode that intercepts random operators, and check that only its dropout draws.

    A quiet call has no such mode, and is checked as a whole (see ``QuietCall``).
    """
    position = functools.partial(extension.random_position, mesh.device_type)
    is_watched = extension.is_watched_alone()
    with extension.unwatched(), accounted(name, position) if is_watched else contextlib.nullcontext():
        yield


def _compiled(entry: _Entry) -> Callable:
    """Return the compiled code of a block, with a code object of its own; compilers cache by code object."""
    forward = entry.function

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    code = run.__code__.replace(co_name=f"{type(entry.block).__name__}_forward")
    alone = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
    return torch.compile(alone, fullgraph=True, dynamic=False, options=OPTIONS)


# ------------------------------------------------------------------------------------------------- blocks


def find_blocks(parts: Parts) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks with their full names. If a compiler must not trace a part of a block, yield its other parts.

    A module without repeated parts is one block.
    """
    found = list(_repeated(parts.module, parts.name))
    for name, block in found or [(parts.name, parts.module)]:
        yield from _visible(parts, name, block)


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if isinstance(module, CONTAINERS) and any(True for _ in child.children()):
            yield join(name, child_name), child
        else:
            yield from _repeated(child, join(name, child_name))


def _visible(parts: Parts, name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    hidden = [region for region in parts.opaque() if is_inside(region, name)]
    is_split = any(stays_outside(part) for part in block.modules() if part is not block)
    if not hidden and not is_split and not isinstance(block, CONTAINERS):
        yield name, block
    elif name not in hidden:
        for child_name, child in block.named_children():
            yield from _visible(parts, join(name, child_name), child)
