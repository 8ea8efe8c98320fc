"""Stubs: placeholders for the modules of other stages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .._run.inside import is_ours, run_hooks
from .._run.mode import RunState
from .._run.tree import flatten
from .._run.values import PipelineError
from .absent import AbsentModule, LooksLike, constants_of
from .attributes import numbers_of
from .split import StageSplit


class Stub(LooksLike, nn.Module):
    """Replacement for a module of another stage. Its forward returns placeholder tensors.

    Plain attributes of the module (numbers, strings, booleans, None) stay readable, and what its tensors are like. Its
    hooks, and those of modules in it, run with placeholders. While the model runs, it is an instance of the module's
    class.

    Args:
        module: the replaced module.
        fqn: its fully qualified name in the model.
        stage: the stage of the module.
        state: the engine's run state.
        is_here: whether this rank has the module, too, and the stub takes its place while other stages run.
    """

    def __init__(self, module: nn.Module, *, fqn: str, stage: int, state: RunState, is_here: bool) -> None:
        super().__init__()
        self._vescale_fqn = fqn
        self._vescale_stage = stage
        self._vescale_replaced = type(module).__name__
        self._vescale_kind = type(module)
        self.training = module.training
        self._vescale_state = state
        self._vescale_here: list[nn.Module] = [module] if is_here else []  # a list, as modules would be parts
        self._vescale_constants: dict[str, tuple[nn.Module, str]] = {}  # by full name: where each is
        for name, constant in constants_of(module).items():
            parent, _, buffer = name.rpartition(".")
            self._vescale_constants[f"{fqn}.{name}"] = module.get_submodule(parent), buffer
            if not is_here:
                self._vescale_constants[f"{fqn}.{name}"] = self, (kept := f"constant__{name.replace('.', '__')}")
                self.register_buffer(kept, constant, persistent=False)
        self.absent_fqns = _all_fqns(module)
        # no part of this module: `StageModules.only` shows the modules in it while the model runs
        self._vescale_elsewhere: AbsentModule | None
        absent = None if is_here else AbsentModule(module, fqn, stage, state, self._vescale_read)
        vars(self)["_vescale_elsewhere"] = absent

    @property
    def _vescale_buffers(self) -> dict[str, torch.Tensor]:
        """The constants of the module, by full name."""
        return {name: vars(owner)["_buffers"][buffer] for name, (owner, buffer) in self._vescale_constants.items()}

    @property
    def _vescale_absent(self) -> AbsentModule:
        """What is known of the module; of one on this rank, what it is like at present."""
        if self._vescale_elsewhere is not None:
            return self._vescale_elsewhere
        where = self._vescale_fqn, self._vescale_stage
        return AbsentModule(self._vescale_here[0], *where, self._vescale_state, self._vescale_read, is_here=True)

    def _vescale_read(self, name: str) -> torch.Tensor | None:
        """Return a constant by its full name, and note that it is read."""
        if name not in self._vescale_constants:
            return None
        self._vescale_state.constants_read.add(name)
        return self._vescale_buffers[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return placeholders for the module's outputs, and run its hooks with them."""
        mode = self._vescale_state.mode
        if mode is None:
            raise PipelineError(
                f"expected a call through PipelineEngine, got a direct call of `{self._vescale_fqn}`, a module of "
                f"pipeline stage {self._vescale_stage}; run the model through its engine"
            )
        with mode.paused():
            call = mode.frame.begin(self._vescale_fqn, *flatten((args, kwargs)), owner=self._vescale_stage)
            output, inside = mode.frame.absent(call)
            module, numbers = self._vescale_hooked, numbers_of if self._vescale_elsewhere is None else None
            run_hooks(module, numbers, True, args, kwargs)
            for name, *given in inside:
                run_hooks(module.get_submodule(name), numbers, *given)
            run_hooks(module, numbers, False, args, kwargs, output)
            return output

    @property
    def _vescale_hooked(self) -> nn.Module:
        """What has the module's hooks."""
        return self._vescale_here[0] if self._vescale_elsewhere is None else self._vescale_elsewhere

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook that runs before each call, with placeholders."""
        if is_ours(hook):
            return super().register_forward_pre_hook(hook, **options)
        return self._vescale_hooked.register_forward_pre_hook(hook, **options)

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        """Register a hook that runs after each call, with placeholders."""
        if is_ours(hook):
            return super().register_forward_hook(hook, **options)
        return self._vescale_hooked.register_forward_hook(hook, **options)

    def train(self, mode: bool = True) -> Stub:
        """Set the mode of what stands for the modules in it, too."""
        if self._vescale_elsewhere is not None:
            self._vescale_elsewhere.train(mode)
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if "_vescale_elsewhere" not in vars(self):  # a copy in the making
            return super().__getattr__(name)
        constant = self._vescale_read(f"{self._vescale_fqn}.{name}")
        if constant is not None:
            return constant
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._vescale_absent, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new parameter or buffer is that of the other stage, and only looked at."""
        absent = vars(self).get("_vescale_elsewhere")
        if absent is not None and absent._vescale_keeps(name, value):
            setattr(absent, name, value)
        elif not isinstance(value, torch.Tensor):
            super().__setattr__(name, value)
        elif f"{self._vescale_fqn}.{name}" in self._vescale_constants:
            owner, buffer = self._vescale_constants[f"{self._vescale_fqn}.{name}"]
            vars(owner)["_buffers"][buffer] = value
        else:
            setattr(self._vescale_absent, name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Stub:
        if self._vescale_elsewhere is not None:
            self._vescale_elsewhere._apply(fn)
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Return the replaced class and its stage."""
        return f"{self._vescale_replaced} of stage {self._vescale_stage}"


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
            if (stage := stubs[module]._vescale_stage) in self._places:
                self._places[stage].append(place)
            else:
                place.put(place.stub)
        if (follow := vars(model).get("_vescale_follow_units")) is not None:  # docs/protocols.md
            follow(model)

    def constants(self, *, of_this_rank: bool = False) -> dict[str, torch.Tensor]:
        """Return the constants of all modules, or of those of this rank's stages, by full name."""
        stubs = [stub for stub in self._stubs.values() if not of_this_rank or stub._vescale_fqn in self.units]
        return {name: constant for stub in stubs for name, constant in stub._vescale_buffers.items()}

    def attributes(self, names: Iterable[str], *, of_this_rank: bool = False) -> dict[str, Any]:
        """Return plain attributes of modules in units, of all or of this rank's, by their full names."""
        found: dict[str, Any] = {}
        for name in names:
            path, _, attribute = name.rpartition(".")
            stub = next(s for s in self._stubs.values() if f"{path}.".startswith(f"{s._vescale_fqn}."))
            part = path.removeprefix(stub._vescale_fqn).removeprefix(".")
            if stub._vescale_elsewhere is None:
                found[name] = getattr(stub._vescale_here[0].get_submodule(part), attribute, None)
            elif not of_this_rank:
                absent = cast(AbsentModule, stub._vescale_elsewhere.get_submodule(part))
                found[name] = absent._vescale_items.get(attribute)
        return found

    @contextlib.contextmanager
    def only(self, stages: Collection[int]) -> Iterator[None]:
        """Put stubs in place of this rank's other stages while the context is open.

        Code finds what stands for the modules in units of other ranks, which are no part of the model otherwise.
        """
        absent = [place for stage, places in self._places.items() if stage not in stages for place in places]
        stubs = self._stubs.values()
        elsewhere = [(stub, each) for stub in stubs if (each := stub._vescale_elsewhere) is not None]
        try:
            for place in absent:
                place.put(place.stub)
            for stub, module in elsewhere:
                vars(stub)["_modules"] = vars(module)["_modules"]
            yield
        finally:
            for place in absent:
                place.put(place.unit)
            for stub, _ in elsewhere:
                vars(stub)["_modules"] = {}


@dataclass
class _Place:
    """A name of a unit in the model."""

    parent: nn.Module
    name: str
    unit: nn.Module
    stub: Stub

    def put(self, module: nn.Module) -> None:
        self.parent.register_module(self.name, module)
