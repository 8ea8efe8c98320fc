"""Repeated key-value heads: where ranks are more than heads, or one matrix has fewer of them than of queries.

Grouped queries share heads: code expands each key-value head over its queries. The same values result if heads are
repeated earlier, and expanded less often later. With as many heads as ranks each rank has its own::

    k_proj.output (2 heads)             --> expand by 4 --> 8 heads of 8 queries      4 ranks cannot share 2 heads
    k_proj.output, repeated (4 heads)   --> expand by 2 --> 8 heads of 8 queries      each has 1, and 2 queries

What is repeated is an output of a module, found by following the heads back from the expansion. The numbers that code
has of heads, and of expansions, are attributes. A change of them is right if the module then runs the same operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ... import _torch
from ..._execution.patch import set_attributes
from ..._plan.attributes import attribute_names
from . import cuts
from .cuts import UNKNOWN, Cut
from .experts import Found
from .graph import Graph, Path, Sections, kind_of
from .spread import Group, Rules
from .trace import shadow, trace
from .trial import without_values

__all__ = ["Repeated", "repeat_heads"]

Key = tuple[str, str, Path]

EXPANSIONS = frozenset(f"aten.{name}" for name in ("expand", "clone", "view", "_unsafe_view", "unsqueeze", "alias"))
MAX_TRIALS = 24


@dataclass(frozen=True)
class Repeated:
    """A module whose heads are repeated.

    Attributes:
        module: a copy without data, with the changed attributes.
        graph: of its run.
        attributes: the changed attributes, by full name.
    """

    module: nn.Module
    graph: Graph
    attributes: dict[str, object]


@dataclass(frozen=True)
class _Heads:
    """Heads that code expands: their number, how often, and the module whose code it is."""

    number: int
    times: int
    module: str
    source: int
    dim: int


def repeat_heads(
    module: nn.Module,
    inputs: Mapping[str, object],
    rules: Rules,
    groups: list[Group],
    found: Found,
    degree: int,
) -> Repeated | None:
    """Return the module with repeated heads, where that lets ranks share queries; None where it does not.

    Args:
        module: as it is.
        inputs: of its run.
        rules: of the graph of that run.
        groups: that are cut without it.
        found: its experts.
        degree: number of ranks.
    """
    graph = rules.graph
    cut = {tensor for group in groups for tensor in group.cut}
    heads = [h for h in _expansions(graph) if h.source not in cut and h.number * h.times % degree == 0]
    kinds = {(h.number, h.times) for h in heads}
    if len(kinds) != 1:
        return None
    ((number, times),) = kinds
    origins: dict[Key, Cut] = {}
    for one in heads:
        for key, part in _origins(rules, one).items():
            known = origins.get(key, part)
            merged = cuts.merged(known, part)
            if merged is None:
                return None
            origins[key] = merged
    are_alone = {cuts.is_known(part) for part in origins.values()}
    if len(are_alone) != 1:
        return None
    is_merged = are_alone == {False}  # with queries
    copies = times if is_merged else math.lcm(number, degree) // number
    if times % copies or copies == 1:
        return None
    sizes = {graph.shape(one.source)[-1] for one in heads}
    sections = {key: _sections(part, min(sizes), copies) for key, part in origins.items()}
    return _with_attributes(module, inputs, graph, found, {h.module for h in heads}, (number, times, copies), sections)


def _expansions(graph: Graph) -> Iterator[_Heads]:
    """Yield the heads that code expands: a dim of size 1 behind one of heads, which are merged afterwards.

    Attention of torch with fewer keys than queries expands them inside.
    """
    for op in graph.ops:
        if op.name.startswith("aten._scaled_dot_product"):
            query, *others = op.inputs[:3]
            for tensor in others:
                number = graph.shape(tensor)[1]
                if number != graph.shape(query)[1] and graph.tensors[tensor].differentiable:
                    yield _Heads(number, graph.shape(query)[1] // number, op.module, tensor, 1)
        if op.boundary is not None or op.name != "aten.expand":
            continue
        before, after = graph.shape(op.inputs[0]), graph.shape(op.outputs[0])
        differing = [dim for dim, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        if len(before) != len(after) or len(differing) != 1 or not graph.tensors[op.inputs[0]].differentiable:
            continue
        (dim,) = differing
        if dim >= 2 and _merges(
            graph, op.outputs[0], (*after[: dim - 1], after[dim - 1] * after[dim], *after[dim + 1 :])
        ):
            yield _Heads(after[dim - 1], after[dim], op.module, op.inputs[0], dim - 1)


def _merges(graph: Graph, tensor: int, shape: tuple[int, ...]) -> bool:
    """Return whether views of a tensor have a shape."""
    for number in graph.tensors[tensor].users:
        op = graph.ops[number]
        if tensor not in op.inputs or op.name not in EXPANSIONS:
            continue
        if any(graph.shape(out) == shape or _merges(graph, out, shape) for out in op.outputs if out != tensor):
            return True
    return False


def _origins(rules: Rules, heads: _Heads) -> dict[Key, Cut]:
    """Return the outputs of modules that hold the heads, with the head of each feature as its rank."""
    graph: Graph = rules.graph
    found: dict[Key, Cut] = {}
    queue = [(heads.source, heads.dim, cuts.chunked(heads.number, heads.number))]
    seen = {heads.source}
    while queue:
        tensor, dim, cut = queue.pop()
        producer = graph.tensors[tensor].producer
        if producer is None:
            continue
        op = graph.ops[producer]
        if op.boundary is not None and op.boundary.side == "output" and dim == len(graph.shape(tensor)) - 1:
            found[op.boundary.key] = cut
            continue
        for (other, other_dim), there in rules[op].follow(graph, tensor, dim, cut) or ():
            if there and other in op.inputs and other not in seen and graph.tensors[other].differentiable:
                seen.add(other)
                queue.append((other, other_dim, there))
    return found


def _sections(cut: Cut, size: int, copies: int) -> Sections:
    """Return how many heads of ``size`` each section has, and how often they come."""
    found = []
    for is_query, runs in itertools.groupby(cut, key=lambda run: run[0] == UNKNOWN):
        found.append((sum(length for _, length in runs) // size, 1 if is_query else copies))
    return tuple(found)


def _with_attributes(
    module: nn.Module,
    inputs: Mapping[str, object],
    graph: Graph,
    found: Found,
    owners: set[str],
    sizes: tuple[int, int, int],
    sections: dict[Key, Sections],
) -> Repeated | None:
    """Return the module with attributes that go with the repeated heads; None if no attributes do."""
    number, times, copies = sizes
    known = attribute_names({name: part for name, part in module.named_modules() if name in owners})
    by_kind: dict[tuple[str, str, int], list[str]] = {}
    for full, (owner, path, value) in known.items():
        if type(value) is int and value in (times, number) and value > 1:
            by_kind.setdefault((kind_of(owner), path, value), []).append(full)
    changes = [
        (names, new)
        for (_, _, value), names in sorted(by_kind.items(), key=lambda item: (item[0][1].count("."), item[0][1]))
        for new in ([times // copies] if value == times else []) + ([number * copies] if value == number else [])
    ]
    subsets = itertools.chain.from_iterable(itertools.combinations(changes, count) for count in range(3))
    wanted = _operators(graph)
    for subset in itertools.islice(subsets, MAX_TRIALS):
        attributes = {name: new for names, new in subset for name in names}
        if len(attributes) < sum(len(names) for names, _ in subset):
            continue
        mode = _torch.fake_tensors()
        changed = shadow(module, mode)
        modules = dict(changed.named_modules())
        for name, value in attributes.items():
            owner, path, _ = known[name]
            set_attributes(modules[owner], {path: value})
        kept = shadow(changed, mode)
        try:
            new_graph = trace(changed, without_values(inputs, mode), mode, found.whole, sections)
        except Exception:
            continue
        if _operators(new_graph) == wanted:
            return Repeated(kept, new_graph, attributes)
    return None


def _operators(graph: Graph) -> list[object]:
    """Return the operators of a run and the sizes of its results, without expansions."""
    ops = [(op.module, op.name) for op in graph.ops if op.name not in EXPANSIONS and op.func is not None]
    return [*ops, *map(graph.shape, graph.results)]
