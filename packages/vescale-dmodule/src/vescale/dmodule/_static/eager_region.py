"""A part of a static program that stays in eager mode: arguments become DTensors, results local tensors again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .._boundary.edges import unwrapped
from .._boundary.values import map_leaves

if TYPE_CHECKING:
    from .._boundary.convert import Convert
    from .program import StaticProgram

__all__ = ["EagerRegion"]


class EagerRegion:
    """Hooks of a module that stays in eager mode inside a static program."""

    def __init__(self, program: StaticProgram, name: str):
        self.program, self.name = program, name
        self.outside: list[Convert | None] = []

    def enter(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Turn arguments into what eager mode gives the module."""
        program = self.program
        where = f"{self.name} enters"
        local, observing = program.depth > 0, program.rehearsing and program.observer is not None
        if local:
            args, kwargs = map_leaves(self._wrap, args, where), map_leaves(self._wrap, kwargs, where)
        elif observing:
            watch = program.observer.watch
            args, kwargs = map_leaves(watch, args, where), map_leaves(watch, kwargs, where)
        self.outside.append(program.model.phase.convert)
        program.model.phase.convert, program.model.phase.local = None, False
        return args, kwargs

    def leave(self, _module: nn.Module, _args: tuple, output: object) -> object:
        """Turn results into local tensors."""
        program = self.program
        if not self.outside:
            return None  # it failed before it was entered
        program.model.phase.convert, program.model.phase.local = self.outside.pop(), program.depth > 0
        where = f"{self.name} returns"
        if output is None:
            return None
        if program.depth > 0:
            return map_leaves(self._unwrap, output, where)
        if program.rehearsing and program.observer is not None:
            return map_leaves(program.observer.watch, output, where)
        return output

    def _wrap(self, local: Tensor, where: str) -> Tensor:
        local = self.program.noted(local, where)
        crossing = self.program.crossing(where, local)
        return local if crossing.source is None else self.program.wrap(local, crossing, region=True)

    def _unwrap(self, whole: Tensor, where: str) -> Tensor:
        if isinstance(whole, DTensor):
            local = _torch.local_of(whole)
            crossing = self.program.crossing(where, local)
            whole = unwrapped(whole, crossing.gradient) if whole.requires_grad else local
        return self.program.noted(whole, where)
