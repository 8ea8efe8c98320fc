"""Notice a loss outside of the module that is a mean over another number of terms on each rank.

The recording of a call sees what happens in the module. A loss that the training loop computes from its outputs is not
seen, and a mean over ranks of such losses is the mean over the batch only if each of them has the same number of terms.
Targets that a loss ignores leave a trace: where they are, the gradient of the output is zero::

    outputs     rows x tokens x classes         loss = cross_entropy(outputs, targets, ignore_index=...)
    gradient    0.1 -.3 0.2 | 0 0 0 | ...       zero along the dim of classes where a target is ignored

So ranks compare the number of zero fibers, along every dim but that of rows, in the first step and in every N-th. Two
numbers more in the maximum that each backward reduces anyway do that. A difference is a warning and no error, since
losses exist whose gradient is zero at some terms that count, such as hinge losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import Turns, tensors_in

from .. import _torch

__all__ = ["IgnoredOutputs"]

logger = logging.getLogger("vescale.optim")


class IgnoredOutputs:
    """Counts zero fibers of the gradients of a module's outputs.

    Args:
        module: The module given to DDP.
        is_scaled: Returns whether losses are sums that are multiplied by one factor on all ranks.
    """

    def __init__(self, module: nn.Module, *, is_scaled: Callable[[], bool]):
        self._name = type(module).__name__
        self._is_scaled = is_scaled
        self._turns = Turns()
        self._counts: list[Tensor] = []
        module.register_forward_hook(self.leave)

    def __reduce__(self) -> Any:
        return _of_copy, ()

    def leave(self, module: nn.Module, _args: tuple, output: object) -> None:
        """Count in the backward of this call, if its loss is computed outside."""
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if not self._turns.is_due() or self._is_scaled():
            return
        tensors = [t for t in tensors_in(output, dataclasses=True) if t.requires_grad]
        # what another pipeline stage holds is of another class
        if all(t.ndim and type(t) in (Tensor, DTensor) for t in tensors):
            with _torch.no_function_modes():  # a pipeline takes calls on values of its stages for code between modules
                for tensor in tensors:
                    tensor.register_hook(self._count)

    # `vescale.dmodule` leaves this hook out of compiled code: that of the module given to DDP counts
    leave._vescale_in_graph = "absent"

    def _count(self, gradient: Tensor) -> None:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        zeros = local.detach() == 0
        self._counts += [zeros.all(dim).sum() for dim in range(1, zeros.ndim)] or [zeros.sum()]

    def take(self) -> int:
        """Return the number of zero fibers since it was last called."""
        counts, self._counts = self._counts, []
        return int(sum(counts))

    def warn(self, least: int, most: int) -> None:
        """Warn that ranks have counted different numbers, unless they say how they weigh them."""
        if not self._is_scaled():
            logger.warning(
                "the outputs of %s get no gradient at %d places on one rank and at %d on another; if the loss leaves "
                "targets out of its mean, the mean over ranks is not the mean over the batch: sum the losses and "
                "multiply them by DDP.global_mean_scale(count), or compute the loss inside of the module",
                self._name,
                least,
                most,
            )


def _of_copy() -> IgnoredOutputs:
    """Return what hooks a copy of the module: no DDP asks for its number."""
    return IgnoredOutputs(nn.Identity(), is_scaled=lambda: True)
