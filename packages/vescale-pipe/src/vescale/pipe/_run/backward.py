"""The backward of one micro-batch on one stage, and the accumulation of the step's gradients.

Each stage holds one autograd graph per micro-batch. Its roots are the sent values, and the loss on the last stage. Its
inputs are the received values and the stage's parameters. ``StageBackward`` computes the gradients of the inputs from
those of the roots: all at once (B), or those of the received values (I) and later those of the parameters (W).
Parameter gradients are summed in the order of micro-batches, as in a gradient-accumulation loop.

A value that several stages use gets its gradient through them: the last one sends it to the one before, which adds its
own, and so on to the value's home. So gradients are added in reverse order of the uses, as in one process.

The sums reach the parameters in the user's ``loss.backward()``; see ``connect``.

Note [Gradients of weights apart]
Nodes of the graph lead to received values, to parameters, or to both. I runs those that lead to received values. Where
such a node also leads to nodes that lead to parameters alone, the gradients that enter it are kept. W runs it again
from there for what leaves it to these nodes, and then runs these nodes, for all of the stage at once::

    loss --> mm --> mm --> received value          I:  mm --> mm -->
              |      |                             W:  mm and mm again, each for what goes down; then t and t
              t      t
              |      |
              W2     W1

W adds the gradients of one parameter in the order of the whole backward, since autograd orders nodes by their age. That
needs nodes that are entered once. What is entered several times (a weight without a transposition, used twice), or from
a node written in Python (``autograd.Function``), which computes all of its gradients when it runs, is computed in I.

A hook on a tensor would run in I and again in W, though without effect on gradients, and a checkpoint would compute its
forward twice. Stages that had either when they were recorded compute all gradients in I, and W only adds; so do those
with parameters whose memory is freed between uses, as with ZeRO 3 (``docs/protocols.md``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .._torch import graph_task_id, tensor_hooks

Gradients = Sequence[torch.Tensor | None]
StandIns = Sequence[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]
_PYTHON: Any = torch.autograd.function.BackwardCFunction  # the class of nodes of autograd.Function


@dataclass
class Boundary:
    """The values that a stage sent and received in one micro-batch, latest use first, by the index of the transfer.

    Only those that require a gradient: the sent tensors, and the graph edges of received ones.
    """

    sent: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    received: list[tuple[int, GradientEdge]] = field(default_factory=list)

    def add_sent(self, index: int, tensor: torch.Tensor) -> None:
        """Keep a sent value until its backward."""
        self.sent.insert(0, (index, tensor))

    def add_received(self, index: int, edge: GradientEdge) -> None:
        """Keep the graph edge of a received value's gradient until its backward."""
        self.received.insert(0, (index, edge))


class _Receive(torch.autograd.Function):
    """Make a received tensor the output of a graph node, so it can be written in place as in one process."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        del anchor
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        del ctx, gradient
        return None, None


def attach(tensor: torch.Tensor) -> tuple[torch.Tensor, GradientEdge]:
    """Return a received tensor that requires a gradient, and the graph edge of its gradient."""
    with torch.enable_grad():
        tensor = _Receive.apply(_anchor(), tensor)
    return tensor, get_gradient_edge(tensor)


@functools.cache
def _anchor() -> torch.Tensor:
    """Return what lets functions require a gradient that have no other input that does."""
    return torch.zeros((), device="cpu", requires_grad=True)


class StageBackward:
    """The backward of one micro-batch on one stage; see Note [Gradients of weights apart].

    Args:
        roots: sent values, received ones that later stages use, and the loss, with their gradients.
        received: the edges of the received values.
        parameters: those of the stage that require gradients.
        ends: keeps the nodes of leaves, which are the same in all micro-batches of a step as long as they are kept.
    """

    def __init__(
        self,
        roots: Sequence[tuple[GradientEdge, torch.Tensor]],
        received: Sequence[GradientEdge],
        parameters: Sequence[torch.Tensor],
        ends: dict[torch.Tensor, Node],
    ) -> None:
        self._ends = ends
        self._roots, self._received = list(roots), tuple(received)
        self._leaves = _Leaves(parameters)
        self._found: dict[torch.Tensor, torch.Tensor | None] = {}  # gradients of parameters
        self._cut: _Cut | None = None
        self._entered: dict[Node, Gradients] = {}

    def run(self) -> tuple[Gradients, Gradients]:
        """Return the gradients of the received values and of the parameters."""
        leaves = self._leaves.each
        found = self._run((*self._received, *leaves), keep=False)
        received, weights = found[: len(self._received)], found[len(self._received) :]
        if self._leaves.are_parameters:
            return received, weights
        return received, self._leaves.gradients(dict(zip(leaves, weights, strict=True)))

    def run_inputs(self, *, whole: bool) -> Gradients:
        """Return the gradients of the received values.

        Args:
            whole: whether to compute those of the parameters now, too.
        """
        cut = None if whole else _Cut([edge for edge, _ in self._roots], self._received, self._nodes())
        now = self._leaves.each if cut is None else cut.now
        handles = [] if cut is None else [node.register_prehook(self._keeper(node)) for node in cut.exits]
        try:
            found = self._run((*self._received, *now), keep=cut is not None)
        finally:
            for handle in handles:
                handle.remove()
        self._cut, count = cut, len(self._received)
        self._found = dict(zip(now, found[count:], strict=True))
        if cut is None:
            self._roots = []
        return found[:count]

    def run_weights(self) -> Gradients:
        """Return the gradients of the parameters, after ``run_inputs``."""
        if self._cut is not None:
            roots = [root for root in self._roots if root[0].node in self._cut.apart]
            for node, edges in self._cut.exits.items():
                kept = self._entered.pop(node, ())
                entered = [(GradientEdge(node, i), gradient) for i, gradient in enumerate(kept) if gradient is not None]
                # hooks on the tensor have made these what they are, and would change them once more
                handle = node.register_prehook(lambda _, kept=kept: kept)
                left = zip(edges, _gradients(entered, edges), strict=True)
                handle.remove()
                roots.extend((edge, gradient) for edge, gradient in left if gradient is not None)
            later = self._cut.later
            self._found.update(zip(later, _gradients(roots, later), strict=True))
        self._roots, self._cut = [], None
        return self._leaves.gradients(self._found)

    def _nodes(self) -> dict[Node, torch.Tensor]:
        for leaf in self._leaves.each:
            if leaf not in self._ends:
                self._ends[leaf] = get_gradient_edge(leaf).node
        return {self._ends[leaf]: leaf for leaf in self._leaves.each}

    def _run(self, inputs: Sequence[Any], *, keep: bool) -> Gradients:
        return _gradients(self._roots, inputs, keep=keep)

    def _keeper(self, node: Node) -> Any:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self._entered[node] = gradients

        return keep


def _gradients(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]], inputs: Sequence[Any], *, keep: bool = False
) -> Gradients:
    if not roots or not inputs:
        return [None] * len(inputs)
    edges, gradients = zip(*roots, strict=True)
    return torch.autograd.grad(edges, inputs, gradients, allow_unused=True, retain_graph=keep)


class _Leaves:
    """The leaves of the graph whose gradients are those of parameters: each itself, and what stands in for it.

    Modules in static mode of vescale-dmodule compute with other leaves (``docs/protocols.md``).

    Attributes:
        each: all leaves.
        are_parameters: whether they are the parameters themselves.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._of = [(parameter, stand_ins(parameter)) for parameter in parameters]
        self.are_parameters = not any(others for _, others in self._of)
        self.each = tuple(parameters)
        if not self.are_parameters:
            self.each = tuple(leaf for own, others in self._of for leaf in (own, *(other for other, _ in others)))

    def gradients(self, found: Mapping[torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the parameters from those of the leaves."""
        return [self._gradient(found, own, others) for own, others in self._of]

    def _gradient(
        self, found: Mapping[torch.Tensor, torch.Tensor | None], own: torch.Tensor, others: StandIns
    ) -> torch.Tensor | None:
        total = found.get(own)
        for leaf, of_parameter in others:
            local = found.get(leaf)
            if local is not None:
                gradient = of_parameter(local)
                total = gradient if total is None else total + gradient
        return total


def stand_ins(parameter: torch.Tensor) -> StandIns:
    """Return the leaves that stand in for a parameter, each with what makes its gradients those of the parameter."""
    offered = getattr(parameter, "_vescale_gradients", None)
    return offered.leaves() if offered else []


class _Cut:
    """Where the backward of the weights leaves that of the inputs.

    Attributes:
        exits: the nodes to run again for the weights, and where gradients leave each of them to weights alone.
        apart: roots that lead to weights alone.
        later: the parameters whose gradients are left to W.
        now: all others.
    """

    def __init__(
        self, roots: Sequence[GradientEdge], received: Iterable[GradientEdge], parameters: Mapping[Node, torch.Tensor]
    ) -> None:
        order = _topological([root.node for root in roots])
        to_inputs = _leading_to({edge.node for edge in received}, order)
        only_weights = _leading_to(parameters.keys(), order) - to_inputs
        entries = dict.fromkeys((root.node for root in roots if root.node in only_weights), 1)
        exits: dict[Node, list[GradientEdge]] = {}
        refused: set[Node] = set()
        groups = _Groups(only_weights)
        for node, edges in order.items():
            for end, output in edges:
                if end not in only_weights:
                    continue
                entries[end] = entries.get(end, 0) + 1
                if node in only_weights:
                    groups.join(node, end)
                elif node in to_inputs:
                    exits.setdefault(node, []).append(GradientEdge(end, output))
                    if isinstance(node, _PYTHON):
                        refused.add(end)
        entered = {edge.node for edges in exits.values() for edge in edges}
        entered.update(root.node for root in roots if root.node in only_weights)
        refused.update(node for node in entered if entries[node] > 1)
        refused = {groups.of(node) for node in refused}
        self.exits = {
            node: kept
            for node, edges in exits.items()
            if (kept := [edge for edge in edges if groups.of(edge.node) not in refused])
        }
        self.apart = {node for node in entered if groups.of(node) not in refused}
        later = {node for node in parameters if node in only_weights and groups.of(node) not in refused}
        self.later = [parameter for node, parameter in parameters.items() if node in later]
        self.now = [parameter for node, parameter in parameters.items() if node not in later]


class _Groups:
    """Nodes that are connected (union-find)."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._parent = {node: node for node in nodes}

    def of(self, node: Node) -> Node:
        """Return the node that stands for the group of a node."""
        while (parent := self._parent[node]) is not node:
            self._parent[node] = node = self._parent[parent]
        return node

    def join(self, one: Node, other: Node) -> None:
        """Make one group of two."""
        self._parent[self.of(one)] = self.of(other)


_Edges = list[tuple[Node, int]]


def _topological(starts: Iterable[Node]) -> dict[Node, _Edges]:
    """Return the nodes of a graph and what they lead to, each node after those."""
    order: dict[Node, _Edges] = {}
    seen: dict[Node, _Edges] = {}
    path: list[Node] = []
    stack: list[Node | None] = list(starts)  # None: the last node of the path has no more to follow
    while stack:
        node = stack.pop()
        if node is None:
            node = path.pop()
            order[node] = seen[node]
        elif node not in seen:
            seen[node] = edges = [(end, output) for end, output in node.next_functions if end is not None]
            path.append(node)
            stack.append(None)
            stack += [following for following, _ in edges]
    return order


def _leading_to(ends: Collection[Node], order: Mapping[Node, _Edges]) -> set[Node]:
    found: set[Node] = set()
    for node, edges in order.items():
        if node in ends or not found.isdisjoint([following for following, _ in edges]):
            found.add(node)
    return found


class GradientSum:
    """The sum of parameter gradients over micro-batches; None for unused parameters.

    Args:
        parameters: those of each stage; only those that require gradients count.
    """

    def __init__(self, parameters: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self.of_stage = {stage: tuple(p for p in own if p.requires_grad) for stage, own in parameters.items()}
        self.parameters = tuple(parameter for own in self.of_stage.values() for parameter in own)
        self._sums = {stage: _StageSum(len(own)) for stage, own in self.of_stage.items()}
        self._places: dict[torch.Tensor, list[tuple[int, int]]] = {}  # of a parameter: its stages, and where there
        for stage, own in self.of_stage.items():
            for i, parameter in enumerate(own):
                self._places.setdefault(parameter, []).append((stage, i))

    @property
    def totals(self) -> list[torch.Tensor | None]:
        """The sums, in the order of the parameters."""
        return [total for own in self._sums.values() for total in own.totals]

    def add(self, stage: int, microbatch: int, gradients: Gradients) -> int:
        """Add one micro-batch's gradients of a stage, and return how many micro-batches its sums have.

        They are summed in the order of micro-batches.
        """
        return self._sums[stage].add(microbatch, gradients)

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of a parameter, and forget it."""
        found = list(self.of(parameter).values())
        self.replace(parameter, None)
        return found[0] if found else None

    def of(self, parameter: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the sums of a parameter, by the stages that have computed one."""
        places = self._places.get(parameter, ())
        return {stage: total for stage, i in places if (total := self._sums[stage].totals[i]) is not None}

    def replace(self, parameter: torch.Tensor, total: torch.Tensor | None) -> None:
        """Let the sum of a parameter be this one, whatever its stages have computed."""
        for stage, i in self._places.get(parameter, ()):
            self._sums[stage].totals[i], total = total, None


class _StageSum:
    def __init__(self, count: int) -> None:
        self.totals: list[torch.Tensor | None] = [None] * count
        self._owned = [False] * count
        self._waiting: dict[int, Gradients] = {}
        self._next = 0

    def add(self, microbatch: int, gradients: Gradients) -> int:
        self._waiting[microbatch] = gradients
        while self._next in self._waiting:
            self._add(self._waiting.pop(self._next))
            self._next += 1
        return self._next

    def _add(self, gradients: Gradients) -> None:
        for i, gradient in enumerate(gradients):
            total = self.totals[i]
            if gradient is None:
                continue
            if total is None:
                self.totals[i] = gradient
            elif self._owned[i]:
                total.add_(gradient)
            else:  # autograd may return one tensor for two parameters: the first sum allocates a new one
                self.totals[i] = total + gradient
                self._owned[i] = True


# --- accumulation into the parameters ---


class _Accumulate(torch.autograd.Function):
    """Pass ``grad_output * sum`` to the parameters when the step's loss is differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        gate: HookGate,
        reductions: Reduced,
        anchor: torch.Tensor,
        totals: list,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        del anchor
        ctx.gate, ctx.reductions, ctx.count = gate, reductions, len(parameters)
        # a second backward fails unless retain_graph is set, as in plain torch
        ctx.save_for_backward(*totals, *reductions.means)
        reductions.means = []
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        ctx.gate.graph_task = graph_task_id()
        totals, means = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        ctx.reductions.deliver(means, gradient)
        return None, None, None, None, None, *(None if total is None else total * gradient for total in totals)


class Reduced(Protocol):
    """Gradients that need no more than to be added; see `reductions.Reductions`."""

    means: list[torch.Tensor]

    def __contains__(self, parameter: torch.Tensor) -> bool: ...
    def deliver(self, means: Sequence[torch.Tensor], factor: torch.Tensor) -> None: ...


def connect(loss: torch.Tensor, total: GradientSum, reductions: Reduced, gate: HookGate) -> torch.Tensor:
    """Return the step's loss, connected to this rank's parameters by one autograd node.

    ``backward`` then accumulates into the parameters as in plain torch, with post-accumulate hooks and loss scaling.
    Those that are reduced get their means.
    """
    left = [(p, own) for p, own in zip(total.parameters, total.totals, strict=True) if p not in reductions]
    parameters, totals = zip(*left, strict=True) if left else ((), ())
    connected: torch.Tensor = _Accumulate.apply(loss, gate, reductions, _anchor(), list(totals), *parameters)
    return connected


class HookGate:
    """Keep tensor hooks of parameters (``Parameter.register_hook``) from running again in the user's backward.

    The hooks run in every micro-batch's backward, as in a gradient-accumulation loop. The user's ``loss.backward()``
    passes the finished sum through the same hooks, which must skip it; hooks of the accumulation itself must not
    (``docs/protocols.md``).
    """

    def __init__(self) -> None:
        self.graph_task = -1

    def guard(self, parameters: Sequence[torch.Tensor]) -> None:
        """Wrap the parameters' current hooks; their handles stay valid."""
        for parameter in parameters:
            hooks = tensor_hooks(parameter) or {}
            for key, hook in hooks.items():
                if not (isinstance(hook, _GuardedHook) or _accumulates(hook)):
                    hooks[key] = _GuardedHook(hook, self)


def needs_whole_backward(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether gradients of weights come with those of inputs, as hooks run, or memory is freed, in between."""
    frees = any(getattr(getattr(p, "_vescale_memory", None), "frees", False) for p in parameters)
    return frees or any(map(is_hooked, parameters))


def is_hooked(parameter: torch.Tensor) -> bool:
    """Return whether hooks see the gradients of a parameter, other than those of the accumulation into it."""
    return not all(map(_accumulates, (tensor_hooks(parameter) or {}).values()))


def _accumulates(hook: Any) -> bool:
    return getattr(hook, "_vescale_accumulates", False)


class _GuardedHook:
    """A tensor hook that skips the backward pass of ``_Accumulate``."""

    def __init__(self, hook: Any, gate: HookGate) -> None:
        self._hook = hook
        self._gate = gate

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if graph_task_id() == self._gate.graph_task else self._hook(gradient)
