"""Parts of a static program that are not plain local code: eager parts and regions of experts.

The hooks of an eager part convert its arguments to DTensors and its results to local tensors. Experts run on local
tensors and need the recorded layout of their tokens; experts that the model calls one by one do not. The routing
decides which experts get a gradient, so the gradient layouts of all experts are set without a recording.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from .._boundary.convert import Convert
from .._boundary.edges import unwrapped
from .._boundary.hooks import Phase
from .._boundary.rows_axis import is_over_rows, lower
from .._boundary.values import map_leaves
from .._experts import ExpertRegion, listed_gradients
from ..errors import NotLocalFriendlyError
from .call import Call, State
from .operator_mode import inactive
from .parts import Parts, join, keep_on_dtensors

__all__ = ["EagerPart", "ExpertsPart", "experts_gradients"]


class EagerPart:
    """Hooks of a module in eager mode inside a static program.

    Objects among its arguments, such as caches, are changed in place: their tensors become DTensors for the call and
    local tensors again after it. What the part itself leaves in them stays a DTensor.

    Args:
        call: of the program.
        phase: of the parallelized model.
        name: of the module.
    """

    def __init__(self, call: Call, phase: Phase, name: str):
        self.call, self.phase, self.name = call, phase, name
        self.outside: list[Convert | None] = []
        self.contexts: list[contextlib.AbstractContextManager] = []
        self.arguments: list[tuple] = []
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}  # of wrapped arguments, by identity

    def enter(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Convert arguments to the DTensors of eager mode."""
        call, where = self.call, f"{self.name} enters"
        self.outside.append(self.phase.convert)
        self.arguments.append((args, kwargs))
        self.contexts.append(inactive())  # random operators on DTensors are no recorded ones
        self.contexts[-1].__enter__()
        if call.is_open:
            args, kwargs = map_leaves(self._wrap, args, where), map_leaves(self._wrap, kwargs, where)
        elif call.state is State.RECORDING:
            watch = call.observer.watch
            args, kwargs = map_leaves(watch, args, where), map_leaves(watch, kwargs, where)
        self.phase.convert, self.phase.local = None, False
        return args, kwargs

    def leave(self, _module: nn.Module, _args: tuple, output: object) -> object:
        """Convert results to local tensors."""
        if not self.outside:
            return None  # an earlier hook raised, so `enter` did not run
        call, where = self.call, f"{self.name} returns"
        self.contexts.pop().__exit__(None, None, None)
        self.phase.convert, self.phase.local = self.outside.pop(), call.is_open
        arguments = self.arguments.pop()
        if self.originals:
            map_leaves(self._restore, arguments, "")
            self.originals.clear()
        if output is None:
            return None
        if call.is_open:
            return map_leaves(self._unwrap, output, where)
        return map_leaves(call.observer.watch, output, where) if call.state is State.RECORDING else output

    def _wrap(self, local: Tensor, where: str) -> Tensor:
        if (part := self.call.part_of_whole(local, where)) is not None:
            self.originals[id(part)] = part, local
            return part
        local = self.call.noted(local, where)
        if isinstance(local, DTensor):  # an eager part left it in an object that it does not return, such as a cache
            return local
        record = self.call.record(where, local)
        if record.source is None:
            return local
        wrapped = self.call.over_rows(self.call.wrap(local, record, pins_gradient=False), record)
        self.originals[id(wrapped)] = wrapped, local
        return wrapped

    def _restore(self, value: Tensor, _where: str) -> Tensor:
        return self.originals.get(id(value), (value, value))[1]

    def _unwrap(self, value: Tensor, where: str) -> Tensor:
        if isinstance(value, DTensor):
            value = lower(value, self.call.plan_mesh) if is_over_rows(value, self.call.plan_mesh) else value
            local = _torch.local_of(value)
            record = self.call.record(where, local)
            value = unwrapped(value, record.gradient) if value.requires_grad else local
        return self.call.noted(value, where)


class ExpertsPart:
    """Hooks of an experts module on local tensors.

    Args:
        call: of the program.
        name: of the module.
        region: of the module.
    """

    def __init__(self, call: Call, name: str, region: ExpertRegion):
        self.call, self.name, self.region = call, name, region
        self.entered: list[contextlib.AbstractContextManager] = []

    def enter(self, _module: nn.Module, _args: tuple, _kwargs: dict) -> None:
        """Set the token layout of the region.

        Raises:
            NotLocalFriendlyError: the experts did not run in the recorded call.
        """
        tokens = self.call.layouts.tokens
        if self.call.is_open and self.name not in tokens:
            raise NotLocalFriendlyError(
                f"experts {self.name!r}: expected no call, as when static mode recorded the model, but they ran; "
                f"if a branch depends on data, {keep_on_dtensors(self.name)}"
            )
        context = self.region.on_local_tensors(tokens[self.name]) if self.call.is_open else contextlib.nullcontext()
        context.__enter__()
        self.entered.append(context)

    def leave(self, _module: nn.Module, _args: tuple, _output: object) -> None:
        """Reset the token layout of the region."""
        if self.entered:
            self.entered.pop().__exit__(None, None, None)


def experts_gradients(parts: Parts, tokens: Mapping[str, tuple[Placement, ...]]) -> dict[str, tuple[Placement, ...]]:
    """Return the gradient layouts of all parameters of experts, by full name, for the given token layouts."""
    found = {name: listed_gradients(module) for name, module in parts.modules.items()}
    found |= {n: region.gradient_placements(tokens[n]) for n, region in parts.experts.items() if n in tokens}
    return {join(name, leaf): placements for name, leaves in found.items() for leaf, placements in leaves.items()}
