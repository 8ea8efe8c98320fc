"""Stubs: placeholders for the modules of other stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._run.mode import RunState
from .._run.tree import flatten
from .._run.values import PipelineError
from .split import StageSplit


class Stub(nn.Module):
    """Replacement for a module of another stage. Its forward returns placeholder tensors.

    Plain attributes of the module (numbers, strings, booleans) stay readable.

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
        self._plain = _plain_attributes(module)

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
        plain = self.__dict__.get("_plain", {})
        if name in plain:
            return plain[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"attribute `{name}` of `{self.__dict__.get('fqn')}` is available on pipeline stage "
                f"{self.__dict__.get('stage')} only; code outside of stage modules may call the module and read plain "
                "attributes"
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
    """Replace the units of other stages by stubs under each of their names, and return this stage's units by name."""
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
