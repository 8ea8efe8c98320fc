"""Where a parameter's gradient is: one rule for the optimizer, for clipping and for loud misuse.

Note: what ``param.grad`` holds after backward
    None                no gradient since the last ``zero_grad``, on any rank
    a tensor, DTensor   the gradient (its local part)
    ShardedGradient     ZeRO 1 or 2: it is distributed over the data-parallel axis, and this rank holds a flat part

A ``ShardedGradient`` has the metadata of a gradient and no values. Whoever reads it (a plain ``torch.optim`` optimizer,
``torch.nn.utils.clip_grad_norm_``, a user's ``param.grad.norm()``) gets an error that says what to use instead. Zeroing
it, as ``zero_grad(set_to_none=False)`` does, zeroes the part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch

if TYPE_CHECKING:
    from ._flat import FlatSlot

__all__ = ["ShardedGradient", "check_gradient", "local_gradient"]


class ShardedGradient(torch.Tensor):
    """Stand-in for a gradient that is distributed over the ranks of the data-parallel axis."""

    slot: FlatSlot

    @staticmethod
    def __new__(cls, slot: FlatSlot) -> ShardedGradient:
        placeholder = _torch.make_placeholder(cls, slot.param)
        placeholder.slot = slot
        return placeholder

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardedGradient({self.slot.fqn!r}, shape={tuple(self.shape)}, part={self.slot.part})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        zero, foreach_zero = _torch.zero_operators()
        if func is zero:
            args[0].slot.zero()
            return args[0]
        if func is foreach_zero:
            for tensor in args[0]:
                tensor.zero_()
            return None
        fqn = next(a.slot.fqn for a in _flatten(args) if isinstance(a, ShardedGradient))
        raise RuntimeError(
            f"the gradient of {fqn!r} is sharded by DDP(zero=1 or 2), so {func} cannot read param.grad. Use "
            "vescale.optim.DistributedOptimizer to step, vescale.optim.clip_grad_norm_ to clip, or DDP(zero=0)"
        )


def _flatten(args: object) -> list[object]:
    return [leaf for a in args for leaf in _flatten(a)] if isinstance(args, (list, tuple)) else [args]


def local_gradient(param: Tensor) -> Tensor | None:
    """Return this rank's part of the gradient: a tensor that shares its storage, or None where there is none.

    For a sharded gradient it is the flat part, perhaps empty; otherwise it has the shape of the parameter's local
    tensor.

    Raises:
        RuntimeError: If the gradient has not been reduced since it was accumulated under ``no_sync``.
    """
    grad = param.grad
    if grad is None:
        return None
    if isinstance(grad, ShardedGradient):
        grad.slot.check_reduced()
        return grad.slot.grad_part
    return _torch.local_tensor(grad)


def check_gradient(fqn: str, param: Tensor, grad: Tensor) -> None:
    """Refuse gradients that are sparse, or distributed otherwise than their parameter.

    Raises:
        TypeError: For a sparse gradient.
        ValueError: For other placements than the parameter's.
    """
    if grad.layout is not torch.strided:
        raise TypeError(f"the gradient of {fqn!r} is sparse ({grad.layout}); build the embedding with sparse=False")
    ours = param.placements if isinstance(param, DTensor) else None
    theirs = grad.placements if isinstance(grad, DTensor) else None
    if ours != theirs:
        raise ValueError(
            f"the gradient of {fqn!r} has placements {theirs}, the parameter has {ours}: redistribute the gradient to "
            "the parameter's placements in a tensor hook (param.register_hook), as parallelize_module does"
        )
