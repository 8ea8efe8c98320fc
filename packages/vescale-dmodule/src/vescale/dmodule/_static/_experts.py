"""Experts inside of a static program: their region gets local tensors, and is told how the tokens lie."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

from .._experts import ExpertRegion

if TYPE_CHECKING:
    from ._program import StaticProgram

__all__ = ["ExpertsHere"]


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
