"""Rehearse a plan on local shapes: the module's own code with the parameters of one rank, as static mode runs it.

Each value at a boundary must have the shape that a rank's part of the recorded one has. Where code has other sizes
(a number of heads in a view, a width in a split), attributes are searched that hold them, and divided. A module for
which none helps runs in eager mode inside a static model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ... import _torch
from ..._execution.heads import install_heads
from ..._execution.patch import set_attributes
from ..._plan.attributes import attribute_names
from .assemble import Draft
from .cuts import local_size
from .experts import install_stand_ins
from .graph import Boundary, Graph, Op, kind_of
from .spread import Group, Refused
from .trace import BoundaryHooks, read_as_zeros, shadow

__all__ = ["settle_local_code"]

MAX_CHANGES = 24
MAX_TOGETHER = 3


class _Differs(Exception):  # noqa: N818 - it is caught here
    """A value has another shape than this rank's part of the recorded one; the argument is the module at fault."""


@dataclass
class _Failure:
    """Where a rehearsal ended: the module and its call, and how many values crossed boundaries before."""

    module: str
    call: int
    crossed: int
    text: str


@dataclass
class Rehearsed:
    """What is rehearsed: a module, its recorded run, and the plan.

    Attributes:
        module: real, on the meta device, or deferred.
        inputs: arguments by name.
        graph: the recorded run.
        groups: what is cut in it.
        draft: the plan; it receives attributes and modules in eager mode.
        degree: number of ranks.
        whole: modules whose code depends on values; others stand in for them.
    """

    module: nn.Module
    inputs: Mapping[str, object]
    graph: Graph
    groups: Sequence[Group]
    draft: Draft
    degree: int
    whole: Iterable[str]
    expected: dict[Boundary, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.graph.ops:
            if op.boundary is not None:
                (before,), (after,) = op.inputs, op.outputs
                if op.boundary.key in self.graph.repeats:
                    (before,) = self.graph.ops[self.graph.tensors[before].producer or 0].inputs
                self.expected[op.boundary] = before, after
        self.ops: dict[tuple[str, int], list[Op]] = {}
        for op in self.graph.ops:
            if op.boundary is None and op.func is not None:
                self.ops.setdefault((op.module, op.call), []).append(op)
        self.cut = {tensor: value for group in self.groups for tensor, value in group.cut.items()}

    def local_shape(self, tensor: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part of a recorded tensor."""
        shape = list(self.graph.shape(tensor))
        if tensor in self.cut:
            dim, cut = self.cut[tensor]
            shape[dim] = local_size(cut, rank)
        return tuple(shape)

    def ranks(self) -> list[int]:
        """Return ranks with all sizes that occur."""
        last = self.degree - 1
        uneven = any(local_size(cut, 0) != local_size(cut, last) for _, cut in self.cut.values())
        return [0, last] if uneven else [0]


def settle_local_code(run: Rehearsed) -> None:
    """Add to the plan what lets the module's code run on local tensors.

    Raises:
        Refused: the code does not, with the reason.
    """
    for rank in run.ranks():
        for _ in range(MAX_CHANGES):
            failure = _rehearse(run, rank, [])
            if failure is None:
                break
            changes = _search(run, rank, failure)
            if changes:
                run.draft.attributes += changes
                continue
            if failure.module in run.draft.eager or not failure.module:
                raise Refused(f"on local tensors {failure.module or 'the root module'!r} fails: {failure.text}")
            alike = [name for name, _ in run.module.named_modules() if kind_of(name) == kind_of(failure.module)]
            run.draft.eager += alike
            inside = tuple(f"{name}." for name in alike)
            run.draft.attributes = [name for name in run.draft.attributes if not name.startswith(inside)]
        else:
            raise Refused("its code has more sizes of full tensors than can be replaced one by one")


# ------------------------------------------------------------------------------------------------- attributes


def _search(run: Rehearsed, rank: int, failure: _Failure) -> list[str]:
    """Return attributes, of the failing module or of one around it, with which the failing call ends well."""
    owner = failure.module
    while True:
        for names in _subsets(_candidates(run, owner)):
            changes = [other for name in names for other in _alike(run, name)]
            outcome = _rehearse(run, rank, changes, until=failure)
            if outcome is None:
                return changes
        if not owner:
            return []
        owner = owner.rpartition(".")[0]
        if not any(_touches(run, group, owner) for group in run.groups) or not owner:
            return []


def _touches(run: Rehearsed, group: Group, name: str) -> bool:
    return any(op.module == name for op in group.ops(run.graph))


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, MAX_TOGETHER + 1):
        yield from itertools.combinations(names, count)


def _candidates(run: Rehearsed, owner: str) -> list[str]:
    """Return the attributes of a module that hold the size of a cut dim, those of the module itself first."""
    prefix = f"{owner}." if owner else ""
    sizes = {
        run.graph.shape(tensor)[run.cut[tensor][0]]
        for op in run.graph.ops
        if op.module == owner or op.module.startswith(prefix)
        for tensor in (*op.inputs, *op.outputs)
        if tensor in run.cut
    }
    part = run.module.get_submodule(owner)
    found = [
        (path.count("."), name)
        for name, (_, path, value) in attribute_names({owner: part}).items()
        if type(value) is int and value in sizes and value % run.degree == 0 and name not in run.draft.attributes
    ]
    return [name for _, name in sorted(found, key=lambda pair: pair[0])][:8]


def _alike(run: Rehearsed, name: str) -> Iterable[str]:
    """Return the attributes of all modules of one kind, with equal values."""
    owner = next(o for o in _owners(name) if o in dict(run.module.named_modules()))
    path = name[len(owner) + 1 :] if owner else name
    part = run.module.get_submodule(owner)
    value = attribute_names({owner: part})[name][2]
    for other, module in run.module.named_modules():
        if kind_of(other) == kind_of(owner) and type(module) is type(part):
            known = attribute_names({other: module}).get(f"{other}.{path}" if other else path)
            if known is not None and known[2] == value:
                yield f"{other}.{path}" if other else path


def _owners(name: str) -> Iterator[str]:
    parts = name.split(".")
    for stop in range(len(parts) - 1, -1, -1):
        yield ".".join(parts[:stop])


# ------------------------------------------------------------------------------------------------- a rehearsal


class _Ended(Exception):  # noqa: N818 - it is caught here
    """The call that failed before has ended well."""


def _rehearse(run: Rehearsed, rank: int, changes: Sequence[str], until: _Failure | None = None) -> _Failure | None:
    """Run the module on local shapes; return where it fails, None if it does not.

    Args:
        run: what is rehearsed.
        rank: whose part.
        changes: attributes to divide, in addition to those of the plan.
        until: end well as soon as the call ends that failed there.
    """
    mode = _torch.fake_tensors()
    module = shadow(run.module, mode)
    modules = dict(module.named_modules())
    eager = tuple(run.draft.eager)
    for name in (*run.draft.attributes, *changes):
        owner = next(o for o in _owners(name) if o in modules)
        value = attribute_names({owner: modules[owner]})[name][2]
        set_attributes(modules[owner], {name[len(owner) + 1 :] if owner else name: value // run.degree})
    install_heads(module)
    install_stand_ins(module, run.whole)
    _localize(run, module, rank, mode, eager)
    crossing = _Crossing(run, rank, eager, until)
    hooks = crossing.hooks = BoundaryHooks(module, crossing)
    try:
        with _torch.fake_only(mode), _Operators(run, rank, eager, crossing):
            module(**_fakes(run.inputs))
    except _Ended:
        return None
    except _Differs as error:
        name = str(error.args[0])
        call = next((number for other, number in reversed(hooks.running) if other == name), 0)
        return _Failure(name, call, crossing.count, str(error.args[1]))
    except Exception as error:  # of any kind: it is code on sizes that it does not expect
        name, call = hooks.running[-1] if hooks.running else ("", 0)
        return _Failure(name, call, crossing.count, str(error).partition("\n")[0])
    return None


def _fakes(inputs: Mapping[str, object]) -> dict[str, object]:
    def fake(value: object) -> object:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu") if isinstance(value, Tensor) else value

    return _torch.tree_map(fake, dict(inputs))


def _localize(
    run: Rehearsed, module: nn.Module, rank: int, mode: _torch.FakeTensorMode, eager: tuple[str, ...]
) -> None:
    """Give each module the parameters of a rank; embeddings look up in all rows, as their local forward does."""
    shapes = {
        name: run.local_shape(tensor, rank)
        for group in run.groups
        for tensor in group.parameters
        for name in run.graph.tensors[tensor].names
    }
    for owner, part in module.named_modules(remove_duplicate=False):
        for table in _torch.tensor_tables(part):
            for key, tensor in table.items():
                name = f"{owner}.{key}" if owner else key
                if name not in shapes or _is_inside(owner, eager):
                    continue
                if isinstance(part, nn.Embedding) and shapes[name][1] == tensor.shape[1]:
                    continue
                with mode:
                    local = torch.empty(shapes[name], dtype=tensor.dtype)
                    table[key] = nn.Parameter(local) if isinstance(tensor, nn.Parameter) else local


def _is_inside(name: str, owners: Iterable[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


class _Crossing:
    """Compares values at boundaries with the recorded ones, and moves those that the plan moves."""

    def __init__(self, run: Rehearsed, rank: int, eager: tuple[str, ...], until: _Failure | None):
        self.run, self.rank, self.eager, self.until = run, rank, eager, until
        self.hooks: BoundaryHooks
        self.count = 0
        self.is_busy = False

    def __call__(self, tensor: Tensor, boundary: Boundary) -> Tensor:
        self.count += 1
        caller = self.hooks.running[-1][0] if self.hooks.running else ""
        owner = boundary.module if boundary.side == "output" else caller
        numbers = self.run.expected.get(boundary)
        if numbers is None:
            raise _Differs(owner, f"{boundary.module!r} is called in another way than with full tensors")
        before, after = self._shapes(boundary, *numbers)
        if tuple(tensor.shape) != before:
            raise _Differs(owner, f"a value of shape {tuple(tensor.shape)} at {boundary.module!r}, expected {before}")
        failed = self.until and (self.until.module, self.until.call, "output")
        if failed == (boundary.module, boundary.call, boundary.side) and self.count >= self.until.crossed:
            raise _Ended
        is_moved = (boundary.module, boundary.side, boundary.path) in self.run.draft.boundaries
        is_edge = boundary.module in self.eager
        if before == after or not (is_moved or is_edge):
            return tensor
        self.is_busy = True
        try:
            return tensor.new_empty(after)
        finally:
            self.is_busy = False

    def _shapes(self, boundary: Boundary, before: int, after: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes on both sides; inside of a module in eager mode values have their full shapes."""
        inside = _is_inside(boundary.module, self.eager)
        edge = boundary.module in self.eager
        full = self.run.graph.shape
        if inside and not edge:
            return full(before), full(after)
        local = self.run.local_shape(before, self.rank), self.run.local_shape(after, self.rank)
        if not edge:
            return local
        return (local[0], full(after)) if boundary.side == "input" else (full(before), local[1])


class _Operators(_torch.TorchDispatchMode):
    """Compares the results of operators with the recorded ones, call by call of a module.

    A view that takes a number of heads from elsewhere may have a wrong shape, and a later one the right one again.
    Where code runs other operators than recorded, the rest of that call is not compared.
    """

    def __init__(self, run: Rehearsed, rank: int, eager: tuple[str, ...], crossing: _Crossing):
        super().__init__()
        self.run, self.rank, self.eager, self.crossing = run, rank, eager, crossing
        self.places: dict[tuple[str, int], int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = read_as_zeros(func, args, kwargs or {})
        running = self.crossing.hooks.running[-1] if self.crossing.hooks.running else ("", 0)
        if func.namespace == "aten" and not self.crossing.is_busy and not _is_inside(running[0], self.eager):
            self._compare(running, func, result)
        return result

    def _compare(self, running: tuple[str, int], func: Callable, result: object) -> None:
        ops, place = self.run.ops.get(running, []), self.places.get(running, 0)
        if place >= len(ops):
            return
        op = ops[place]
        shapes = [tuple(t.shape) for t in _torch.tree_leaves(result) if isinstance(t, Tensor)]
        if op.func is not func or len(shapes) != len(op.outputs):
            self.places[running] = len(ops)
            return
        self.places[running] = place + 1
        expected = [self.run.local_shape(tensor, self.rank) for tensor in op.outputs]
        has_cut = any(tensor in self.run.cut for tensor in op.outputs)
        if has_cut and shapes != expected:
            what = op.name.removeprefix("aten.").strip("_")
            raise _Differs(running[0], f"{what} returns shapes {shapes}, expected {expected}")
