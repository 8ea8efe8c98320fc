"""Choose groups of matrices to cut together.

    vocabulary     an embedding of the module's integer inputs, and the heads that are as wide: their rows
    pairs          column- and row-parallel matrices, from every product whose inner dim may be cut

Groups that share tensors exclude each other. The one with the fewest bytes to communicate for each sharded element
comes first; of equal ones the one that shards more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from .graph import Graph, Op
from .spread import Group, Refused, Rules, spread

__all__ = ["Choice", "choose"]

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution")
FOLLOWS_IDS = frozenset(
    f"aten.{name}"
    for name in "view alias clone _to_copy masked_fill where clamp add sub slice expand mul ne eq".split()  # noqa: SIM905
)


@dataclass
class Choice:
    """The chosen groups of a graph.

    Attributes:
        groups: in the order of their choice.
        reasons: of matrices that no group takes, by name.
        of_others: reasons of matrices whose operands they make, by name.
    """

    groups: list[Group] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    of_others: dict[str, str] = field(default_factory=dict)


def choose(rules: Rules, inputs: set[int], degree: int, modules: dict[str, nn.Module]) -> Choice:
    """Choose the groups of a graph.

    Args:
        rules: of the operators of the graph of a run.
        inputs: tensors that are arguments of the module.
        degree: number of ranks.
        modules: of the graph, by name.
    """
    graph, choice = rules.graph, Choice()
    for group in _vocabularies(graph, rules, inputs, degree, modules, choice):
        if _is_free(group, choice.groups):
            choice.groups.append(group)
    found = sorted(
        _pairs(graph, rules, degree, modules, choice),
        key=lambda group: (group.num_bytes / group.numel(graph), -group.numel(graph), min(group.cut)),
    )
    for group in found:
        if _is_free(group, choice.groups):
            choice.groups.append(group)
    return choice


def _is_free(group: Group, others: list[Group]) -> bool:
    return all(group.cut.keys().isdisjoint(other.cut) for other in others)


# ------------------------------------------------------------------------------------------------- vocabularies


def _vocabularies(
    graph: Graph, rules: Rules, inputs: set[int], degree: int, modules: dict[str, nn.Module], choice: Choice
) -> Iterator[Group]:
    """Yield groups of embeddings and heads that are cut over the vocabulary."""
    sizes, tables = set(), {}
    for op in graph.ops:
        if op.name == "aten.embedding" and graph.tensors[op.inputs[0]].is_parameter:
            table = op.inputs[0]
            rows, columns = graph.shape(table)
            if table not in tables and rows >= max(columns, 2 * degree) and _comes_from(graph, op.inputs[1], inputs):
                tables[table] = rows
    for table, rows in tables.items():
        try:
            yield spread(rules, [(table, 0)], degree, modules, gathers=True)
            sizes.add(rows)
        except Refused as refusal:
            choice.reasons[graph.tensors[table].names[0]] = str(refusal)
    for op in graph.ops:
        weight = _weight_of(graph, op)
        if weight is None or op.name not in ("aten.mm", "aten.addmm") or graph.shape(op.outputs[0])[1] not in sizes:
            continue
        if not _is_last(graph, op):
            continue
        try:
            yield spread(rules, [(op.outputs[0], 1)], degree, modules, gathers=True)
        except Refused as refusal:
            choice.reasons.setdefault(graph.tensors[weight].names[0], str(refusal))


def _is_last(graph: Graph, op: Op) -> bool:
    """Return whether no further product follows from the result of a product."""
    seen, queue = set(op.outputs), deque(op.outputs)
    while queue:
        for number in graph.tensors[queue.popleft()].users:
            user = graph.ops[number]
            if user is not op and user.name in PRODUCTS:
                return False
            new = [tensor for tensor in user.outputs if tensor not in seen]
            seen.update(new)
            queue.extend(new)
    return True


def _comes_from(graph: Graph, tensor: int, inputs: set[int]) -> bool:
    """Return whether a tensor of ids is an argument of the module, perhaps with some of them replaced."""
    seen, queue = {tensor}, deque([tensor])
    while queue:
        current = queue.popleft()
        if current in inputs:
            return True
        producer = graph.tensors[current].producer
        if producer is None or graph.ops[producer].name not in FOLLOWS_IDS:
            continue
        new = [t for t in graph.ops[producer].inputs if t not in seen]
        seen.update(new)
        queue.extend(new)
    return False


# ------------------------------------------------------------------------------------------------- pairs


def _pairs(graph: Graph, rules: Rules, degree: int, modules: dict[str, nn.Module], choice: Choice) -> Iterator[Group]:
    """Yield the groups that begin at products with a parameter."""
    seen: set[frozenset[int]] = set()
    for op in graph.ops:
        weight = _weight_of(graph, op)
        if weight is None:
            continue
        summed = rules[op].summed
        if not summed:
            continue
        try:
            group = spread(rules, summed[0], degree, modules)
        except Refused as refusal:
            choice.reasons.setdefault(graph.tensors[weight].names[0], str(refusal))
            reached = (graph.tensors[tensor] for tensor in refusal.reached - {weight})
            for name in (name for info in reached if info.is_parameter for name in info.names[:1]):
                choice.of_others.setdefault(name, str(refusal))
            continue
        key = frozenset(group.cut)
        if group.parameters and (group.entries or group.sliced) and key not in seen:
            seen.add(key)
            yield group


def _weight_of(graph: Graph, op: Op) -> int | None:
    """Return the parameter that a product multiplies with, perhaps through views of it."""
    if op.name not in PRODUCTS:
        return None
    operands = op.inputs[:2] if op.name == "aten.convolution" else op.inputs[-2:]
    for tensor in operands:
        current: int | None = tensor
        while current is not None:
            info = graph.tensors[current]
            if info.is_parameter:
                return current
            producer = None if info.producer is None else graph.ops[info.producer]
            current = producer.inputs[0] if producer is not None and len(producer.inputs) == 1 else None
    return None
