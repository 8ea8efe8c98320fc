"""Where a parameter's gradient is: one rule for the optimizer, for clipping and for errors on misuse.

Note: what ``param.grad`` holds after backward
    None                no gradient since the last ``zero_grad``, on any rank
    a tensor, DTensor   the gradient (its local part)
    ShardedGradient     ZeRO 1 to 3: the gradient is sharded over the data-parallel axis; this rank holds a flat part

A ``ShardedGradient`` has the metadata of a gradient and no values. A read, for example by a plain ``torch.optim``
optimizer, ``torch.nn.utils.clip_grad_norm_`` or ``param.grad.norm()``, raises an error that names the function to use
instead. Clearing it, as ``zero_grad(set_to_none=False)`` does, sets the part to zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch

__all__ = ["ShardedGradient", "align_gradients", "aligned", "check_strided", "local_gradient"]


class GradientSlot(Protocol):
    """The slot protocol of a placeholder; see `bucket.FlatSlot`."""

    fqn: str
    param: Tensor
    part: tuple[int, int]
    grad_view: Tensor
    grad_part: Tensor

    def zero(self) -> None:
        """Make the sharded gradient zero."""

    def check_reduced(self) -> None:
        """Raise RuntimeError if there is a gradient that has not been reduced."""


class ShardedGradient(torch.Tensor):
    """Placeholder for a gradient that is sharded over the ranks of the data-parallel axis."""

    slot: GradientSlot

    @staticmethod
    def __new__(cls, slot: GradientSlot) -> ShardedGradient:
        placeholder = _torch.make_placeholder(cls, slot.param, slot.grad_view.dtype)
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
        operands = _flatten([*args, *(kwargs or {}).values()])
        fqn = next(a.slot.fqn for a in operands if isinstance(a, ShardedGradient))
        raise RuntimeError(
            f"the gradient of {fqn!r} is sharded by DDP(zero=1, 2 or 3), so {func} cannot read param.grad. Use "
            "vescale.optim.DistributedOptimizer to step, vescale.optim.clip_grad_norm_ to clip, or DDP(zero=0)"
        )


def _flatten(args: object) -> list[object]:
    return [leaf for a in args for leaf in _flatten(a)] if isinstance(args, (list, tuple)) else [args]


def local_gradient(param: Tensor) -> Tensor | None:
    """Return this rank's part of the gradient: a tensor that shares its storage, or None without a gradient.

    A sharded gradient gives the flat part, which may be empty. Any other gradient has the shape of the parameter's
    local tensor.

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


def check_strided(fqn: str, grad: Tensor) -> None:
    """Raise TypeError for a sparse gradient."""
    if grad.layout is not torch.strided:
        raise TypeError(f"the gradient of {fqn!r} is sparse ({grad.layout}); build the embedding with sparse=False")


def aligned(fqn: str, param: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad`` with the placements of its parameter: a collective over the parameter's mesh if they differ.

    DTensor operators leave a gradient in the placements in which they computed it: ``Partial`` for a replicated
    parameter, ``Replicate`` for a sharded one. It can only be reduced and applied in the parameter's own placements.

    Raises:
        TypeError: For a sparse gradient, or a plain gradient of a DTensor.
    """
    check_strided(fqn, grad)
    if not isinstance(param, DTensor) or isinstance(grad, ShardedGradient):
        return grad
    if not isinstance(grad, DTensor):
        raise TypeError(
            f"expected a DTensor as the gradient of {fqn!r}, which is a DTensor with placements {param.placements}, "
            "but got a plain tensor; wrap it by DTensor.from_local"
        )
    same = grad.placements == param.placements
    return grad if same else grad.redistribute(param.device_mesh, param.placements)


def align_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every gradient the placements of its parameter, in place; all ranks of the parameters' meshes call it."""
    for param in parameters:
        if isinstance(param, DTensor) and param.grad is not None:
            param.grad = aligned(f"a parameter of shape {tuple(param.shape)}", param, param.grad)
