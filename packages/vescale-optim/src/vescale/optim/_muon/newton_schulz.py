"""Newton-Schulz iteration: the nearest orthogonal matrix, nearly, by matrix products alone.

For a matrix with the singular value decomposition U S V^T, an odd polynomial p(X) = a X + b (X X^T) X + c (X X^T)^2 X
acts on the singular values only: U p(S) V^T. Iterating a p that drives values from (0, 1] towards 1 gives about U V^T.
The coefficients of Muon are steep at zero, so that five iterations bring all but the smallest values into 0.7 to 1.2.

The operations, their order and the number format (bfloat16) are those of ``torch.optim.Muon``: the same matrix in the
same memory layout gives the same bits. Unlike in ``torch.optim.Muon``, the input is never changed.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NewtonSchulz", "adjusted_lr"]

#: How the learning rate of a matrix may depend on its shape.
ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration with its settings.

    Attributes:
        coefficients: ``(a, b, c)`` of the polynomial.
        num_steps: Number of iterations.
        eps: Smallest norm by which a matrix is divided.
    """

    coefficients: tuple[float, float, float]
    num_steps: int
    eps: float

    def __call__(self, matrix: Tensor) -> Tensor:
        """Return the orthogonalized ``matrix`` (rows, cols) of any floating-point dtype, in bfloat16.

        Example:
            >>> iteration = NewtonSchulz((3.4445, -4.7750, 2.0315), num_steps=5, eps=1e-7)
            >>> iteration(torch.tensor([[3.0, 0.0], [0.0, 0.5]])).diagonal().float().round(decimals=1)
            tensor([0.7000, 1.0000])
        """
        a, b, c = self.coefficients
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.bfloat16()
        x = x.T if tall else x  # products of the short side
        x = x / x.norm().clamp(min=self.eps)  # the largest singular value is at most the norm
        for _ in range(self.num_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x


def adjusted_lr(lr: float | Tensor, adjustment: str | None, rows: int, cols: int) -> float | Tensor:
    """Return the learning rate of a matrix: scaled by its shape so that updates of all matrices are of one size.

    Args:
        lr: Learning rate of the group.
        adjustment: ``"original"``, or None: times ``sqrt(max(1, rows / cols))``. ``"match_rms_adamw"``: times
            ``0.2 * sqrt(max(rows, cols))``.
        rows: Rows of the full matrix.
        cols: Columns of the full matrix.
    """
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, cols)))
    return lr * math.sqrt(max(1, rows / cols)) if cols else lr
