"""Spread a cut: from one dim of one tensor to all tensors that have to be cut with it.

A group begins at a matrix product whose inner dim is cut, the row-parallel one. Operators link the cut to the features
of its operand, from there back to the outputs of the matrices that made these features, the column-parallel ones, and
to everything beside the way: biases, norms of single heads, tables of position biases. It ends where a matrix meets an
operand that is whole (the entries) and where a product sums over the cut dim (the sums)::

    x --> q_proj [cut] --> heads [cut] --> attention [cut] --> o_proj [sum] --> boundary: reduced
    x --> k_proj [cut] --> heads [cut] ----^

An operator that needs all of a cut dim on every rank refuses the group. So does a sum that no boundary reduces before
other code uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement

from . import cuts
from .cuts import Cut
from .graph import Graph, Op
from .rules import SCALES, VIEWS, Rule, rule_of

__all__ = ["Group", "Refused", "Rules", "spread"]

BIASED = ("Linear", "Conv1D")
"""Classes of modules whose bias one rank adds to the sum, see ``_static.local_modules``."""


class Refused(Exception):  # noqa: N818 - it is caught here, and its text is a reason
    """A cut cannot be spread; the text says why."""


class Rules:
    """The rules of all operators of a graph, made when they are needed."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._rules: dict[int, Rule] = {}

    def __getitem__(self, op: Op) -> Rule:
        if op.number not in self._rules:
            self._rules[op.number] = rule_of(self.graph, op)
        return self._rules[op.number]


@dataclass
class Group:
    """Tensors that are cut together, and what a plan says of them.

    Attributes:
        cut: the dim and the cut of each of them.
        parameters: placements of parameters and buffers, by tensor.
        entries: pairs of a whole tensor and the operator in which it meets cut ones; its gradient there is a summand.
        reduced: boundaries where a sum over ranks becomes whole.
        gathered: boundaries where a cut tensor becomes whole.
        sliced: boundaries where a whole tensor without gradient becomes cut.
        made: tensors that code makes whole and uses as cut ones; local code must make a part.
        num_bytes: of the values that are reduced and gathered, and of those whose gradients are.
    """

    cut: dict[int, tuple[int, Cut]]
    parameters: dict[int, Placement] = field(default_factory=dict)
    entries: list[tuple[int, Op]] = field(default_factory=list)
    reduced: list[Op] = field(default_factory=list)
    gathered: list[Op] = field(default_factory=list)
    sliced: list[Op] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    num_bytes: int = 0

    def numel(self, graph: Graph) -> int:
        """Return how many elements the sharded parameters have."""
        return sum(graph.tensors[tensor].numel for tensor in self.parameters)

    def ops(self, graph: Graph) -> Iterable[Op]:
        """Return the operators that take or return a cut tensor, in order."""
        numbers = {number for tensor in self.cut for number in graph.tensors[tensor].users}
        return [graph.ops[number] for number in sorted(numbers)]


def spread(
    rules: Rules,
    seeds: Iterable[tuple[int, int]],
    degree: int,
    modules: dict[str, nn.Module],
    *,
    gathers: bool = False,
) -> Group:
    """Return the group of tensors that are cut together with some dims.

    Args:
        rules: of the operators of a graph.
        seeds: tensors and their dims, which are cut in contiguous chunks.
        degree: number of ranks.
        modules: of the graph, by name.
        gathers: whether a cut tensor becomes whole at the next boundary, instead of further on.

    Raises:
        Refused: with the reason.
    """
    run = _Spread(rules, degree, modules, gathers=gathers)
    for tensor, dim in seeds:
        run.assign(tensor, dim, cuts.chunked(rules.graph.shape(tensor)[dim], degree), None)
    run.go_on()
    return run.finished()


class _Spread:
    def __init__(self, rules: Rules, degree: int, modules: dict[str, nn.Module], *, gathers: bool):
        self.graph, self.rules, self.degree, self.modules, self.gathers = (
            rules.graph,
            rules,
            degree,
            modules,
            gathers,
        )
        self.cut: dict[int, tuple[int, Cut]] = {}
        self.queue: deque[int] = deque()
        self.stops: dict[int, Op] = {}  # tensors that are whole before an operator that slices them
        self.made: dict[int, Op | None] = {}

    def assign(self, tensor: int, dim: int, cut: Cut, op: Op | None) -> None:
        """Note that a dim of a tensor is cut."""
        info = self.graph.tensors[tensor]
        before = self.cut.get(tensor)
        if before is not None and before[0] != dim:
            raise Refused(f"{self._at(op)} would cut two dims of a tensor of shape {info.shape}")
        known = cut if before is None else cuts.merged(before[1], cut)
        if known is None:
            raise Refused(f"{self._at(op)} needs other parts of a tensor of shape {info.shape} than other code")
        if cuts.is_known(known) and any(not cuts.local_size(known, rank) for rank in range(self.degree)):
            raise Refused(f"a dim of {info.shape[dim]} elements is too small for {self.degree} ranks")
        if before is None or known != before[1]:
            self.cut[tensor] = dim, known
            self.queue.append(tensor)

    def go_on(self) -> None:
        while self.queue:
            tensor = self.queue.popleft()
            dim, cut = self.cut[tensor]
            for number in self.graph.tensors[tensor].users:
                self._through(self.graph.ops[number], tensor, dim, cut)

    def _through(self, op: Op, tensor: int, dim: int, cut: Cut) -> None:
        """Spread the cut of one tensor through one operator."""
        is_output = tensor in op.outputs and tensor not in op.inputs
        if op.boundary is not None:
            if not is_output and self.gathers:
                return
            if is_output and self._may_slice(op):
                return
        followed = self.rules[op].follow(self.graph, tensor, dim, cut)
        if followed is None:
            if is_output and not self.graph.tensors[tensor].differentiable:
                self.made[tensor] = op
                return
            raise Refused(f"{self._at(op)} needs all of {self._named(op, tensor)} dim {dim} on every rank")
        for (other, other_dim), there in followed:
            if there is None:
                raise Refused(
                    f"{self._at(op)} takes dim {dim} of shape {self.graph.shape(tensor)} apart, or puts it together, "
                    f"such that {self.degree} ranks do not have whole parts of it"
                )
            if all(owner == cuts.UNKNOWN for owner, _ in there):
                continue
            self.assign(other, other_dim, there, op)

    def _may_slice(self, op: Op) -> bool:
        """Return whether a boundary may cut what crosses it: a tensor without gradient, which is whole before."""
        (source,) = op.inputs
        info = self.graph.tensors[source]
        return not info.differentiable and not info.names and source not in self.cut

    # --------------------------------------------------------------------------------------------- the group

    def finished(self) -> Group:
        """Return the group, checked."""
        group = Group(self.cut)
        for tensor, (dim, cut) in self.cut.items():
            info = self.graph.tensors[tensor]
            if not cuts.is_known(cut):
                raise Refused(
                    f"some part of {self._named(None, tensor)} dim {dim} is used by all ranks, another by one"
                )
            if info.names:
                placement = cuts.placement_of(cut, dim, self.degree)
                if placement is None:
                    raise Refused(f"no placement gives each rank its part of {info.names[0]!r} dim {dim}")
                group.parameters[tensor] = placement
            elif info.producer is None:
                self.made[tensor] = None
        for op in group.ops(self.graph):
            self._finish(group, op)
        group.made = [tensor for tensor in self.made if tensor in self.cut]
        whole = {tensor for tensor, _ in group.entries}
        moved = [op.inputs[0] for op in (*group.reduced, *group.gathered)]
        group.num_bytes = sum(
            self.graph.tensors[tensor].numel * self.graph.tensors[tensor].itemsize for tensor in (*whole, *moved)
        )
        return group

    def _finish(self, group: Group, op: Op) -> None:
        """Note what an operator with cut tensors does to whole ones."""
        rule = self.rules[op]
        is_sum = any(t in self.cut and rule.sums(t, self.cut[t][0]) for t in op.inputs)
        if op.boundary is not None:
            is_cut, becomes_cut = op.inputs[0] in self.cut, op.outputs[0] in self.cut
            if is_cut != becomes_cut:
                (group.gathered if is_cut else group.sliced).append(op)
            return
        whole = [t for t in dict.fromkeys(op.inputs) if t not in self.cut and self.graph.tensors[t].differentiable]
        if is_sum:
            for tensor in whole:
                if not self._is_added_once(op, tensor):
                    raise Refused(f"{self._at(op)} adds a whole tensor to each summand")
            for output in op.outputs:
                self._reduce(group, output, op)
        else:
            group.entries += [(tensor, op) for tensor in whole]

    def _reduce(self, group: Group, tensor: int, op: Op) -> None:
        """Follow a sum over ranks to the boundaries where it becomes whole."""
        if tensor in self.graph.results:
            raise Refused(f"{self._at(op)} returns a sum over ranks that no boundary reduces")
        for number in self.graph.tensors[tensor].users:
            user = self.graph.ops[number]
            if tensor in user.outputs and tensor not in user.inputs:
                continue
            if user.boundary is not None:
                if user not in group.reduced:
                    group.reduced.append(user)
            elif self._is_linear(user, tensor) or self._adds_bias(user, tensor):
                for output in user.outputs:
                    if output != tensor:
                        self._reduce(group, output, user)
            else:
                raise Refused(f"{self._at(user)} uses a sum over ranks before a boundary")

    def _is_linear(self, op: Op, tensor: int) -> bool:
        """Return whether an operator moves or scales summands, alike on every rank."""
        if op.name in VIEWS:
            return op.inputs == [tensor]
        is_constant = all(not self.graph.tensors[t].differentiable and t not in self.cut for t in op.inputs[1:])
        return op.name in SCALES and op.inputs[0] == tensor and is_constant

    def _is_added_once(self, op: Op, tensor: int) -> bool:
        """Return whether a whole operand of a product is the bias that one rank adds."""
        return op.name in ("aten.addmm", "aten.baddbmm") and tensor == op.inputs[0] and self._is_bias(op, tensor)

    def _adds_bias(self, op: Op, tensor: int) -> bool:
        others = [other for other in op.inputs if other != tensor]
        return op.name in ("aten.add", "aten.add_") and len(others) == 1 and self._is_bias(op, others[0])

    def _is_bias(self, op: Op, tensor: int) -> bool:
        """Return whether a tensor is the bias of the module that runs, which has a class with such a bias."""
        names = self.graph.tensors[tensor].names
        kinds = {kind.__name__ for kind in type(self.modules[op.module]).__mro__}
        return f"{op.module}.bias" in names and not kinds.isdisjoint(BIASED)

    # --------------------------------------------------------------------------------------------- reasons

    def _at(self, op: Op | None) -> str:
        if op is None:
            return "the plan"
        what = op.name.removeprefix("aten.").strip("_")
        return f"{what} in {op.module!r}" if op.module else f"{what} in the root module"

    def _named(self, op: Op | None, tensor: int) -> str:
        del op
        info = self.graph.tensors[tensor]
        return repr(info.names[0]) if info.names else f"a tensor of shape {info.shape},"
