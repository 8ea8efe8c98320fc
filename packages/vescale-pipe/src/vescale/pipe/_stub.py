"""What stands in a model where the modules of other stages were."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._mode import RunState
from ._split import StageSplit
from ._tree import flatten
from ._values import PipelineError


class Stub(nn.Module):
    """Stands where a module of another stage was; returns placeholders.

    Plain attributes of the module (numbers, strings, booleans) can still be read.

    Args:
        module: the module that is replaced.
        fqn: its name in the model.
        stage: the stage that it lives on.
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
        self._plain = _plain_attributes(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return placeholders for what the module returns on its own stage."""
        mode = self._state.mode
        if mode is None:
            raise PipelineError(
                f"`{self.fqn}` lives on pipeline stage {self.stage}; run the model through its PipelineEngine"
            )
        with mode.paused():
            call = mode.frame.begin(self.fqn, *flatten((args, kwargs)), owner=self.stage)
            return mode.frame.absent(call)

    def __getattr__(self, name: str) -> Any:
        plain = self.__dict__.get("_plain", {})
        if name in plain:
            return plain[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"`{self.__dict__.get('fqn')}` lives on pipeline stage {self.__dict__.get('stage')}, so its attribute "
                f"`{name}` is not available here; code outside of a stage's modules may call them, not look into them"
            ) from None

    def extra_repr(self) -> str:
        """Return the replaced class and its stage."""
        return f"{self.replaced} of stage {self.stage}"


def _all_fqns(module: nn.Module) -> tuple[str, ...]:
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    names += [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return tuple(names)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    def is_plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(is_plain, value))
        return isinstance(value, bool | int | float | str | torch.dtype | torch.device)

    own_classes = [cls for cls in type(module).__mro__ if cls not in nn.Module.__mro__]
    layers = [*(vars(cls) for cls in reversed(own_classes)), vars(module)]
    return {k: v for layer in layers for k, v in layer.items() if is_plain(v) and not k.startswith("_")}


def install_stubs(model: nn.Module, split: StageSplit, stage: int, state: RunState) -> dict[str, nn.Module]:
    """Replace the units of other stages by stubs, at every name they have; return this stage's units by name."""
    mine: dict[str, nn.Module] = {}
    stubs: dict[nn.Module, Stub] = {}
    for home, fqns in enumerate(split.stages):
        for fqn in fqns:
            unit = model.get_submodule(fqn)
            if home == stage:
                mine[fqn] = unit
            else:
                stubs[unit] = Stub(unit, fqn=fqn, stage=home, state=state)
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if module in stubs:
            parent, _, name = fqn.rpartition(".")
            model.get_submodule(parent).register_module(name, stubs[module])
    return mine
