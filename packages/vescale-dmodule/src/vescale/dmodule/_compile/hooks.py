"""Boundaries inside compiled blocks: the conversions of a boundary, without the names that differ between blocks.

A compiler guards the values that traced code reads, and blocks share compiled code if their guards agree. A boundary of
static mode finds its conversion by the name of its module, which differs between blocks. So inside compiled blocks
other hooks replace the boundaries: they hold the recorded conversions, and equal conversions are one function in all
blocks. Hooks of this package that only record are removed; user hooks stay.

A hook of another package may have an attribute ``_vescale_in_graph``. ``"absent"`` removes the hook from compiled code.
A module with a hook that is ``"outside"`` (ZeRO 3 gathers and frees its parameters there) is never called inside
compiled code: it becomes a block, and the modules around it do not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor, nn

from .._boundary.hooks import InputBoundary, OutputBoundary
from .._boundary.values import fields_of, rebuild_fields, rebuild_sequence
from .._execution.module_hooks import OwnHook
from .._execution.patch import Row
from .._plan.placements import Repeat, is_placements
from .._static.direct_calls import Steps
from .._static.movement.conversions import identity
from ..errors import NotLocalFriendlyError

__all__ = ["compiled_hooks", "hook_kinds", "stays_outside"]

LEAF = "placements"
IN_GRAPH = "_vescale_in_graph"

Step = Callable[[Tensor], Tensor]
Table = dict[str, dict[torch.Size, Step]]
"""Path inside a value -> local shape -> conversion."""


def compiled_hooks(steps: Steps, part: nn.Module, shared: dict[Hashable, Step]) -> list[Row]:
    """Return the rows that replace the hook tables of a part; none for a table without boundaries.

    Args:
        steps: the recorded conversions.
        part: a module inside a block.
        shared: the one function of each conversion; this adds to it.
    """
    rows = []
    for table_name in ("_forward_pre_hooks", "_forward_hooks"):
        table = vars(part)[table_name]
        new = {key: _replaced(steps, hook, shared) for key, hook in table.items()}
        if any(new[key] is not hook for key, hook in table.items()):
            kept = type(table)((key, hook) for key, hook in new.items() if hook is not None)
            rows.append((vars(part), table_name, kept))
    return rows


def stays_outside(part: nn.Module) -> bool:
    """Return whether a module must not be called inside compiled code."""
    tables = (vars(part)["_forward_pre_hooks"], vars(part)["_forward_hooks"])
    return any(getattr(hook, IN_GRAPH, None) == "outside" for table in tables for hook in table.values())


def hook_kinds(part: nn.Module, rows: list[Row]) -> Hashable:
    """Return a key that is equal for two parts with equal hooks: types of our hooks, identities of all others."""
    changed = {table_name: table for _, table_name, table in rows}
    kinds = []
    for table_name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = changed.get(table_name, vars(part)[table_name]).values()
        kinds.append(tuple(type(h) if isinstance(h, _Inputs | _Output) else id(h) for h in hooks))
    return tuple(kinds)


def _replaced(steps: Steps, hook: object, shared: dict[Hashable, Step]) -> object | None:
    """Return the hook that replaces ``hook`` inside a compiled block; None removes it."""
    if isinstance(hook, OwnHook) or getattr(hook, IN_GRAPH, None) == "absent":
        return None
    if isinstance(hook, OutputBoundary):
        return _Output(_leaves(hook.entry), _table(steps, hook.where, shared))
    if isinstance(hook, InputBoundary) and hook.simple is not None:
        return _Inputs(
            [(at, arg, _leaves(entry), _table(steps, where, shared)) for at, arg, entry, where in hook.simple]
        )
    return hook


def _table(steps: Steps, where: str, shared: dict[Hashable, Step]) -> Table:
    """Return the conversions of a boundary by the path inside its value."""
    found: Table = {}
    for boundary, by_shape in steps.items():
        path = boundary[len(where) :]
        if boundary.startswith(where) and (not path or path[0] == " "):
            steps_here = {shape: shared.setdefault(getattr(s, "conversion", s), s) for shape, s in by_shape.items()}
            found[path] = {shape: _in_graph(step) for shape, step in steps_here.items()}
    return found


def _in_graph(step: Step) -> Step:
    """Return a conversion as one operator for the compiler's front end.

    The front end skips its Python code, whose tracing takes as long as that of the rest of the block. Later stages
    trace the collectives inside it, for kernels and for backward.
    """
    return step if step is identity else torch.compiler.allow_in_graph(step)


class _Output:
    """Forward hook that converts the results of a module."""

    def __init__(self, entry: object, table: Table):
        self.entry, self.table = entry, table

    def __call__(self, _module: nn.Module, _args: tuple, output: object) -> object:
        return _place(output, self.entry, self.table, "")


class _Inputs:
    """Forward pre-hook that converts the arguments of a module: position, name, entry and conversions of each."""

    def __init__(self, arguments: list[tuple[int, str, object, Table]]):
        self.arguments = arguments

    def __call__(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        done: list[tuple[object, object]] = []
        for position, name, entry, table in self.arguments:
            if position < len(args):
                args = (*args[:position], _place_once(done, args[position], entry, table), *args[position + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: _place_once(done, kwargs[name], entry, table)}
        return args, kwargs


def _place_once(done: list[tuple[object, object]], value: object, entry: object, table: Table) -> object:
    """Convert an argument; one without conversions of its own is an earlier one, passed again."""
    if not table:
        for before, placed in done:
            if before is value:
                return placed
    placed = _place(value, entry, table, "")
    done.append((value, placed))
    return placed


def _leaves(entry: object) -> object:
    """Return a plan entry with ``LEAF`` in place of placements, so that a compiler guards no placements."""
    if entry is None or isinstance(entry, Repeat):
        return entry
    if is_placements(entry):
        return LEAF
    if isinstance(entry, Mapping):
        return {key: _leaves(inner) for key, inner in entry.items()}
    return [_leaves(inner) for inner in entry]


def _place(value: object, entry: object, table: Table, path: str) -> object:
    """Convert the tensors of ``value`` that have leaves in ``entry``; as ``_boundary.convert.place``, without names."""
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
            f"boundary inside a compiled block: expected one of the local shapes {[*map(tuple, table.get(path, {}))]}, "
            f"got {tuple(value.shape)}; run the model in mode 'static', whose error names the boundary"
        )
    return value if step is identity else step(value)
