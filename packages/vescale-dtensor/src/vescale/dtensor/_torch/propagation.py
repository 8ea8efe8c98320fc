"""Rules in addition to stock sharding propagation: they replace its decisions, or compute results in another way."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from .._containers import leaves
from ..errors import UnsupportedOperator
from .patches import AttributePatch, Op

__all__ = ["Decision", "PropagationRule", "RulePatch", "decision_of"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision of stock sharding propagation for one call of an operator.

    Attributes:
        needed: the specs to which positional DTensor operands must be redistributed.
        output: the spec of the result, if there is just one result.
        outputs: the specs of all results; None for one that is no tensor.
    """

    needed: tuple[object, ...] | None
    output: DTensorSpec | None
    outputs: tuple[DTensorSpec | None, ...]


@dataclasses.dataclass(frozen=True)
class PropagationRule:
    """A rule in addition to stock sharding propagation, which runs on a miss of DTensor's C++ cache.

    A rule reads only global shapes, placements and meshes, before any communication, so it decides alike on all ranks.
    If it returns a sharding, the sharding is cached and used; any other value is the operator's result. So a rule that
    accepts a sharding costs nothing from the second call on.

    Attributes:
        arguments: ``arguments(op, args, kwargs)`` returns ``(args, kwargs)`` as all rules see them, stock's included.
            The operator itself runs with the arguments of the call. Operands are tensors or their specs.
        before: ``before(op, args, kwargs, schema)`` returns a sharding, the result, or NotImplemented to try the next
            rule and then stock propagation.
        on_error: ``on_error(op, args, kwargs)`` returns the result if stock propagation raises an error.
        after: ``after(op, args, kwargs, decision)`` returns None to accept the stock decision, or a function that
            computes the result in another way.
        names: ``names(args, kwargs, spec)`` returns the placements of a result of an accepted decision, whose spec is
            given; they describe the same layout as those of the spec.
        last: as ``after``, asked of each sharding that is to be used, also of one that a rule has returned. It may look
            at strides of shards, and ranks may differ, if what it does instead communicates as the sharding would.
    """

    arguments: Callable[[Op, tuple, dict], tuple[tuple, dict]] | None = None
    before: Callable[[Op, tuple, dict, object], object] | None = None
    on_error: Callable[[Op, tuple, dict], object] | None = None
    after: Callable[[Op, tuple, dict, Decision], Callable[[], object] | None] | None = None
    names: Callable[[tuple, dict, DTensorSpec], tuple[Placement, ...]] | None = None
    last: Callable[[Op, tuple, dict, Decision], Callable[[], object] | None] | None = None


_RULES: list[RulePatch] = []  # the rules in force, in the order of their calls


def _propagation(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def propagate(self, op: Op, args: tuple, kwargs: dict, op_info: object, *rest: object) -> object:
        rules = [patch.rule for patch in _RULES]
        for rewrite in (rule.arguments for rule in rules if rule.arguments is not None):
            args, kwargs = _rewritten(rewrite, op, args, kwargs, op_info)
        for ask in (rule.before for rule in rules if rule.before is not None):
            found = ask(op, args, kwargs, op_info.schema)
            if found is not NotImplemented:
                return _used(rules, op, args, kwargs, found) if isinstance(found, OutputSharding) else found
        try:
            sharding = stock(self, op, args, kwargs, op_info, *rest)
        except UnsupportedOperator:
            raise  # an inner operator has already been refused
        except (NotImplementedError, RuntimeError):
            run = next((rule.on_error for rule in rules if rule.on_error is not None), None)
            if run is None:
                raise
            return run(op, args, kwargs)
        if not isinstance(sharding, OutputSharding):
            return sharding
        decision = decision_of(sharding)
        for review in (rule.after for rule in rules if rule.after is not None):
            if (instead := review(op, args, kwargs, decision)) is not None:
                return instead()
        for name in (rule.names for rule in rules if rule.names is not None):
            sharding.output_spec = _named(functools.partial(name, args, kwargs), sharding.output_spec)
        return _used(rules, op, args, kwargs, sharding)

    return propagate


def _used(rules: Sequence[PropagationRule], op: Op, args: tuple, kwargs: dict, sharding: OutputSharding) -> object:
    """Return a sharding, or the result if a rule computes it in another way."""
    decision = decision_of(sharding)
    for review in (rule.last for rule in rules if rule.last is not None):
        if (instead := review(op, args, kwargs, decision)) is not None:
            return instead()
    return sharding


def decision_of(sharding: OutputSharding) -> Decision:
    """Return what rules see of a decision."""
    schema = sharding.redistribute_schema if sharding.needs_redistribute else None
    output = sharding.output_spec if isinstance(sharding.output_spec, DTensorSpec) else None
    outputs = tuple(each if isinstance(each, DTensorSpec) else None for each in leaves(sharding.output_spec))
    return Decision(None if schema is None else tuple(schema.args_schema), output, outputs)


def _named(name: Callable[[DTensorSpec], tuple[Placement, ...]], spec: object) -> object:
    """Return a spec, or several, with the placements that ``name`` gives."""
    if isinstance(spec, tuple | list):
        return type(spec)(_named(name, each) for each in spec)
    if not isinstance(spec, DTensorSpec) or (placements := name(spec)) is spec.placements:
        return spec
    return dataclasses.replace(spec, placements=placements)


def _rewritten(rewrite: Callable, op: Op, args: tuple, kwargs: dict, op_info: object) -> tuple[tuple, dict]:
    """Return the rewritten arguments, and rewrite those of the schema that stock propagation reads."""
    new_args, new_kwargs = rewrite(op, args, kwargs)
    if new_args is not args or new_kwargs is not kwargs:
        old = op_info.schema
        specs = rewrite(op, old.args_schema, old.kwargs_schema)
        op_info.schema = OpSchema(op, *specs, schema_info=old.schema_info)
    return new_args, new_kwargs


_PROPAGATION = AttributePatch(
    (type(DTensor._op_dispatcher),), "_propagate_op_sharding_dispatch_slow_path", _propagation
)


class RulePatch:
    """Add one rule to stock sharding propagation. All rules share one replaced method of the dispatcher.

    Args:
        rule: the rule.
        order: rules are called in ascending order.
    """

    place = _PROPAGATION.place

    def __init__(self, rule: PropagationRule, *, order: int):
        self.rule = rule
        self.order = order

    def install(self) -> None:
        """Add the rule."""
        if self not in _RULES:
            _RULES.append(self)
            _RULES.sort(key=operator.attrgetter("order"))
        _PROPAGATION.install()

    def remove(self) -> None:
        """Remove the rule; the last removal restores the stock method."""
        if self in _RULES:
            _RULES.remove(self)
        if not _RULES:
            _PROPAGATION.remove()

    def is_installed(self) -> bool:
        """Return whether the rule is in force."""
        return self in _RULES and _PROPAGATION.is_installed()
