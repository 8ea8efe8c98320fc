"""Experts inside of a static program: their region gets local tensors, and is told how the tokens lie.

Experts that the model calls one by one need no telling. Which parameters of experts get a gradient depends on where the
tokens go, so the layouts of all of them are known from the start.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import Placement

from .._experts import ExpertRegion, listed_gradients
from .names import join

if TYPE_CHECKING:
    from .program import StaticProgram

__all__ = ["ExpertsHere", "experts_gradients"]


def experts_gradients(program: StaticProgram) -> dict[str, tuple[Placement, ...]]:
    """Return the layouts of the gradients of all experts' parameters, by full name, for tokens as they lie now."""
    found = {name: listed_gradients(module) for name, module in program.modules.items()}
    found |= {
        n: region.gradient_placements(program.tokens[n]) for n, region in program.experts.items() if n in program.tokens
    }
    return {join(name, leaf): placements for name, leaves in found.items() for leaf, placements in leaves.items()}


class ExpertsHere:
    """Hooks of a module of experts that runs on local tensors."""

    def __init__(self, program: StaticProgram, name: str, region: ExpertRegion):
        self.program, self.name, self.region = program, name, region
        self.entered: list[contextlib.AbstractContextManager] = []

    def enter(self, _module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        """Tell the region what its operands are."""
        is_local = self.program.depth > 0
        context = self.region.on_local_tensors(self.program.tokens[self.name]) if is_local else contextlib.nullcontext()
        context.__enter__()
        self.entered.append(context)

    def leave(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        """Forget it."""
        if self.entered:
            self.entered.pop().__exit__(None, None, None)
