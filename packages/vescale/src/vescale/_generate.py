"""`generate_plan` with what the parts do to the model.

``vescale.plan`` imports no sibling package and finds out by itself which matrices tensor parallelism could shard. This
module says what the parts will do, by asking them as `parallelize` does:

    module plan          which parameters a ready plan shards, one of the user, or one derived for a degree
    pipeline             whether its stages can be cut; asked for a plan that has some

A derived plan shards other parameters for other degrees, and making it takes time: ``vescale.plan`` asks for a degree
where no layout before it fits. What the plan replicates is counted as such.
"""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vescale.dmodule.plans import FAMILIES, plan_for
from vescale.dtensor import Placement
from vescale.dtensor.extension import CheckedInside, checked
from vescale.pipe import SplitError, split_units
from vescale.plan import Cluster, Constraints, ModelProfile, Plan, blocks_of, build_model, profile, repeated_blocks
from vescale.plan import generate_plan as search

from ._module_plan import _resolve_module_plan
from ._parallelize import _pipeline_of

ModulePlan = Mapping[str, Any]


@checked
def generate_plan(
    model: CheckedInside[Any],
    cluster: Cluster,
    constraints: Constraints,
    *,
    module_plan: ModulePlan | None = None,
    example_inputs: Mapping[str, Any] | None = None,
) -> Plan:
    """Choose degrees, ZeRO stage and micro-batches for a model on a cluster.

    Args:
        model: an ``nn.Module`` (real, meta or deferred), its profile, a config of Hugging Face, or a class with
            arguments, as ``functools.partial(GPT, config)``.
        cluster: the devices; all of them are used.
        constraints: batch, sequence length, and fixed choices.
        module_plan: the tensor-parallel plan for `parallelize`. ``None``: the ready plan of the model's family, or
            the one that is derived for a degree, as `parallelize` does.
        example_inputs: a batch as for `parallelize`, from which memory is measured and a plan is derived. By default
            inputs are guessed.

    Returns:
        The first plan in the order of preference that fits memory; see ``vescale.plan.generate_plan``.

    Raises:
        ValueError: no plan fits, and the text has the nearest miss; or inputs have another sequence length.
        TypeError: an argument, or an entry of the module plan, has another type.

    Example:
        >>> from torch import nn
        >>> constraints = Constraints(global_batch_size=8, sequence_length=16)
        >>> generate_plan((nn.Linear, 8, 8), Cluster(4, memory_bytes=2**30), constraints).dp
        4
    """
    if isinstance(model, ModelProfile):
        return search(model, cluster, constraints)
    _check_length(example_inputs, constraints.sequence_length)
    return _Facts(build_model(model), constraints, module_plan, example_inputs).search(cluster)


def _check_length(inputs: Mapping[str, Any] | None, expected: int) -> None:
    """Raise `ValueError` for tokens of another length than that of the run: memory is measured with them."""
    for name, value in (inputs or {}).items():
        is_tokens = isinstance(value, Tensor) and value.dim() == 2 and not value.dtype.is_floating_point
        if is_tokens and value.shape[1] != expected:
            raise ValueError(
                f"generate_plan: expected example_inputs of {expected} tokens, as the constraints have, got "
                f"{value.shape[1]} in {name!r}; pass sequences of that length, which may be on the meta device"
            )


class _Facts:
    """What the parts do to a model.

    Args:
        model: the full model.
        constraints: of the run.
        module_plan: that of the user.
        inputs: example arguments of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        constraints: Constraints,
        module_plan: ModulePlan | None,
        inputs: Mapping[str, Any] | None,
    ) -> None:
        self.model, self.constraints, self.inputs = model, constraints, inputs
        self.module_plan = module_plan
        self.refusals: dict[str, str] = {}
        self._profiles: dict[frozenset[str] | None, ModelProfile] = {}

    def search(self, cluster: Cluster) -> Plan:
        """Return a plan whose stages can be cut."""
        plan = self._search(cluster)
        try:
            if plan.pp > 1 and not _splits(self.model):
                split_units(self.model, _pipeline_of(plan), plan.num_stages, example_inputs=self.inputs)
        except SplitError as error:
            self.refusals["pp"] = str(error)
            return self._search(cluster)
        return plan

    def _search(self, cluster: Cluster) -> Plan:
        if self.module_plan is None and getattr(getattr(self.model, "config", None), "model_type", None) in FAMILIES:
            self.module_plan = plan_for(self.model)
        if self.module_plan is not None:
            return search(self._profile(sharded_patterns(self.model, self.module_plan)), cluster, self.constraints)
        if self._profile(None).experts and "ep" not in self.refusals and (reason := self._refused_experts()):
            self.refusals["ep"] = reason
        return search(self._profile(None), cluster, self.constraints, tensor_parallel=self._under)

    def _refused_experts(self) -> str:
        """Return why experts of a model without a ready plan are not spread over ranks, before degrees are tried."""
        reason = ""
        for model in (_without_repeats(self.model, repeated_blocks(self.model)), self.model):
            try:
                _resolve_module_plan(Plan(dp=2, ep=2), model, None, self.inputs)
            except ValueError as error:
                reason = str(error)
            else:
                return ""
        return reason

    def _under(self, tp: int) -> ModelProfile:
        """Return the profile under a degree of tensor parallelism, by a derived plan."""
        try:
            patterns, lacks = self._derived_patterns(tp)
        except ValueError as error:
            return self._refused(str(error))
        if not patterns:
            return self._refused(f"a plan derived for {type(self.model).__name__} shards no parameter over tp = {tp}")
        found = self._profile(patterns)
        return dataclasses.replace(found, refusals={**found.refusals, **lacks})

    def _derived_patterns(self, tp: int) -> tuple[list[str], dict[str, str]]:
        """Return regular expressions for the parameters that a derived plan shards, and reasons for what it cannot do.

        Blocks that repeat others get entries as these have, so a model of two blocks of each kind has to be derived.

        Raises:
            ValueError: no plan can be derived, for the reason in the text.
        """
        first = repeated_blocks(self.model)
        for model in (_without_repeats(self.model, first), self.model):
            try:
                derived, lacks = self._derived(model, tp)
            except ValueError:
                if model is self.model:
                    raise
                continue  # code that counts the blocks
            return _repeated(sharded_patterns(model, derived), self.model, first), lacks
        raise AssertionError("the loop ends at the model itself")

    def _derived(self, model: nn.Module, tp: int) -> tuple[ModulePlan, dict[str, str]]:
        """Return the plan that is derived for a model, over the sequence if that is wanted and can be."""
        lacks = {}
        if self.constraints.sequence_parallel is not False:
            try:
                return _resolve_module_plan(Plan(tp=tp, sequence_parallel=True), model, None, self.inputs), {}
            except ValueError as error:
                lacks["sequence_parallel"] = str(error)
        return _resolve_module_plan(Plan(tp=tp), model, None, self.inputs), lacks

    def _refused(self, reason: str) -> ModelProfile:
        whole = self._profile(None)
        return dataclasses.replace(whole, refusals={**whole.refusals, "tp": reason})

    def _profile(self, patterns: Sequence[str] | None) -> ModelProfile:
        """Return the profile with these parameters sharded; ``None``: whatever a run finds to be possible."""
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        key = None
        if patterns is not None:
            key = frozenset(name for name in names if any(re.fullmatch(each, name) for each in patterns))
        if key not in self._profiles:
            self._profiles[key] = self._measured(patterns)
        found = self._profiles[key]
        return dataclasses.replace(found, refusals={**found.refusals, **self.refusals})

    def _measured(self, patterns: Sequence[str] | None) -> ModelProfile:
        length = self.constraints.sequence_length
        try:
            return profile(self.model, sequence_length=length, tp_sharded=patterns, inputs=self.inputs)
        except ValueError as error:
            if self.inputs is None or error.__cause__ is None:
                raise
            raise ValueError(
                f"generate_plan: expected example_inputs with which {type(self.model).__name__} runs without data, got "
                f"{list(self.inputs)} ({type(error.__cause__).__name__}: {error.__cause__}); correct them, or leave "
                "them out"
            ) from error


def _splits(model: nn.Module) -> bool:
    """Return whether stages can be cut in any order of modules: one list of blocks, and modules around it are empty.

    Else a forward without data has to find out in which order modules run.
    """
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in blocks_of(model)))
    if len(owners) != 1:
        return False
    around = [model.get_submodule(".".join(owners[0].split(".")[:depth])) for depth in range(owners[0].count(".") + 2)]
    return not any(True for module in around for _ in module.named_parameters(recurse=False))


def _without_repeats(model: nn.Module, first: Mapping[str, str]) -> nn.Module:
    """Return a model with two blocks of each kind alone, under their names; its tensors are those of the model.

    Of one block alone it would not be known what is around blocks.
    """
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    seconds = {source: name for name, source in reversed(list(first.items())) if name != source}
    kept = {*first.values(), *seconds.values()}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in first):
        blocks = model.get_submodule(owner)
        if type(blocks) not in (nn.ModuleList, nn.Sequential):
            return model
        shorter: nn.Module = type(blocks)()
        for name, block in blocks.named_children():
            if f"{owner}.{name}".removeprefix(".") in kept or f"{owner}.{name}".removeprefix(".") not in first:
                shorter.add_module(name, block)
        shorter.training = blocks.training  # of the list alone: its blocks are the model's own
        memo[id(blocks)] = shorter
    return copy.deepcopy(model, memo)


def _repeated(patterns: Sequence[str], model: nn.Module, first: Mapping[str, str]) -> list[str]:
    """Return regular expressions for the parameters that match some, or whose like in the first such block does."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    sources = {f"{block}.": f"{source}." for block, source in first.items()}
    kinds: dict[str, dict[str, bool]] = {}
    for name in names:
        prefix = next((prefix for prefix in sources if name.startswith(prefix)), "")
        like = sources.get(prefix, "") + name.removeprefix(prefix)
        matches = any(re.fullmatch(pattern, like) for pattern in patterns)
        kind = r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
        kinds.setdefault(kind, {})[name] = matches
    found = []
    for kind, of_kind in kinds.items():
        found += [kind] if all(of_kind.values()) else [re.escape(name) for name, is_one in of_kind.items() if is_one]
    return found


@checked
def _module_plan(
    *, parameter: Mapping[str, Mapping[str, Placement] | Sequence[Placement]], expert: Mapping[str, object]
) -> None:
    """Check the sections of a module plan that are read here."""


def sharded_patterns(model: nn.Module, module_plan: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of a module plan that shard parameters of this model."""
    sections = {name: module_plan.get(name, {}) for name in ("parameter", "expert")}
    _module_plan(**sections)
    patterns = [
        pattern
        for pattern, placements in sections["parameter"].items()
        if any(placement.is_shard() for placement in _placements(placements))
    ]
    patterns += [rf"(?:{pattern})\..*" for pattern in sections["expert"]]
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    return [pattern for pattern in patterns if any(re.fullmatch(pattern, name) for name in names)]


def _placements(placements: Any) -> list[Any]:
    return list(placements.values()) if isinstance(placements, Mapping) else list(placements)
