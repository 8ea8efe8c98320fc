"""Where gradients that are sums over ranks become whole, with the least communication.

In backward a whole tensor that meets a cut one gets a summand of its gradient on each rank. The sum may be taken at any
boundary further up, as long as no whole gradient is added before::

    q_proj, k_proj, v_proj <-- attention.input <-- norm.output <-- norm <-- residual stream
    three summands             one sum here        or here         not here: whole gradients arrive

Each tensor is on one of two sides: its gradient is a summand, or whole. Code without a boundary in it has one side.
Tensors that meet cut ones are on the first, results of the module and of code that is not linear in one operand on the
second. A boundary between both costs the bytes of its tensor. So the best choice is a minimum cut of this graph (Ford
and Fulkerson 1956; here by shortest augmenting paths, Edmonds and Karp 1972). Of equal ones it is the one nearest to
the whole side, at inputs before outputs: one boundary of a block, not one of each layer in it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from .graph import Graph, Op
from .rules import VIEWS
from .spread import Group

__all__ = ["pins_of"]

SOURCE, SINK = "summands", "whole"
INFINITE = float("inf")
OF_OUTPUT = 1 + 1e-6  # an output costs a little more


def pins_of(graph: Graph, groups: Sequence[Group]) -> list[Op] | None:
    """Return the boundaries where gradients of whole tensors become whole; None if there are none that suffice."""
    entries = [entry for group in groups for entry in group.entries]
    if not entries:
        return []
    cut = {tensor for group in groups for tensor in group.cut}
    summands = _summands(graph, groups)
    whole = {id(op) for group in groups for op in group.reduced + group.gathered}
    sides = _Sides(graph, cut | summands, whole, {id(op) for group in groups for op in group.sliced})
    found = sides.solve([tensor for tensor, _ in entries], strict=True)
    return sides.solve([tensor for tensor, _ in entries], strict=False) if found is None else found


def _summands(graph: Graph, groups: Iterable[Group]) -> set[int]:
    """Return the tensors between a sum over ranks and the boundary that reduces it."""
    found = {op.inputs[0] for group in groups for op in group.reduced}
    cut = {tensor for group in groups for tensor in group.cut}
    queue = list(found)
    while queue:
        producer = graph.tensors[queue.pop()].producer
        op = None if producer is None else graph.ops[producer]
        if op is None or any(tensor in cut for tensor in op.inputs):
            continue
        new = [t for t in op.inputs if t not in found and not graph.tensors[t].names]
        found.update(new)
        queue += new
    return found


class _Sides:
    """The graph of the two sides: classes of tensors that have one side, and boundaries between them.

    Args:
        graph: of the run.
        left_out: tensors that are not whole.
        becoming_whole: boundaries, by id, where such a tensor becomes whole.
        becoming_cut: boundaries, by id, where a whole tensor becomes cut; they make its gradient whole.
    """

    def __init__(self, graph: Graph, left_out: set[int], becoming_whole: set[int], becoming_cut: set[int]):
        self.graph = graph
        self._parents: dict[int, int] = {}
        self.boundaries: list[tuple[int, int, Op]] = []  # tensors below and above
        self.nonlinear: list[int] = []
        self.ends: list[int] = [t for t in graph.results if graph.tensors[t].differentiable]
        self.weights: list[int] = []
        self.reduced: list[int] = []
        of_root = [op for op in graph.ops if op.boundary and (op.boundary.module, op.boundary.side) == ("", "input")]
        self.ends += [op.inputs[0] for op in of_root if graph.tensors[op.inputs[0]].differentiable]
        for op in graph.ops:
            outputs = [t for t in op.outputs if graph.tensors[t].differentiable and t not in left_out]
            inputs = [t for t in op.inputs if graph.tensors[t].differentiable and t not in left_out]
            if id(op) in becoming_whole:
                self.reduced += outputs
            elif id(op) in becoming_cut:
                self.ends += inputs
            elif op.boundary is not None:
                self.boundaries += [(below, above, op) for below in outputs for above in inputs]
            elif any(t in left_out for t in (*op.inputs, *op.outputs)):
                continue  # it is cut, or takes an entry
            else:
                for tensor in (*outputs, *inputs):
                    self._join(tensor, (outputs or inputs)[0])
                if op.name not in VIEWS:
                    self.nonlinear += outputs
                self.weights += [t for t in inputs if graph.tensors[t].names]

    def _find(self, tensor: int) -> int:
        root = tensor
        while self._parents.get(root, root) != root:
            root = self._parents[root]
        while self._parents.get(tensor, tensor) != root:
            self._parents[tensor], tensor = root, self._parents[tensor]
        return root

    def _join(self, one: int, other: int) -> None:
        self._parents[self._find(one)] = self._find(other)

    def solve(self, entries: Iterable[int], *, strict: bool) -> list[Op] | None:
        """Return the boundaries of the best choice.

        Args:
            entries: tensors whose gradients are summands.
            strict: whether code that is more than views takes whole gradients only, where it has the choice.
        """
        capacity: dict[object, dict[object, float]] = defaultdict(lambda: defaultdict(float))
        for below, above, op in self.boundaries:
            one, other = self._find(below), self._find(above)
            if one != other:
                capacity[one][other] += self._bytes(below) * (OF_OUTPUT if op.boundary.side == "output" else 1)
                capacity[other][one] = INFINITE  # a whole gradient below is not added to a summand above
        for tensor in entries:
            capacity[SOURCE][self._find(tensor)] = INFINITE
        for tensor in self.ends:
            capacity[self._find(tensor)][SINK] = INFINITE
        for tensor in self.reduced:
            capacity[self._find(tensor)][SINK] += self._bytes(tensor)
        for tensor in dict.fromkeys(self.weights):
            capacity[self._find(tensor)][SINK] += self._bytes(tensor)
        forced = {self._find(t) for t in self.nonlinear}
        if not strict:
            forced -= self._bound_to(capacity)
        for root in forced:
            capacity[root][SINK] = INFINITE
        whole = _minimum_cut(capacity)
        if whole is None:
            return None
        return [
            op for below, above, op in self.boundaries if self._find(below) not in whole and self._find(above) in whole
        ]

    @staticmethod
    def _bound_to(capacity: dict[object, dict[object, float]]) -> set[object]:
        """Return the classes that have to be on the side of the summands."""
        found, queue = {SOURCE}, [SOURCE]
        while queue:
            for other, value in capacity[queue.pop()].items():
                if value == INFINITE and other not in found:
                    found.add(other)
                    queue.append(other)
        return found

    def _bytes(self, tensor: int) -> int:
        info = self.graph.tensors[tensor]
        return info.numel * info.itemsize


def _minimum_cut(capacity: dict[object, dict[object, float]]) -> set[object] | None:
    """Return the smallest set of nodes on the side of the sink of a minimum cut; None if every cut is infinite."""
    flow: dict[object, dict[object, float]] = defaultdict(dict)
    for node, others in list(capacity.items()):
        for other, value in others.items():
            flow[node][other] = value
            flow[other].setdefault(node, capacity[other].get(node, 0.0) if other in capacity else 0.0)
    while True:
        path = _path(flow)
        if path is None:
            break
        amount = min(flow[a][b] for a, b in path)
        if amount == INFINITE:
            return None
        for a, b in path:
            flow[a][b] -= amount
            flow[b][a] += amount
    whole, queue = {SINK}, deque([SINK])
    while queue:
        node = queue.popleft()
        for other in flow[node]:
            if other not in whole and flow[other].get(node, 0.0) > 1e-9:
                whole.add(other)
                queue.append(other)
    return whole


def _path(flow: dict[object, dict[object, float]]) -> list[tuple[object, object]] | None:
    """Return the edges of a shortest path with capacity from source to sink."""
    before: dict[object, object] = {SOURCE: SOURCE}
    queue = deque([SOURCE])
    while queue:
        node = queue.popleft()
        for other, value in flow[node].items():
            if value > 1e-9 and other not in before:
                before[other] = node
                if other == SINK:
                    return _edges(before)
                queue.append(other)
    return None


def _edges(before: dict[object, object]) -> list[tuple[object, object]]:
    edges, node = [], SINK
    while node != SOURCE:
        edges.append((before[node], node))
        node = before[node]
    return edges
