"""Compiled mode: the repeated blocks of a static program run as compiled functions, each one graph.

A block is what a model repeats: an element of its outermost ``ModuleList`` or ``Sequential``. While the program is
open, the forward of each block is a function of ``torch.compile``; what is around the blocks runs as in static mode::

    program opens     forward of each block   -> compiled function
                      hooks inside of blocks  -> the conversions of the boundaries, without names
    program closes    everything put back

Collectives are functional operators in the graph, so a compiler sees them. Blocks that are alike share their compiled
code (see ``_compiled_hooks``). Blocks that are not alike (another class, other hooks) never meet in one cache: each
kind gets a code object of its own, because a compiler does not guard the absence of hooks. New shapes make new ones,
and so does a full cache (blocks that read their own number).

Data parallelism has a mode that watches every operator for random ones on a rank's part of the batch (see
``vescale.dtensor.random.local_batch``), and no compiler runs then. Compiled blocks run without that mode. The operator
that their dropout is in a graph takes it on again for its own draw; other random operators keep a block in static mode.

A block that a compiler refuses (control flow that depends on data, random operators other than dropout on sharded
tensors or on parts of a batch) stays in static mode, and a warning says why.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from vescale.dtensor import extension

from .. import _torch
from .._static.attributes import Swaps
from .._static.draws import silenced
from .._static.names import is_inside, join
from .draws import CompiledDraws, accounted, draws_obstacle, is_dropout
from .hooks import compiled_hooks, hook_kinds, stays_outside

if TYPE_CHECKING:
    from .._static.draws import Draw, Listening
    from .._static.program import StaticProgram

__all__ = ["CompiledBlocks", "find_blocks"]

logger = logging.getLogger("vescale.dmodule")

BACKEND = "inductor"

# the same random numbers as without a compiler
OPTIONS = {"fallback_random": True}

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class CompiledBlocks:
    """The compiled functions of one static program.

    Attributes:
        functions: kind of block -> its compiled function, the newest.
        refused: names of the blocks that stay in static mode.
        draws: what rehearsals have heard, by module: draws of DTensors and of plain tensors.
    """

    def __init__(self):
        self.functions: dict[Hashable, Callable] = {}
        self.refused: set[str] = set()
        self.draws: dict[str, list[Draw]] = {}
        self._made: tuple[tuple[int, int], Swaps] | None = None

    def hear(self, listening: Listening) -> None:
        """Add the draws of a rehearsal."""
        for heard in (listening.draws, listening.plain):
            for name, draws in heard.items():
                known = self.draws.setdefault(name, [])
                for draw in draws:
                    if not any(draw.key == old.key and draw.operands == old.operands for old in known):
                        known.append(draw)

    def swaps(self, program: StaticProgram) -> Swaps:
        """Return what changes while the program is open. Compiles nothing yet; the first call of a block does."""
        state = sum(map(len, program.steps.values())), sum(map(len, self.draws.values()))
        if self._made is None or self._made[0] != state:
            self._made = state, self._make(program, state)
        return self._made[1]

    def _make(self, program: StaticProgram, state: tuple[int, int]) -> _CompiledSwaps:
        swaps = _CompiledSwaps(lambda: self._make(program, state), self.refused)
        shared: dict[Hashable, Callable] = {}
        is_watched = extension.is_watched()
        for name, block in find_blocks(program):
            draws = [draw for owner, drawn in self.draws.items() if is_inside(owner, name) for draw in drawn]
            if name not in self.refused and (reason := draws_obstacle(draws, is_watched=is_watched)) is not None:
                self.refuse(name, reason)
            if name in self.refused:
                continue
            kind: list[Hashable] = [type(block), state]
            for inner, part in block.named_modules():
                if part is not block:
                    hooks = compiled_hooks(program, part, shared)
                    swaps.places += hooks
                    kind.append((inner, type(part), hook_kinds(part, hooks)))
                    swaps.watch(part)
            entry = _Entry.of(block)
            run = self._run(program, name, entry, (tuple(kind), _mode(draws, program, is_watched=is_watched)))
            swaps.places.append((vars(entry), "run", run))
        swaps.made_for = swaps.state()
        return swaps

    def refuse(self, name: str, reason: object) -> None:
        """Leave a block in static mode."""
        self.refused.add(name)
        logger.warning("block %r is not compiled and stays in static mode: %s", name, reason)

    def _run(
        self, program: StaticProgram, name: str, entry: _Entry, made_for: tuple[tuple, CompiledDraws | None]
    ) -> Callable:
        """Return the forward of a block while the program is open."""
        kind, mode = made_for
        key = (kind, id(entry.function), None if mode is None else tuple(mode.layouts.items()))
        if key not in self.functions:
            self.functions[key] = _compiled(entry)
        compiled = self.functions[key]

        def call(function: Callable, args: tuple, kwargs: dict) -> object:
            with silenced(), mode or contextlib.nullcontext():
                return function(*entry.first, *args, **kwargs)

        def run(*args: object, **kwargs: object) -> object:
            nonlocal compiled
            if name in self.refused or not program.may_compile:  # in this call already; the mode still makes draws
                return call(entry.function, args, kwargs)
            try:
                with _unwatched(name, program):
                    return call(compiled, args, kwargs)
            except Exception as error:  # nothing has run yet where it comes from the compiler
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
    """The forward of a block in its own attributes: the block's code, or what is put in while a program is open.

    It stays there when the program is closed, because activation checkpointing calls the block itself: only the hooks
    of that call open the program, when the module has already looked its forward up. A deep copy is the plain forward.

    Attributes:
        function: the block's code.
        first: the block, if the code takes it as its first argument.
        run: what is called instead.
    """

    def __init__(self, block: nn.Module):
        own = vars(block).get("forward")
        if getattr(own, "__func__", None) is type(block).forward:  # what a deep copy leaves
            own = None
        self.block, self.own, self.run = block, own, None
        self.function, self.first = (type(block).forward, (block,)) if own is None else (own, ())
        self.__wrapped__ = block.forward  # for those who ask for the signature

    @classmethod
    def of(cls, block: nn.Module) -> _Entry:
        """Return the entry of a block, made if there is none."""
        own = vars(block).get("forward")
        if not isinstance(own, cls):
            vars(block)["forward"] = own = cls(block)
        return own

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.run is not None:
            return self.run(*args, **kwargs)
        return self.function(*self.first, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Callable:
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        return types.MethodType(self.function, copy.deepcopy(self.block, memo))


def _mode(draws: list[Draw], program: StaticProgram, *, is_watched: bool) -> CompiledDraws | None:
    """Return what makes the draws of a block; None if there are none but those that all ranks make alike."""
    drawn = [draw for draw in draws if is_dropout(draw) and (draw.is_sharded or is_watched)]
    return CompiledDraws(drawn, program.model.mesh, is_watched=is_watched) if drawn else None


@contextlib.contextmanager
def _unwatched(name: str, program: StaticProgram) -> Iterator[None]:
    """Run a compiled block without the modes that watch operators. Calls without draws have nothing left to take off,
    and are compared as a whole.
    """
    is_watched = extension.is_watched_alone()
    with extension.unwatched(), accounted(name, program.position) if is_watched else contextlib.nullcontext():
        yield


def _compiled(entry: _Entry) -> Callable:
    """Return a block's code compiled, under a code object of its own, which is what compilers keep their caches by."""
    forward = entry.function

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    code = run.__code__.replace(co_name=f"{type(entry.block).__name__}_forward")
    alone = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
    options = OPTIONS if BACKEND == "inductor" else None
    return torch.compile(alone, fullgraph=True, dynamic=False, backend=BACKEND, options=options)


class _CompiledSwaps(Swaps):
    """Swaps that are made anew when hooks have come or gone inside of blocks, a block has been refused, or a part of a
    batch begins or ends.
    """

    def __init__(self, renew: Callable[[], _CompiledSwaps], refused: set[str]):
        super().__init__()
        self.renew, self.refused = renew, refused
        self.tables: list[dict] = []
        self.made_for: tuple[int, int, bool] | None = None

    def watch(self, part: nn.Module) -> None:
        """Count the hooks of a part."""
        self.tables += _torch.module_hook_tables(part)

    def state(self) -> tuple[int, int, bool]:
        """Return what changes when something has changed."""
        return sum(map(len, self.tables)), len(self.refused), extension.is_watched()

    def put(self) -> None:
        """Set the values of the inside."""
        if self.made_for != self.state():
            new = self.renew()
            self.places, self.tables, self.made_for = new.places, new.tables, new.made_for
        super().put()


# ------------------------------------------------------------------------------------------------- blocks


def find_blocks(program: StaticProgram) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a program with their full names; of one with parts that no compiler sees, its other parts.

    A module that repeats nothing is one block itself.
    """
    found = list(_repeated(program.module, program.name))
    for name, block in found or [(program.name, program.module)]:
        yield from _visible(program, name, block)


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if isinstance(module, CONTAINERS) and any(True for _ in child.children()):
            yield join(name, child_name), child
        else:
            yield from _repeated(child, join(name, child_name))


def _visible(program: StaticProgram, name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    hidden = [region for region in program.opaque if is_inside(region, name)]
    is_split = any(stays_outside(part) for part in block.modules() if part is not block)
    if not hidden and not is_split and not isinstance(block, CONTAINERS):
        yield name, block
    elif name not in hidden:
        for child_name, child in block.named_children():
            yield from _visible(program, join(name, child_name), child)
