"""Assign modules to stages by names and identities; no tensor data is read.

The model is a tree of modules. **Containers** stay on every stage, and their code (masks, rotary tables, residual
additions) runs on every stage. **Units** are the other modules with parameters: each runs on one stage and is replaced
by a stub on all others. Modules without parameters stay on every stage.

    MixtralForCausalLM            container (above the blocks)
      model: MixtralModel         container (above the blocks)
        embed_tokens              unit, before the blocks  -> stage 0
        layers: ModuleList        container: a list of blocks (not inside another list)
          0, 1, 2, ...            units, distributed evenly
        norm                      unit, after the blocks   -> last stage
        rotary_emb                no parameters: runs on every stage
      lm_head                     unit, after the blocks   -> last stage

Units are in the order in which they run, as far as that is known (``order.py``), else in that of registration. A module
of which only parts are called is a container, too.

Blocks are those of ``_blocks.py``; of several lists those of the longest, if the order in which modules run is unknown.

Uniform split of n blocks over p stages: each stage gets n // p blocks. The n % p remaining blocks go one each to stages
1, 2, ..., p-2, then 0. The ends come last because the first stage also runs the embedding and the last one the head.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._blocks import find_blocks, uniform_counts
from .._checked import Count, checked
from ..plan import UNIFORM, PipelinePlan
from .order import Calls, first_calls, in_order_of_calls


class SplitError(ValueError):
    """Raised for a model that cannot be split into stages by the plan."""


_Stages = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages use under names of their own.

    Args:
        names: its names on each stage, in model order; the first stage is its home, which owns it.
    """

    names: Mapping[int, tuple[str, ...]]

    @property
    def home(self) -> int:
        """The stage with the parameter's first name in the model."""
        return next(iter(self.names))

    def __str__(self) -> str:
        return " = ".join(f"{own[0]} (stage {stage})" for stage, own in self.names.items())


@dataclass(frozen=True)
class StageSplit:
    """The units (fully qualified module names) of each stage, in the order in which they run.

    Args:
        stages: one tuple of names per stage.
        ties: the parameters that several stages use.
    """

    stages: _Stages
    ties: tuple[Tie, ...] = ()

    def stage_of(self, fqn: str) -> int:
        """Return the stage of a unit.

        Raises:
            KeyError: no unit has this name.
        """
        for stage, units in enumerate(self.stages):
            if fqn in units:
                return stage
        raise KeyError(fqn)

    def __str__(self) -> str:
        lines = [f"stage {stage}: {' '.join(units)}" for stage, units in enumerate(self.stages)]
        return "\n".join([*lines, *(f"tied: {tie}" for tie in self.ties)])


@checked
def split_units(
    model: nn.Module,
    plan: PipelinePlan,
    num_stages: Count,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
) -> StageSplit:
    """Assign the units of a model to stages.

    Args:
        model: any module; it is not modified and its tensors are not read.
        plan: its ``split`` defines the stages.
        num_stages: number of stages.
        example_inputs: keyword or positional arguments of one call, which may be on the meta device. A forward without
            data shows the order in which modules run. By default the ``dummy_inputs`` of Hugging Face's models; the
            order of other models is that of registration.

    Raises:
        SplitError: there are fewer blocks than stages, a module name is unknown, a module with parameters is in no
            stage's list, or a container holds a parameter directly.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        >>> print(split_units(model, PipelinePlan(), 2))
        stage 0: 0 1
        stage 1: 2 3
    """
    calls = first_calls(model, example_inputs) if num_stages > 1 else Calls()
    if plan.split == UNIFORM:
        split = _uniform(model, num_stages, calls)
    elif all(isinstance(name, str) for name in plan.split):
        split = _by_starts(model, [str(name) for name in plan.split], num_stages, calls)
    else:
        split = _by_lists(model, plan.split, num_stages, calls)
    return StageSplit(split, _ties(model, split))


# --- the three ways to cut ---


def _uniform(model: nn.Module, num_stages: int, calls: Calls) -> _Stages:
    found = find_blocks(model)
    lists = sorted(found.lists, key=lambda fqn: fqn != found.longest)
    if not calls.is_complete:  # entries of two lists may run in turn
        lists = lists[:1]
    if not lists:
        raise SplitError(
            f"split='uniform': expected a ModuleList or Sequential of blocks, got none in {type(model).__name__}; name "
            "the modules that begin stages 1, 2, ... of the model with split=[...] in the plan"
        )
    units = _units(model, calls, open_fqns={fqn for name in lists for fqn in (name, *_ancestors(name))})
    prefixes = tuple(f"{name}." if name else "" for name in lists)
    blocks = [place for place, unit in enumerate(units) if unit.startswith(prefixes)]
    num_blocks = len(blocks)
    if num_blocks < num_stages:
        raise SplitError(
            f"expected at least {num_stages} blocks for {num_stages} pipeline stages, got {num_blocks} in "
            f"{' and '.join(f'`{name}`' if name else 'the model' for name in lists)}; use a pipeline degree of at most "
            f"{num_blocks}, or name other modules with split=[...] in the plan"
        )
    starts = itertools.accumulate(uniform_counts(num_blocks, num_stages)[:-1])
    cuts = [0, *(blocks[start] for start in starts), len(units)]
    return tuple(tuple(units[a:b]) for a, b in itertools.pairwise(cuts))


def _by_starts(model: nn.Module, starts: Sequence[str], num_stages: int, calls: Calls) -> _Stages:
    if len(starts) != num_stages - 1:
        raise SplitError(
            f"expected {num_stages - 1} modules in split=[...] of the plan for {num_stages} stages, got "
            f"{len(starts)}: {list(starts)}; name the modules that begin stages 1 .. {num_stages - 1}"
        )
    units = _units(model, calls, open_fqns={a for name in starts for a in _ancestors(name)}, listed=starts)
    cuts = [0]
    for name in starts:
        cut = next(i for i, unit in enumerate(units) if _is_within(unit, name))
        if cut <= cuts[-1]:
            raise SplitError(
                f"split={list(starts)}: expected `{name}` after `{units[cuts[-1]]}` in the model, got an empty stage; "
                f"list the modules in the order in which they run: {', '.join(units)}"
            )
        cuts.append(cut)
    cuts.append(len(units))
    return tuple(tuple(units[a:b]) for a, b in itertools.pairwise(cuts))


def _by_lists(model: nn.Module, lists: Sequence[Sequence[str]], num_stages: int, calls: Calls) -> _Stages:
    if len(lists) != num_stages:
        raise SplitError(
            f"expected {num_stages} lists in split=[...] of the plan, one per stage, got {len(lists)}; "
            "write one list per stage"
        )
    names = [name for stage in lists for name in stage]
    units = _units(model, calls, open_fqns={a for name in names for a in _ancestors(name)}, listed=names)
    stages: list[list[str]] = [[] for _ in lists]
    for unit in units:
        homes = [stage for stage, listed in enumerate(lists) if any(_is_within(unit, name) for name in listed)]
        if len(homes) != 1:
            found = f"stages {homes}" if homes else "no stage"
            raise SplitError(
                f"split=[...] of the plan: expected `{unit}` in one stage's list, got {found}; list it once"
            )
        stages[homes[0]].append(unit)
    for stage, own in enumerate(stages):
        if not own:
            names = list(lists[stage])
            raise SplitError(
                f"stage {stage}: expected modules with parameters in split=[...] of the plan, got {names}; list one"
            )
    return tuple(map(tuple, stages))


# --- units and containers ---


def _ancestors(fqn: str) -> Iterator[str]:
    """Yield the names of the modules that contain ``fqn``, including the root ``""``."""
    parts = fqn.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts)))


def _is_within(fqn: str, prefix: str) -> bool:
    return fqn == prefix or fqn.startswith(f"{prefix}.")


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _units(model: nn.Module, calls: Calls, *, open_fqns: set[str], listed: Sequence[str] = ()) -> list[str]:
    """Return the unit names in the order in which they run; modules in ``open_fqns`` are containers."""
    known = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
    for name in listed:
        if name not in known or not _holds_parameters(model.get_submodule(name)):
            nearest = difflib.get_close_matches(name, known - {""}, n=3, cutoff=0.4)
            why = "has no parameters" if name in known else "is not in the model"
            raise SplitError(
                f"split=[...] of the plan: expected modules with parameters, got `{name}`, which {why}; nearest names: "
                f"{', '.join(nearest)}"
            )
    inside = {outer for name in calls for outer in _ancestors(name)}  # one of these that is not called is a container
    units = in_order_of_calls(list(_walk(model, "", open_fqns | (inside - calls.keys()))), calls)
    for name in listed:
        if not any(_is_within(unit, name) for unit in units):
            raise SplitError(
                f"split=[...] of the plan: expected the first name of each module, got the second name `{name}` of a "
                "shared module; use its first name"
            )
    return units


def _walk(container: nn.Module, fqn: str, open_fqns: set[str]) -> Iterator[str]:
    held = [f"{fqn}.{name}".lstrip(".") for name, _ in container.named_parameters(recurse=False)]
    for name, child in container.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            held += [f"{fqn}.{name}.{key}".lstrip(".") for key, _ in child.named_parameters()]
    if held:
        raise SplitError(
            f"expected parameters in modules of one stage, got `{held[0]}` held directly by container "
            f"`{fqn or type(container).__name__}`, which runs on every stage; move it into its own module, or choose "
            "a split that keeps the container on one stage"
        )
    for name, child in container.named_children():
        child_fqn = f"{fqn}.{name}" if fqn else name
        # a ModuleList is never called, so it cannot be a unit: its entries are
        if child_fqn in open_fqns or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _walk(child, child_fqn, open_fqns)
        elif _holds_parameters(child):
            yield child_fqn


def _ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> tuple[Tie, ...]:
    """Return the parameters that several stages use, in model order."""
    stage_of_unit = {unit: stage for stage, units in enumerate(stages) for unit in units}
    names: dict[int, dict[int, list[str]]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        stage = next((stage for unit, stage in stage_of_unit.items() if _is_within(fqn, unit)), None)
        if stage is not None:  # else a second name of a module that is already a unit
            names.setdefault(id(parameter), {}).setdefault(stage, []).append(fqn)
    return tuple(
        Tie({stage: tuple(own) for stage, own in by_stage.items()}) for by_stage in names.values() if len(by_stage) > 1
    )
