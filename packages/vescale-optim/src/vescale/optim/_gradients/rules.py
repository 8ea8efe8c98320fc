"""The dtypes in which gradients are kept and added, and the order in which ranks are added.

    local gradients          --add over backwards-->   kept in grad_dtype
    kept     --round to reduce_dtype-->   on the wire   --add over ranks-->   sum in reduce_dtype
    sum      --divide by the ranks, in the wider of the two dtypes-->   mean, rounded to grad_dtype

Every arrow is element-wise. The addition over ranks has an order: with ``"backend"`` that of the backend, which may
differ between elements of a buffer; with ``"ordered"`` that of coords, ((g0 + g1) + g2) + g3, for every element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ReduceRules", "average_"]

_REDUCTIONS = ("backend", "ordered")


@dataclass(frozen=True)
class ReduceRules:
    """How gradients are reduced.

    Attributes:
        reduction: ``"backend"`` or ``"ordered"``.
        grad_dtype: Of kept gradients; None for each parameter's own.
        reduce_dtype: On the wire and of the sum; None for that of kept gradients.

    Raises:
        ValueError: For another reduction, or a dtype that is not a floating-point one.
    """

    reduction: str = "backend"
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.reduction not in _REDUCTIONS:
            raise ValueError(f'reduction must be "backend" or "ordered", got {self.reduction!r}')
        for name in ("grad_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"{name} must be a floating-point dtype such as torch.float32, or None for that of the "
                    f"{'parameter' if name == 'grad_dtype' else 'kept gradient'}, got {dtype!r}"
                )

    @property
    def ordered(self) -> bool:
        """Whether ranks are added in the order of their coords."""
        return self.reduction == "ordered"

    def kept(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of ``param_dtype`` are kept."""
        return self.grad_dtype or param_dtype

    def wire(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are sent and added."""
        return self.reduce_dtype or self.kept(param_dtype)


def average_(total: Tensor, num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Return the mean in ``dtype``, given the sum ``total``, which is overwritten or returned itself.

    All means of gradients are taken here, so that an element has the same bits wherever and in whichever buffer its
    mean is taken. After the sum: one rounding, and exact for a power of two.
    """
    if num_ranks == 1:
        return total.to(dtype)
    return total.to(torch.promote_types(total.dtype, dtype)).div_(num_ranks).to(dtype)
