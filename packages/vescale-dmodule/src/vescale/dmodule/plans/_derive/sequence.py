"""Sequence parallelism: activations between the pairs of matrices lie over the ranks by positions of the sequence.

Sums of row-parallel matrices become shards of the sequence, and what enters column-parallel ones becomes whole there
(Korthikanti et al. 2022, section 4.2)::

    o_proj.output [sum -> shard]  -->  + residual [shard]  -->  norm [shard]  -->  mlp.input [shard -> whole]

So the cut of dim 1 spreads from these sums through the operators, as that of a feature does. It ends where gradients
become whole anyway, and at modules whose code is cut over features. A module that needs the whole sequence, such as a
router with its experts, gets it, and its result is cut again. Where the code around all blocks needs it, it becomes
whole at the boundary before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import nn

from . import cuts
from .graph import Graph, Op, kind_of
from .spread import Group, Refused, Rules, Spread

__all__ = ["cut_sequence"]

SEQUENCE = 1
MAX_ROUNDS = 16


def cut_sequence(
    rules: Rules, groups: Sequence[Group], pins: Iterable[Op], degree: int, modules: dict[str, nn.Module]
) -> Group:
    """Return the activations between groups that are cut over the sequence.

    Args:
        rules: of the operators of a graph.
        groups: pairs of matrices and vocabularies.
        pins: boundaries where gradients become whole.
        degree: number of ranks.
        modules: of the graph, by name.

    Raises:
        Refused: with the reason.
    """
    graph = rules.graph
    sums = [op for group in groups if not group.is_vocabulary for op in group.reduced]
    owners = [op.boundary.module for op in sums if op.boundary]
    ends = {op.number for op in (*pins, *sums)} | _around_blocks(graph, owners) | _into_pairs(graph, groups)
    whole: set[str] = set()
    first: Refused | None = None
    for _ in range(MAX_ROUNDS):
        run = Spread(rules, degree, modules, whole=whole, ends=ends)
        try:
            seeds = [op for op in sums if _is_activation(graph, op) and not _is_inside(op.boundary.module, whole)]
            if not seeds:
                raise Refused("no sum over ranks of shape (batch, sequence, features) crosses a boundary")
            for op in seeds:
                (tensor,) = op.outputs
                run.assign(tensor, SEQUENCE, cuts.chunked(graph.shape(tensor)[SEQUENCE], degree), op)
            run.go_on()
            return run.finished()
        except Refused as refusal:
            first = first or refusal
            if not _give_way(graph, refusal, owners, whole, ends, modules):
                raise first from None
    raise first or Refused("too many modules need the whole sequence")


def _give_way(
    graph: Graph,
    refusal: Refused,
    owners: Sequence[str],
    whole: set[str],
    ends: set[int],
    modules: dict[str, nn.Module],
) -> bool:
    """Let the module that refuses have whole tensors; return whether that changes anything."""
    if refusal.module is None:
        return False
    name = refusal.module
    while name and name in whole:
        name = name.rpartition(".")[0]
    if _is_around(name, owners):
        new = _before(graph, refusal.tensor) - ends
        ends |= new
        return bool(new)
    alike = {other for other in modules if kind_of(other) == kind_of(name)}
    whole -= {other for other in whole if _is_inside(other, alike)}
    whole |= alike
    return True


def _before(graph: Graph, tensor: int | None) -> set[int]:
    """Return the last boundaries that a tensor, or what it was made of, crossed."""
    found: set[int] = set()
    if tensor is None:
        return found
    seen, queue = {tensor}, deque([tensor])
    while queue:
        producer = graph.tensors[queue.popleft()].producer
        if producer is None:
            continue
        op = graph.ops[producer]
        if op.boundary is not None:
            found.add(op.number)
            continue
        new = [t for t in op.inputs if t not in seen]
        seen.update(new)
        queue.extend(new)
    return found


def _around_blocks(graph: Graph, owners: Sequence[str]) -> set[int]:
    """Return the boundaries to results, and to code around all blocks, which may count positions."""
    modules = {op.module for op in graph.ops if op.boundary is None and _is_around(op.module, owners)}
    found = set()
    for op in graph.ops:
        if op.boundary is None:
            continue
        (outside,) = op.outputs if op.boundary.side == "output" else op.inputs
        users = [graph.ops[number] for number in graph.tensors[outside].users]
        is_result = (op.boundary.module, op.boundary.side) == ("", "output")
        if is_result or any(user.boundary is None and user.module in modules for user in users):
            found.add(op.number)
    return found


def _into_pairs(graph: Graph, groups: Sequence[Group]) -> set[int]:
    """Return the inputs of modules whose own code is cut over features; it may count positions, too."""
    cut = {tensor for group in groups for tensor in group.cut}
    own = {op.module for op in graph.ops if op.boundary is None and not cut.isdisjoint((*op.inputs, *op.outputs))}
    boundaries = [op for op in graph.ops if op.boundary is not None and op.boundary.side == "input"]
    return {op.number for op in boundaries if op.boundary and op.boundary.module in own}


def _is_activation(graph: Graph, op: Op) -> bool:
    return len(graph.shape(op.outputs[0])) == SEQUENCE + 2


def _is_inside(name: str, owners: Iterable[str]) -> bool:
    return any(not owner or name == owner or name.startswith(f"{owner}.") for owner in owners)


def _is_around(name: str, owners: Sequence[str]) -> bool:
    """Return whether a module is around several blocks: all modules with sums, or two of one kind."""
    inside = [owner for owner in owners if _is_inside(owner, {name})]
    return len(inside) == len(owners) or len({kind_of(owner) for owner in inside}) < len(set(inside))
