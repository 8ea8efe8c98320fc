"""``derive``: a tensor-parallel plan for any module, from its structure and its dataflow.

1  run        the module once on fake tensors: operators, and the boundaries of modules that values cross
2  choose     experts, vocabularies, and pairs of matrices that are cut together
3  pin        where gradients that are sums over ranks become whole, with the fewest bytes
4  rehearse   the module's code with the parameters of one rank: sizes in attributes, modules for eager mode
5  try        one step of the parallelized copy on DTensors, without data and without other ranks

A module of many layers that are alike is derived with a few of them (``depth``).
What does not pass 3, 4 or 5 stays replicated, all groups of one kind together, and the others are tried without it.
Column and row are those of Megatron-LM (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vescale.dtensor.debug import CommLog
from vescale.dtensor.extension import Count, bytes_text, checked

from ... import _torch
from ...errors import PlanError
from .._build import Plan
from .assemble import Draft, draft_of
from .batch import find_batch
from .choose import Choice, choose
from .depth import Shortened, shorten
from .experts import Found, bytes_of_experts, find_experts, find_lists
from .graph import Graph, kind_of
from .inputs import TOKENS, guesses
from .pins import pins_of
from .rehearse import Rehearsed, settle_local_code
from .repeats import repeat_heads
from .sequence import cut_sequence
from .spread import Group, Refused, Rules
from .trace import shadow, trace
from .trial import AXIS, try_plan, without_values

__all__ = ["DerivedPlan", "derive"]


@dataclass(frozen=True)
class DerivedPlan:
    """A plan that was derived from a module; prints as a list of its entries, and of what stays replicated.

    Attributes:
        plan: what :func:`parallelize_module` takes.
        replicated: name of each matrix that every rank has in full -> the reason.
        inputs: the arguments of the run from which it was derived; tensors are on the meta device if they were guessed.
        num_bytes: of all collectives of a rank over the axis in one step with these inputs, forward and backward. Those
            of experts that the model calls one by one are not counted: they depend on where tokens are routed.
    """

    plan: Plan
    replicated: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, object] = field(default_factory=dict)
    num_bytes: int = 0

    def __str__(self) -> str:
        lines = []
        for section, entries in self.plan.items():
            if entries:
                lines.append(f"{section}:")
                pairs = entries.items() if isinstance(entries, Mapping) else ((key, "") for key in entries)
                lines += [f"    {key}  {entry}".rstrip() for key, entry in pairs]
        if self.replicated:
            lines.append("replicated:")
            lines += [f"    {kind}  {reason}" for kind, reason in _by_kind(self.replicated).items()]
        lines.append(f"communication of a step: {bytes_text(self.num_bytes)} of each rank")
        return "\n".join(lines)


def _by_kind(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return reasons by names in which numbers are any numbers, where several names are alike; the first of each."""
    found: dict[str, list[str]] = {}
    for name in reasons:
        found.setdefault(kind_of(name), []).append(name)
    return {kind if len(names) > 1 else names[0]: reasons[names[0]] for kind, names in found.items()}


@checked
def derive(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    degree: Count,
    axis: str = "tp",
    expert_axis: str | None = None,
    batch_axis: str | None = None,
    sequence_parallel: bool = False,
) -> DerivedPlan:
    """Return a tensor-parallel plan for any module, from its structure and dataflow alone.

    The plan runs in every mode. It was tried: one step of the parallelized module ran on DTensors, without data and
    without other ranks. Values are compared by static mode at its first call, as with any plan. What has no place is
    replicated and listed with the reason. The module may be real, on the meta device, or deferred. It stays as it is,
    and nothing of its size is allocated.

    Args:
        model: the module to parallelize.
        inputs: an example batch, the arguments by name; tensors of any device, also meta. By default it is guessed from
            the config, the signature of forward and the first layers.
        degree: number of ranks of the axis.
        axis: mesh axis of the plan.
        expert_axis: mesh axis over which experts are spread; by default ``axis``.
        batch_axis: mesh axis over which the batch lies, too, in dim 0 of the arguments from which the last module
            inside is computed, and of all values up to its result, which is whole again; as for ranks that share a
            batch and spread experts. By default none.
        sequence_parallel: shard activations between pairs of matrices over the sequence, their dim 1.

    Raises:
        PlanError: the module does not run with the inputs, or with none that were guessed; or its activations cannot be
            sharded over the sequence; or no result in it has the rows of the batch, for ``batch_axis``.

    Example:
        >>> from torch import nn
        >>> block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> derived = derive(block, degree=2)
        >>> print(derived)
        parameter:
            2\\.weight  {'tp': Shard(dim=1)}
            0\\.(bias|weight)  {'tp': Shard(dim=0)}
        forward:
            2\\.output  [{'tp': Replicate()}]
            input  {'input': {'tp': Replicate()}}
        communication of a step: 1 KiB of each rank
    """
    options = {"spreads_experts": expert_axis is None, "sequence_parallel": sequence_parallel}
    short, found = shorten(model), None
    if short is not None:
        with contextlib.suppress(PlanError):  # perhaps its code counts on all layers
            found = _search(short.module, inputs, degree, **options)
    if short is None or found is None or not short.stands(found.graph, found.draft):
        short, found = Shortened(model), _search(model, inputs, degree, **options)
    draft = short.draft(found.draft)
    if batch_axis is not None:  # its ends may be as many as layers, as the scores of routers
        experts = Found(whole=set(short.names(found.found.whole)))
        graph, _ = _run(model, found.inputs, experts, TOKENS)
        draft.batch = find_batch(model, found.inputs, graph, experts.whole)
    plan = draft.plan(model, axis, expert_axis, batch_axis)
    return DerivedPlan(plan, short.reasons(found.replicated()), found.inputs, short.total(found.bytes))


def _search(
    model: nn.Module,
    inputs: Mapping[str, Any] | None,
    degree: int,
    *,
    spreads_experts: bool,
    sequence_parallel: bool,
) -> _Search:
    """Return what is found for a module; the arguments are those of :func:`derive`."""
    num_ranks = degree if spreads_experts else 1
    found = find_experts(model, AXIS, num_ranks)
    num_tokens = max(TOKENS, 2 * degree) if sequence_parallel else TOKENS
    graph, used = _run(model, inputs, found, num_tokens)
    search = _Search(model, graph, used, found, degree, spreads_experts=spreads_experts)
    if degree == 1:
        search.settle_experts()
        repeated = None
    else:
        search.settle()
        repeated = repeat_heads(model, used, search.rules, search.settled, found, degree)
    if repeated is not None:
        found = find_experts(model, AXIS, num_ranks)
        other = _Search(repeated.module, repeated.graph, used, found, degree, spreads_experts=spreads_experts)
        other.changes = repeated.attributes
        other.settle()
        search = other if other.is_repeated() and other.numel() > search.numel() else search
    if sequence_parallel:
        search.cut_sequence()
    return search


def _run(
    model: nn.Module, inputs: Mapping[str, Any] | None, found: Found, num_tokens: int
) -> tuple[Graph, dict[str, object]]:
    """Return the run of a module, and its inputs, with sequences of ``num_tokens`` if they are guessed.

    Raises:
        PlanError: no inputs with which it runs.
    """
    error: Exception | None = None
    for candidate in guesses(model, num_tokens) if inputs is None else [dict(inputs)]:
        mode = _torch.fake_tensors()
        copied = shadow(model, mode)
        try:
            return trace(copied, without_values(candidate, mode), mode, found.whole), dict(candidate)
        except Exception as failed:  # a guess that does not fit may raise anything
            error = failed
    what = "none among those that were guessed" if inputs is None else str(list(inputs))
    raise PlanError(
        f"derive: expected inputs with which the model, a {type(model).__name__}, runs on shapes, got {what} "
        f"({type(error).__name__}: {error}); pass an example batch as inputs={{'name': tensor, ...}} (in "
        "vescale.parallelize as example_inputs=), or write a plan"
    ) from error


class _Search:
    """The choice of groups, and what their checks say.

    Args:
        model: the module.
        graph: of its run.
        inputs: of the run.
        found: its experts.
        degree: number of ranks.
        spreads_experts: whether experts are spread over the same axis.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        inputs: Mapping[str, object],
        found: Found,
        degree: int,
        *,
        spreads_experts: bool,
    ):
        self.model, self.graph, self.inputs, self.found, self.degree = model, graph, inputs, found, degree
        self.spreads_experts = spreads_experts
        self.rules = Rules(graph)
        self.modules = dict(model.named_modules())
        self.choice = Choice()
        self.settled: list[Group] = []
        self.draft = Draft()
        self.changes: dict[str, object] = {}
        self.refused: dict[str, str] = {}
        self.bytes: Counter[str] = Counter()  # of collectives, by the module that needs them

    def numel(self) -> int:
        """Return how many elements the sharded parameters have, without experts."""
        return sum(group.numel(self.graph) for group in self.settled)

    def is_repeated(self) -> bool:
        """Return whether the plan repeats all heads that the run repeats."""
        return self.graph.repeats.keys() == self.draft.repeats.keys()

    def _choose(self) -> None:
        find_lists(self.model, self.graph, self.found, AXIS, self.degree if self.spreads_experts else 1)
        ops = (op for op in self.graph.ops if op.boundary is not None)
        of_root = {op.inputs[0] for op in ops if op.boundary.module == "" and op.boundary.side == "input"}
        self.choice = choose(self.rules, of_root, self.degree, self.modules)

    def settle(self) -> None:
        """Choose groups by the dataflow, and find the plan of those that pass all checks."""
        self._choose()
        kinds: dict[frozenset[str], list[Group]] = {}
        for group in self.choice.groups:
            kinds.setdefault(self._kind(group), []).append(group)
        try:
            self.draft, self.settled = self._checked(self.choice.groups), self.choice.groups
        except Refused:
            self.draft = self._with_experts()
        else:
            return
        for of_kind in kinds.values():
            try:
                self.draft = self._checked([*self.settled, *of_kind])
                self.settled += of_kind
            except Refused as refusal:
                self._note(of_kind, str(refusal))

    def settle_experts(self) -> None:
        """Spread experts alone, where one rank has all of the matrices."""
        find_lists(self.model, self.graph, self.found, AXIS, self.degree if self.spreads_experts else 1)
        self.draft = Draft(experts=list(self.found.spread))

    def cut_sequence(self) -> None:
        """Shard activations over the sequence in the plan.

        Raises:
            PlanError: they cannot be, with the reason.
        """
        try:
            pins = pins_of(self.graph, self.settled) or []
            group = cut_sequence(self.rules, self.settled, pins, self.degree, self.modules)
            self.draft = self._checked([*self.settled, group])
        except Refused as refusal:
            raise PlanError(
                "derive: expected activations that can be sharded over the sequence for sequence_parallel=True, got a "
                f"{type(self.model).__name__} with activations that cannot ({refusal}); leave it out, or write a plan"
            ) from refusal

    def _with_experts(self) -> Draft:
        """Return the plan without groups; also without experts, if these do not run."""
        try:
            return self._checked([])
        except Refused as refusal:
            self.found.reasons |= dict.fromkeys(self.found.spread, str(refusal))
            self.found.spread = []
            return Draft()

    def _kind(self, group: Group) -> frozenset[str]:
        return frozenset(kind_of(name) for tensor in group.parameters for name in self.graph.tensors[tensor].names)

    def _note(self, groups: Sequence[Group], reason: str) -> None:
        for group in groups:
            for tensor in group.parameters:
                self.refused |= dict.fromkeys(self.graph.tensors[tensor].names, reason)

    def _checked(self, groups: Sequence[Group]) -> Draft:
        """Return the plan of some groups.

        Raises:
            Refused: it does not run, with the reason.
        """
        pins = pins_of(self.graph, groups)
        if pins is None:
            raise Refused("the gradient of an operand is a sum over ranks that meets a whole one before any boundary")
        draft = draft_of(self.graph, groups, pins, self.degree)
        draft.experts, draft.changes = list(self.found.spread), self.changes
        settle_local_code(Rehearsed(self.model, self.inputs, self.graph, groups, draft, self.degree, self.found.whole))
        self.bytes = Counter()
        for record in self._tried(draft) if groups else ():
            self.bytes[record.module] += record.num_bytes
        if self.spreads_experts:
            self.bytes += bytes_of_experts(self.graph, draft.experts)
        return draft

    def _tried(self, draft: Draft) -> CommLog:
        try:
            plan = replace(draft, experts=[], changes={}, attributes=[], eager=[]).plan(self.model, AXIS)
            return try_plan(self.model, plan, self.inputs, self.degree, whole=self.found.whole)
        except Exception as error:  # of DTensor's rules, or of the module's code
            raise Refused(f"on DTensors it fails: {type(error).__name__}: {error}".partition("\n")[0]) from error

    def replicated(self) -> dict[str, str]:
        """Return the matrices that every rank has, and why."""
        found: dict[str, str] = {}
        if self.degree == 1:
            return found
        spread = tuple(f"{name}." for name in self.draft.experts)
        used = {name for _, info in self.graph.parameters() for name in info.names}
        for name, parameter in self.model.named_parameters():
            is_matrix = sum(size > 1 for size in parameter.shape) > 1
            if not is_matrix or name in self.draft.parameters or (spread and name.startswith(spread)):
                continue
            found[name] = self._reason(name, used)
        return found

    def _reason(self, name: str, used: set[str]) -> str:
        of_experts = next((r for owner, r in self.found.reasons.items() if name.startswith(f"{owner}.")), None)
        if of_experts or name in self.refused:
            return of_experts or self.refused[name]
        if name not in used:
            return "the run with the example inputs does not use it"
        known = self.choice.of_others.get(name) or self.choice.reasons.get(name)
        return known or "it is neither half of a pair of matrices nor a table of as many rows as columns of ids"
