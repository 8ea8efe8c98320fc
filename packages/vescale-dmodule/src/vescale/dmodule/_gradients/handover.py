"""Gradients of local leaves that go to data parallelism, which takes them as they are (see ``_takers``).

It gets each when the leaf has it, not reduced and in no wrapper. What it cannot take like this is brought to the
parameter's placements, and arrives there with all that autograd does: gradient hooks, addition to ``.grad``,
post-accumulate hooks. That is so for gradients with a history, and if somebody hooks the parameter after the forward.

Note: several gradients in one backward
    Data parallelism reduces a gradient when it is complete. But a parameter may get more than one: a penalty outside of
    the module reads the DTensor itself; a layer leaves a gradient for later (``_overlap``) while other code reads the
    same weight. So whoever takes gradients hears whether more will come in the running pass. Autograd knows which nodes
    it will run: it runs a leaf's once, also where nothing comes of it.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from .. import _torch
from .backward_pass import accumulate, as_gradient
from .takers import taker_of

__all__ = ["Handover", "postpone", "reduced"]


class Handover:
    """The post-accumulate hook of a leaf.

    Args:
        leaf: stands in for the parameter.
        whole: the parameter.
        placements: of its gradients, as the leaf has them.
    """

    def __init__(self, leaf: Tensor, whole: DTensor, placements: tuple[Placement, ...]):
        # Nothing here may hold the leaf, which holds this: torch does not see all of that circle, and would keep it.
        self.leaf, self.whole, self.placements = weakref.ref(leaf), whole, placements
        self.tables = _torch.hook_tables(whole)
        self.num_hooks = sum(map(len, self.tables))
        self.node = _torch.accumulation_node(whole)
        self.taker = taker_of(whole)
        if self.taker is not None:
            me = weakref.ref(self)  # the parameter must not hold its own node, which torch could never free
            self.taker.more = lambda: (handover := me()) is not None and handover.comes_more()
        self.is_giving = False
        self._begin(-1)

    def _begin(self, number: int) -> None:
        """Count anew, in the backward pass of this number: calls of the hook, arrivals at the parameter, delays."""
        self.number, self.num_calls, self.num_arrived, self.num_later = number, 0, 0, 0

    def __call__(self, leaf: Tensor) -> None:
        if self.number != (number := _torch.backward_number()):
            self._begin(number)
        self.num_calls += 1
        local = leaf.grad
        if local is None:
            return
        leaf.grad = None
        taker = self.taker
        if taker is not None and not local.requires_grad and sum(map(len, self.tables)) == self.num_hooks:
            taker.take(local, self.placements, more=self._is_awaited())
            return
        self.is_giving = True
        try:
            _torch.arrive(self.whole, reduced(self.whole, local, self.placements), accumulate)
        finally:
            self.is_giving = False

    def postpone(self) -> None:
        """Say that the hook will be called once more in the running pass."""
        if self.number != (number := _torch.backward_number()):
            self._begin(number)
        self.num_later += 1

    def comes_more(self) -> bool:
        """Tell, while a gradient arrives at the parameter, whether another will come in the running pass."""
        if self.number != (number := _torch.backward_number()):
            self._begin(number)
        self.num_arrived += not self.is_giving
        if not self.num_calls and (leaf := self.leaf()) is not None and _torch.accumulates(leaf):
            return True
        return self._is_awaited()

    def _is_awaited(self) -> bool:
        if 0 < self.num_calls <= self.num_later:
            return True
        return not self.num_arrived and _torch.runs_in_backward(self.node)


def reduced(whole: DTensor, local: Tensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return a local gradient as one in the placements of its parameter."""
    fits = placements == tuple(whole.placements)
    if fits and not local.requires_grad:
        return _torch.wrap_like(local, whole)
    gradient = as_gradient(whole, local, placements)
    return gradient if fits else gradient.redistribute(placements=whole.placements)


def postpone(leaf: Tensor) -> None:
    """Say that a gradient of a leaf comes later than autograd thinks."""
    for hook in _torch.hook_tables(leaf)[1].values():
        if isinstance(hook, Handover):
            hook.postpone()
