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
from .absent import AbsentModule, constants_of
from .split import StageSplit


class Stub(nn.Module):
    """Replacement for a module of another stage. Its forward returns placeholder tensors.

    Plain attributes of the module (numbers, strings, booleans) stay readable, and what its tensors are like.

    Args:
        module: the replaced module.
        fqn: its fully qualified name in the model.
        stage: the stage of the module.
        state: the engine's run state.
        is_here: whether this rank has the module, too, and the stub takes its place while other stages run.
    """

    def __init__(self, module: nn.Module, *, fqn: str, stage: int, state: RunState, is_here: bool) -> None:
        super().__init__()
        self.fqn = fqn
        self.stage = stage
        self.replaced = type(module).__name__
        self.training = module.training
        self._state = state
        self._here: list[nn.Module] = [module] if is_here else []  # a list, as attributes that are modules are parts
        self._constants: dict[str, tuple[nn.Module, str]] = {}  # by full name: where each is
        for name, constant in constants_of(module).items():
            parent, _, buffer = name.rpartition(".")
            self._constants[f"{fqn}.{name}"] = module.get_submodule(parent), buffer
            if not is_here:
                self._constants[f"{fqn}.{name}"] = self, (kept := f"constant__{name.replace('.', '__')}")
                self.register_buffer(kept, constant, persistent=False)
        self.absent_fqns = _all_fqns(module)
        self._elsewhere = None if is_here else AbsentModule(module, fqn, stage, state, self._read)

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The constants of the module, by full name."""
        return {name: vars(owner)["_buffers"][buffer] for name, (owner, buffer) in self._constants.items()}

    @property
    def _absent(self) -> AbsentModule:
        """What is known of the module; of one on this rank, what it is like at present."""
        if self._elsewhere is not None:
            return self._elsewhere
        return AbsentModule(self._here[0], self.fqn, self.stage, self._state, self._read)

    def _read(self, name: str) -> torch.Tensor | None:
        """Return a constant by its full name, and note that it is read."""
        if name not in self._constants:
            return None
        self._state.constants_read.add(name)
        return self.constants[name]

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
        if "_elsewhere" not in vars(self):  # a copy in the making
            return super().__getattr__(name)
        constant = self._read(f"{self.fqn}.{name}")
        if constant is not None:
            return constant
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._absent, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new parameter or buffer is that of the other stage, and only looked at."""
        if not isinstance(value, torch.Tensor):
            super().__setattr__(name, value)
        elif f"{self.fqn}.{name}" in self._constants:
            owner, buffer = self._constants[f"{self.fqn}.{name}"]
            vars(owner)["_buffers"][buffer] = value
        else:
            setattr(self._absent, name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Stub:
        if self._elsewhere is not None:
            self._elsewhere.apply(fn)
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
        self._stubs = stubs = dict[nn.Module, Stub]()
        for stage, fqns in enumerate(split.stages):
            for fqn in fqns:
                unit = model.get_submodule(fqn)
                stubs[unit] = Stub(unit, fqn=fqn, stage=stage, state=state, is_here=stage in mine)
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

    def constants(self, *, of_this_rank: bool = False) -> dict[str, torch.Tensor]:
        """Return the constants of all modules, or of those of this rank's stages, by full name."""
        stubs = [stub for stub in self._stubs.values() if not of_this_rank or stub.fqn in self.units]
        return {name: constant for stub in stubs for name, constant in stub.constants.items()}

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
