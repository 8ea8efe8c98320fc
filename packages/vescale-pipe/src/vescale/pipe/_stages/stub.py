"""Stubs: placeholders for the modules of other stages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._run.mode import RunState
from .._run.tree import flatten
from .._run.values import PipelineError
from .absent import AbsentModule
from .split import StageSplit


class Stub(nn.Module):
    """Replacement for a module of another stage. Its forward returns placeholder tensors.

    Plain attributes of the module (numbers, strings, booleans) stay readable, and what its tensors are like.

    Args:
        module: the replaced module.
        fqn: its fully qualified name in the model.
        stage: the stage of the module.
        state: the engine's run state.
    """

    def __init__(self, module: nn.Module, *, fqn: str, stage: int, state: RunState) -> None:
        super().__init__()
        self.fqn = fqn
        self.stage = stage
        self.replaced = type(module).__name__
        self.absent_fqns: tuple[str, ...] = _all_fqns(module)
        self.training = module.training
        self._state = state
        self._absent = AbsentModule(module, fqn, stage, state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return placeholders for the module's outputs."""
        mode = self._state.mode
        if mode is None:
            raise PipelineError(
                f"expected a call through PipelineEngine, got a direct call of `{self.fqn}`, a module of pipeline "
                f"stage {self.stage}; run the model through its engine"
            )
        with mode.paused():
            call = mode.frame.begin(self.fqn, *flatten((args, kwargs)), owner=self.stage)
            return mode.frame.absent(call)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_absent" not in self.__dict__:  # a copy in the making
                raise
            return getattr(self._absent, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new parameter or buffer is that of the other stage, and only looked at."""
        if isinstance(value, torch.Tensor):
            setattr(self._absent, name, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Stub:
        self._absent.apply(fn)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Return the replaced class and its stage."""
        return f"{self.replaced} of stage {self.stage}"


def _all_fqns(module: nn.Module) -> tuple[str, ...]:
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return tuple(names)


class StageModules:
    """The units of this rank in the model, and stubs in place of all others.

    Args:
        model: the model; stubs replace the units of other ranks under each of their names.
        split: the units of every stage.
        mine: this rank's stages.
        state: the engine's run state.

    Attributes:
        units: the stage and the module of each unit of this rank, by name.
    """

    def __init__(self, model: nn.Module, split: StageSplit, mine: Sequence[int], state: RunState) -> None:
        self.units: dict[str, tuple[int, nn.Module]] = {}
        stubs: dict[nn.Module, Stub] = {}
        for stage, fqns in enumerate(split.stages):
            for fqn in fqns:
                unit = model.get_submodule(fqn)
                stubs[unit] = Stub(unit, fqn=fqn, stage=stage, state=state)
                if stage in mine:
                    self.units[fqn] = (stage, unit)
        vars(model)["_vescale_units"] = tuple(self.units)  # docs/protocols.md
        self._places: dict[int, list[_Place]] = {stage: [] for stage in mine}
        for fqn, module in list(model.named_modules(remove_duplicate=False)):
            if module not in stubs:
                continue
            parent, _, name = fqn.rpartition(".")
            place = _Place(model.get_submodule(parent), name, module, stubs[module])
            if (stage := stubs[module].stage) in self._places:
                self._places[stage].append(place)
            else:
                place.put(place.stub)

    @contextlib.contextmanager
    def only(self, stages: Collection[int]) -> Iterator[None]:
        """Put stubs in place of this rank's other stages while the context is open."""
        absent = [place for stage, places in self._places.items() if stage not in stages for place in places]
        try:
            for place in absent:
                place.put(place.stub)
            yield
        finally:
            for place in absent:
                place.put(place.unit)


@dataclass
class _Place:
    """A name of a unit in the model."""

    parent: nn.Module
    name: str
    unit: nn.Module
    stub: Stub

    def put(self, module: nn.Module) -> None:
        self.parent.register_module(self.name, module)
