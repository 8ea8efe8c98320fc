"""Compiled mode: the repeated blocks of a static program run as compiled functions, each one graph.

A block is what a model repeats: an element of its outermost ``ModuleList`` or ``Sequential``. While the program is
open, the forward of each block is a function of ``torch.compile``; what is around the blocks runs as in static mode::

    program opens     block.forward           -> compiled function
                      hooks inside of blocks  -> the conversions of the boundaries, without names
    program closes    everything put back

Blocks that are alike share their compiled code: a compiler guards everything that it reads, so boundaries inside of
blocks must not read the name of their module. Their hooks are replaced by ones that know nothing but conversions, and
equal conversions are one function. Collectives are functional operators in the graph, so a compiler sees them.

Blocks that are not alike (another class, other hooks) never meet in one cache: each kind, for each set of signatures,
gets a code object of its own. So caches stay small, and no block runs code that was made for hooks of another.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._boundary import InputBoundary, OutputBoundary, fields_of, rebuild_fields, rebuild_sequence
from .._hooks import OwnHook
from .._placements import Repeat, is_placements
from ..errors import NotLocalFriendlyError
from ._conversions import identity
from ._names import is_inside, join
from ._swaps import Swaps

if TYPE_CHECKING:
    from ._program import StaticProgram

__all__ = ["CompiledBlocks"]

logger = logging.getLogger("vescale.dmodule")

BACKEND = "inductor"

# the same random numbers as without a compiler
OPTIONS = {"fallback_random": True}

LEAF = "placements"

Step = Callable[[Tensor], Tensor]
Table = dict[str, dict[torch.Size, Step]]
"""Path inside of a value -> local shape -> conversion."""


@dataclass
class CompiledBlocks:
    """Makes the swaps of one program and keeps what it has compiled.

    Attributes:
        functions: kind of block -> compiled function.
    """

    functions: dict[Hashable, Callable] = field(default_factory=dict)

    def swaps(self, program: StaticProgram) -> Swaps:
        """Return what changes while the program is open. Compiles nothing yet; the first call of a block does."""
        swaps, shared = Swaps(), {}
        for name, block in find_blocks(program):
            if (reason := _obstacle(program, name)) is not None:
                logger.info("%r stays in static mode: %s", name, reason)
                continue
            kind: list[Hashable] = [type(block), len(program.known)]
            for inner, part in block.named_modules():
                if part is not block:
                    hooks = _hooks(program, part, shared)
                    swaps.places += hooks
                    kind.append((inner, type(part), _hook_kinds(part, hooks)))
            own = vars(block).get("forward")
            forward = type(block).forward if own is None else own
            kind.append(id(forward))
            if (key := tuple(kind)) not in self.functions:
                self.functions[key] = _compiled(forward, block)
            compiled = self.functions[key]
            run = _bound(compiled, block) if own is None else compiled
            swaps.places.append((vars(block), "forward", run))
        return swaps


def _bound(compiled: Callable, block: nn.Module) -> Callable:
    return lambda *args, **kwargs: compiled(block, *args, **kwargs)


def _compiled(forward: Callable, block: nn.Module) -> Callable:
    """Return ``forward`` compiled, under a code object of its own, which is what compilers keep their caches by."""

    def run(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    code = run.__code__.replace(co_name=f"{type(block).__name__}_forward")
    alone = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
    options = OPTIONS if BACKEND == "inductor" else None
    return torch.compile(alone, fullgraph=True, dynamic=False, backend=BACKEND, options=options)


# ------------------------------------------------------------------------------------------------- blocks


def find_blocks(program: StaticProgram) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a program with their full names; of a block with eager parts, its parts without such."""
    found = list(_repeated(program.module, program.name))
    for name, block in found or [(program.name, program.module)]:
        yield from _without_regions(program, name, block)


def _repeated(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if isinstance(module, nn.ModuleList | nn.Sequential) and any(True for _ in child.children()):
            yield join(name, child_name), child
        else:
            yield from _repeated(child, join(name, child_name))


def _without_regions(program: StaticProgram, name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = [region for region in program.opaque if is_inside(region, name)]
    if not inside:
        yield name, block
    elif name not in inside:
        for child_name, child in block.named_children():
            yield from _without_regions(program, join(name, child_name), child)


def _obstacle(program: StaticProgram, name: str) -> str | None:
    drawing = [owner for owner in program.draws if is_inside(owner, name)]
    return f"{drawing[0]!r} draws random numbers for sharded tensors" if drawing else None


# ------------------------------------------------------------------------------------------------- hooks


def _hooks(program: StaticProgram, part: nn.Module, shared: dict[Hashable, Step]) -> list[tuple[dict, str, object]]:
    """Return the places of a part's hooks where some of them change."""
    places = []
    for table_name in ("_forward_pre_hooks", "_forward_hooks"):
        table = vars(part)[table_name]
        new = {key: _replaced(program, hook, shared) for key, hook in table.items()}
        if any(new[key] is not hook for key, hook in table.items()):
            kept = type(table)((key, hook) for key, hook in new.items() if hook is not None)
            places.append((vars(part), table_name, kept))
    return places


def _hook_kinds(part: nn.Module, places: list[tuple[dict, str, object]]) -> Hashable:
    """Return what tells the hooks of two parts apart: how many there are, and which are none of ours."""
    changed = {table_name: table for _, table_name, table in places}
    kinds = []
    for table_name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = changed.get(table_name, vars(part)[table_name]).values()
        kinds.append(tuple(type(h) if isinstance(h, _Inputs | _Output) else id(h) for h in hooks))
    return tuple(kinds)


def _replaced(program: StaticProgram, hook: object, shared: dict[Hashable, Step]) -> object | None:
    """Return the hook that stands in for one inside of a compiled block; None for those that only keep books."""
    if isinstance(hook, OwnHook):
        return None
    if isinstance(hook, OutputBoundary):
        return _Output(_leaves(hook.entry), _table(program, hook.where, shared))
    if isinstance(hook, InputBoundary) and hook.simple is not None:
        return _Inputs(
            [(at, arg, _leaves(entry), _table(program, where, shared)) for at, arg, entry, where in hook.simple]
        )
    return hook


def _table(program: StaticProgram, where: str, shared: dict[Hashable, Step]) -> Table:
    """Return the conversions of a boundary by the path inside of its value."""
    found: Table = {}
    for place, steps in program.steps.items():
        path = place[len(where) :]
        if place.startswith(where) and (not path or path[0] == " "):
            found[path] = {shape: shared.setdefault(getattr(s, "conversion", s), s) for shape, s in steps.items()}
    return found


class _Output:
    """Forward hook that converts what a module returns."""

    def __init__(self, entry: object, table: Table):
        self.entry, self.table = entry, table

    def __call__(self, _module: nn.Module, _args: tuple, output: object) -> object:
        return _place(output, self.entry, self.table, "")


class _Inputs:
    """Forward pre-hook that converts the arguments of a module: position, name, entry and conversions of each."""

    def __init__(self, arguments: list[tuple[int, str, object, Table]]):
        self.arguments = arguments

    def __call__(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        for position, name, entry, table in self.arguments:
            if position < len(args):
                args = (*args[:position], _place(args[position], entry, table, ""), *args[position + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: _place(kwargs[name], entry, table, "")}
        return args, kwargs


def _leaves(entry: object) -> object:
    """Return a plan entry with ``LEAF`` for placements, which a compiler need not look at."""
    if entry is None or isinstance(entry, Repeat):
        return entry
    if is_placements(entry):
        return LEAF
    if isinstance(entry, Mapping):
        return {key: _leaves(inner) for key, inner in entry.items()}
    return [_leaves(inner) for inner in entry]


def _place(value: object, entry: object, table: Table, path: str) -> object:
    """Convert the tensors of ``value`` that ``entry`` has leaves for; as ``_boundary.place``, without names."""
    if entry is None or value is None:
        return value
    if isinstance(entry, list) and not isinstance(value, tuple | list):
        return _place(value, entry[0], table, path)
    if isinstance(entry, dict):
        fields = fields_of(value)
        placed = {key: _place(fields[key], inner, table, f"{path} {key!r}") for key, inner in entry.items()}
        return rebuild_fields(value, placed)
    if isinstance(entry, list):
        placed = [_place(value[i], entry[i], table, f"{path} [{i}]") for i in range(len(entry))]
        return rebuild_sequence(value, [*placed, *value[len(entry) :]])
    return _converted(value if entry == LEAF else entry.apply(value), table, path)


def _converted(value: Tensor, table: Table, path: str) -> Tensor:
    step = table.get(path, {}).get(value.shape)
    if step is None:
        raise NotLocalFriendlyError(
            f"a value of local shape {tuple(value.shape)} came to a boundary inside of a compiled block, where "
            f"{[tuple(shape) for shape in table.get(path, {})]} are recorded; static mode names the boundary"
        )
    return value if step is identity else step(value)
