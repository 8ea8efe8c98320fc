"""Spread a cut: from one dim of one tensor to all tensors that have to be cut with it.

A group begins at a matrix product whose inner dim is cut, the row-parallel one. Operators link the cut to the features
of its operand, from there back to the outputs of the matrices that made these features, the column-parallel ones, and
to everything beside the way: biases, norms of single heads, tables of position biases. It ends where a matrix meets an
operand that is whole (the entries) and where a product sums over the cut dim (the sums)::

    x --> q_proj [cut] --> heads [cut] --> attention [cut] --> o_proj [sum] --> boundary: reduced
    x --> k_proj [cut] --> heads [cut] ----^

An operator that needs all of a cut dim on every rank refuses the group. So does a sum that no boundary reduces before
other code uses it. A module without matrices beside those of the group, such as a norm over the features of all heads,
runs whole instead: what enters it is gathered, and what leaves it is cut in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Shard

from ..._static.local_modules import summed_dim
from . import cuts
from .cuts import Cut
from .graph import Boundary, Graph, Op
from .rules import SCALES, VIEWS, Rule, rule_of

__all__ = ["Group", "Refused", "Rules", "Spread", "spread"]


class Refused(Exception):  # noqa: N818 - it is caught here, and its text is a reason
    """A cut cannot be spread; the text says why.

    Args:
        reason: the text.
        module: the module whose code needs all of a cut dim, if that is the reason.
        tensor: which it needs all of.

    Attributes:
        reached: the tensors that were cut before.
    """

    def __init__(self, reason: str, module: str | None = None, tensor: int | None = None):
        super().__init__(reason)
        self.module, self.tensor = module, tensor
        self.reached: set[int] = set()


class Rules:
    """The rules of all operators of a graph, made when they are needed.

    Attributes:
        crossings: the boundaries of each call of a module.
        refused: why a cut cannot be spread from a place, while some modules run whole; the same holds for all places
            that it has reached. So the matrices around a residual stream refuse its cut once, not layer by layer.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._rules: dict[int, Rule] = {}
        self.refused: dict[tuple[frozenset[str], bool, int, tuple[int, Cut]], Refused] = {}
        self.crossings: dict[tuple[str, int], list[Op]] = {}
        for op in graph.ops:
            if op.boundary is not None:
                self.crossings.setdefault((op.boundary.module, op.boundary.call), []).append(op)

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
        sliced: boundaries where a whole tensor becomes cut, and its gradient whole.
        made: tensors that code makes whole and uses as cut ones; local code must make a part.
        is_vocabulary: whether embeddings and heads are cut over the vocabulary.
        num_bytes: of the values that are reduced and gathered, and of those whose gradients are.
    """

    cut: dict[int, tuple[int, Cut]]
    parameters: dict[int, Placement] = field(default_factory=dict)
    entries: list[tuple[int, Op]] = field(default_factory=list)
    reduced: list[Op] = field(default_factory=list)
    gathered: list[Op] = field(default_factory=list)
    sliced: list[Op] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    is_vocabulary: bool = False
    num_bytes: int = 0

    def numel(self, graph: Graph) -> int:
        """Return how many elements the sharded parameters have."""
        return sum(graph.tensors[tensor].numel for tensor in self.parameters)

    def slice_of(self, graph: Graph, op: Op, degree: int) -> Placement | None:
        """Return the placement to which a boundary cuts a whole tensor; None if there is none for every batch."""
        dim, cut = self.cut[op.outputs[0]]
        placement = cuts.placement_of(cut, dim, degree)
        is_of_features = op.boundary is not None and op.boundary.key in graph.repeats
        return placement if type(placement) is Shard or is_of_features else None

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
    first: Refused | None = None
    whole: frozenset[str] = frozenset()
    begin = [(tensor, (dim, cuts.chunked(rules.graph.shape(tensor)[dim], degree))) for tensor, dim in seeds]
    while True:
        refusal = rules.refused.get((whole, gathers, *begin[0]))
        if refusal is None:
            run = Spread(rules, degree, modules, whole=whole, gathers=gathers)
            try:
                for tensor, (dim, cut) in begin:
                    run.assign(tensor, dim, cut, None)
                run.go_on()
                return run.finished()
            except Refused as refused:
                refusal = refused
                refusal.reached = set(run.cut)
                rules.refused |= {(whole, gathers, *place): refusal for place in run.cut.items()}
        first = first or refusal
        if refusal.module is None or refusal.module in whole or not _may_run_whole(modules, refusal.module):
            raise first from None
        whole |= {refusal.module}


def _may_run_whole(modules: dict[str, nn.Module], name: str) -> bool:
    return bool(name) and all(parameter.ndim < 2 for parameter in modules[name].parameters())


class Spread:
    """The cut of some dims, as it spreads.

    Args:
        rules: of the operators of a graph.
        degree: number of ranks.
        modules: of the graph, by name.
        whole: modules that run whole.
        gathers: whether a cut tensor becomes whole at the next boundary, instead of further on.
        ends: boundaries, by number, where the cut ends; if there are any, it also ends at inputs of modules that are
            cut on their inside only, and no module that runs whole passes it on.
    """

    def __init__(
        self,
        rules: Rules,
        degree: int,
        modules: dict[str, nn.Module],
        *,
        whole: Collection[str] = (),
        gathers: bool = False,
        ends: Collection[int] = (),
    ):
        self.graph, self.rules, self.degree, self.modules = rules.graph, rules, degree, modules
        self.whole, self.gathers, self.ends = whole, gathers, ends
        self.beside = set() if ends else {name.rpartition(".")[0] for name in whole}
        self.cut: dict[int, tuple[int, Cut]] = {}
        self.queue: deque[int] = deque()
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
        for owner in self.beside:
            if info.is_parameter and owner and not any(name.startswith(f"{owner}.") for name in info.names):
                raise Refused(f"a module in {owner!r} needs all of a dim on every rank that is cut outside, too")
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
        if op.boundary is not None and self._ends_at(op, tensor, dim, cut, is_output=is_output):
            return
        followed = self.rules[op].follow(self.graph, tensor, dim, cut)
        if followed is None:
            if is_output and not self.graph.tensors[tensor].differentiable:
                self.made[tensor] = op
                return
            if not cuts.is_known(cut):  # it may need what all ranks have; if not, the whole cut comes here, too
                return
            reason = f"{self._at(op)} needs all of {self._named(op, tensor)} dim {dim} on every rank"
            raise Refused(reason, op.module, tensor)
        for (other, other_dim), there in followed:
            if there is None:
                raise Refused(
                    f"{self._at(op)} takes dim {dim} of shape {self.graph.shape(tensor)} apart, or puts it together, "
                    f"such that {self.degree} ranks do not have whole parts of it",
                    op.module,
                    tensor,
                )
            if all(owner == cuts.UNKNOWN for owner, _ in there):
                continue
            self.assign(other, other_dim, there, op)

    def _ends_at(self, op: Op, tensor: int, dim: int, cut: Cut, *, is_output: bool) -> bool:
        """Return whether the cut of a tensor ends at a boundary."""
        boundary: Boundary = op.boundary
        if op.number in self.ends or boundary.key in self.graph.repeats or (not is_output and self.gathers):
            return True
        if (boundary.module, boundary.side) == ("", "output"):  # results of the module are whole
            return True
        if boundary.module in self.whole:
            if is_output == (boundary.side == "input"):
                raise Refused(f"{boundary.module!r}, which runs whole, makes a tensor that is cut", boundary.module)
            if not self.ends:
                self._around(op, tensor, dim, cut)
            return True
        return is_output and ((bool(self.ends) and boundary.side == "input") or self._may_slice(op))

    def _around(self, op: Op, tensor: int, dim: int, cut: Cut) -> None:
        """Cut what enters a module that runs whole as what leaves it, and the reverse."""
        boundary: Boundary = op.boundary
        for other in self.rules.crossings[boundary.module, boundary.call]:
            (outside,) = other.outputs if boundary.side == "input" else other.inputs
            is_other = other.boundary is not None and other.boundary.side != boundary.side
            is_alike = self.graph.shape(outside) == self.graph.shape(tensor)
            if is_other and is_alike and self.graph.tensors[outside].differentiable:
                self.assign(outside, dim, cut, op)

    def _may_slice(self, op: Op) -> bool:
        """Return whether a boundary may cut what crosses it: a tensor without gradient, which is whole before."""
        (source,) = op.inputs
        info = self.graph.tensors[source]
        return not info.differentiable and not info.names and source not in self.cut

    # --------------------------------------------------------------------------------------------- the group

    def finished(self) -> Group:
        """Return the group, checked."""
        group = Group(self.cut, is_vocabulary=self.gathers)
        for tensor, (dim, cut) in self.cut.items():
            info = self.graph.tensors[tensor]
            if not cuts.is_known(cut):
                raise Refused(
                    f"some part of {self._named(None, tensor)} dim {dim} is used by all ranks, another by one, as in "
                    "queries with one key-value head beside them; no placement gives ranks both"
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
        for op in group.sliced:
            boundary: Boundary = op.boundary
            if self.graph.tensors[op.inputs[0]].differentiable and group.slice_of(self.graph, op, self.degree) is None:
                where = f"its part of a value at {boundary.module!r}"
                is_merged = cuts.placement_of(*reversed(self.cut[op.outputs[0]]), self.degree) is not None
                why = ", whose dims are merged, for every size of them" if is_merged else ""
                raise Refused(f"no placement gives each rank {where}{why}", boundary.module)
        group.made = [tensor for tensor in self.made if tensor in self.cut]
        whole = {tensor for tensor, _ in group.entries}
        moved = [op.inputs[0] for op in (*group.reduced, *group.gathered)]
        moved += [op.inputs[0] for op in group.sliced if self.graph.tensors[op.inputs[0]].differentiable]
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
                if user not in group.reduced and self._is_used(user):
                    group.reduced.append(user)
            elif self._is_linear(user, tensor) or self._adds_bias(user, tensor):
                for output in user.outputs:
                    if output != tensor:
                        self._reduce(group, output, user)
            else:
                raise Refused(f"{self._at(user)} uses a sum over ranks before a boundary", op.module, tensor)

    def _is_used(self, op: Op) -> bool:
        """Return whether code uses what crosses a boundary."""
        (output,) = op.outputs
        return output in self.graph.results or self.graph.tensors[output].users != [op.number]

    def _is_linear(self, op: Op, tensor: int) -> bool:
        """Return whether an operator moves or scales summands, alike on every rank."""
        if op.name in VIEWS:
            return op.inputs == [tensor]
        is_constant = all(not self.graph.tensors[t].differentiable and t not in self.cut for t in op.inputs[1:])
        return op.name in SCALES and op.inputs[0] == tensor and is_constant

    def _is_added_once(self, op: Op, tensor: int) -> bool:
        """Return whether a whole operand of a product is the bias that one rank adds."""
        return op.name in ("aten.addmm", "aten.baddbmm") and tensor == op.inputs[0] and self._is_bias(tensor)

    def _adds_bias(self, op: Op, tensor: int) -> bool:
        others = [other for other in op.inputs if other != tensor]
        return op.name in ("aten.add", "aten.add_") and len(others) == 1 and self._is_bias(others[0])

    def _is_bias(self, tensor: int) -> bool:
        """Return whether a tensor is the bias of a layer whose weight is cut over what it sums."""
        for name in self.graph.tensors[tensor].names:
            owner, _, key = name.rpartition(".")
            weight = next((t for t in self.cut if f"{owner}.weight".lstrip(".") in self.graph.tensors[t].names), None)
            if key == "bias" and weight is not None and self.cut[weight][0] == summed_dim(self.modules[owner]):
                return True
        return False

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
