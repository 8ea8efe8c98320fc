"""What the data-parallel ranks must have in common in their forwards: rows per call, and the generator where one draws.

A mean over ranks of local means is the mean over the global batch only if all ranks have the same number of rows. A
rank's slice of the global dropout mask is known only then, too, and only if the generators of all ranks are alike. So
hooks note both during forward, and `_ranks/checks.py` compares them at the end of the backward:

    call of forward, in training, with gradients      noted
    no random operator ran in it                      rows, unless `DDP.global_mean_scale` has been called
    a random operator ran in it                       rows, and the state of the generator before it

Ranks that draw nothing may have any seeds, for example to choose their rows.

A rank that calls the module again without a backward, more often than ever before, first meets the others
(`Failures.meet`): if another one runs the backward that this one leaves out, that is an error on both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vescale.dtensor.extension import Fact, Position, Turns, generator_fact, random_position, tensors_in

from .. import _torch

__all__ = ["LocalCalls"]

_ROWS = "the number of rows (dim 0 of the first input) in each call of the module given to DDP"
_MANY = 64  # calls that are noted without a reduction after them
_FIX = "give all ranks the same number of rows (drop_last=True of a DataLoader), "
_DRAWN = "since dropout draws this rank's equal part of the global mask"
_MEANS = (
    "since a mean over ranks of means over different numbers of rows is not the mean over the batch; or sum the losses "
    "and multiply them by DDP.global_mean_scale(count)"
)


class LocalCalls:
    """Notes the calls of a module between two reductions of gradients. A copy of the module notes nothing.

    Args:
        device_type: Device type of the mesh.
        backward_ran: Returns whether a backward has run since it was last called.
        meet: Method called with a text before one more call without a backward than ever before; held weakly.

    Attributes:
        is_scaled: Whether losses are sums that are multiplied by one factor on all ranks.
        is_copy: Whether these are the calls of a copy of the module.
    """

    def __init__(self, device_type: str, *, backward_ran: Callable[[], bool], meet: Callable[[str], None] | None):
        self.is_scaled = self.is_copy = False
        self._device_type = device_type
        self._backward_ran = backward_ran
        self._meet = None if meet is None else weakref.WeakMethod(meet)
        self._turns = Turns()
        self._num_pending = 0  # calls since the last backward
        self._most_pending = 1  # on all ranks
        self._rows: list[int] = []
        self._generator: Fact | None = None  # before the last call that drew
        self._running: list[tuple[Position, Fact] | None] = []  # calls, the outermost first
        self._parameters: set[int] = set()  # identities of those that DDP reduces
        self._looks = Turns()

    def __reduce__(self) -> Any:
        return _of_copy, ()

    def attach(self, module: nn.Module) -> None:
        """Hook the module given to DDP. Its other hooks run inside, so no batch window is in force here."""
        self._parameters = set(map(id, module.parameters()))
        module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note a call."""
        if torch.compiler.is_compiling() or _torch.in_transform() or self.is_copy or not self._turns.is_on:
            return
        begun = None
        if module.training and torch.is_grad_enabled() and not self._running:
            self._count()
            begun = random_position(self._device_type), generator_fact(self._device_type)
            self._rows.append(next((t.shape[0] for t in tensors_in((args, kwargs), dataclasses=True) if t.ndim), 0))
            del self._rows[:-_MANY]
        self._running.append(begun)

    def _count(self) -> None:
        self._num_pending = 1 if self._backward_ran() else self._num_pending + 1
        if self._num_pending > self._most_pending:
            meet = self._meet and self._meet()
            if meet is None:
                return  # without its DDP the module is alone
            meet(
                f"call {self._num_pending} of the module since its last backward; run every backward on all ranks or "
                "on none, and calls without one inside torch.no_grad()"
            )
            self._most_pending = self._num_pending

    def leave(self, module: nn.Module, _args: tuple, _output: object) -> None:
        """Note whether the call drew.

        Raises:
            RuntimeError: If the module has made parameters, which DDP does not know.
        """
        if torch.compiler.is_compiling() or not self._running:
            return
        begun = self._running.pop()
        if begun is not None and self._looks.is_due():
            self._check_parameters(module)
        if begun is not None and random_position(self._device_type) != begun[0]:
            self._generator = begun[1]

    def _check_parameters(self, module: nn.Module) -> None:
        new = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in self._parameters]
        if new:
            raise RuntimeError(
                f"expected the parameters that the module had when DDP wrapped it, got {len(new)} new ones, such as "
                f"{new[0]!r}, whose gradients would not be reduced; call the module once before DDP wraps it, so that "
                "it makes them then"
            )

    # `vescale.dmodule` leaves these hooks out of compiled code: the hooks of the compiled module itself count
    enter._vescale_in_graph = leave._vescale_in_graph = "absent"

    def facts(self) -> list[Fact]:
        """Return what must be equal on all ranks, and forget the calls."""
        rows, generator = self._rows, self._generator
        self.forget()
        facts = []
        if generator is not None or not self.is_scaled:
            shown = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more calls" if len(rows) > 8 else "")
            facts.append(Fact(_ROWS, shown or "no call", _FIX + (_MEANS if generator is None else _DRAWN)))
        return facts if generator is None else [*facts, generator]

    def forget(self) -> None:
        """Forget the calls."""
        self._rows, self._running, self._generator = [], [], None


def _of_copy() -> LocalCalls:
    calls = LocalCalls("cpu", backward_ran=bool, meet=None)
    calls.is_copy = True
    return calls
