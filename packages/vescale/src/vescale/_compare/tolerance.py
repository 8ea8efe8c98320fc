"""How far rounding alone can take two runs apart that add in other orders.

Model: roundings are independent, with mean zero, and at most the unit roundoff. A sum of n terms then has a relative
error of about sqrt(n) u, in place of the worst case n u, and errors of several operations add as squares. With

    u      unit roundoff of the dtype in which a tensor is stored
    v      unit roundoff of the dtype in which it is summed: that of float32 for dtypes of 16 bits, otherwise u
    n_j    length of the longest sum in the j-th tensor of the step, in program order
    e      the largest relative difference that was measured in what a tensor is computed from, and accepted
    L      sqrt(2 log(2 / p)), beyond which a sum of bounded independent errors lies with probability p

two runs may differ in the k-th tensor by the norm

    L * (sqrt(sum over j <= k of (u_j**2 + n_j v_j**2)) + e) * scale

The scale is the norm of the tensor. That of a parameter's gradient is a bound of the sum before cancellation: the norm
of the gradients of the module's outputs, times that of its inputs, or the square root of the number of rows. p is
6 F / (pi k)**2 for the k-th comparison, so all comparisons of any number of steps together have a false alarm with
probability F.

Differences are estimated by projections, which understate the norm at times. So what accepted differences of
parameters do to a module's output counts with a factor, which grows as fewer blocks differ.

An optimizer's step may normalize gradients, as Adam does: elements near zero then move by as much as others, in any
direction. If a gradient may differ by the part t of its norm, elements below about t of it may turn around; of elements
with a density around zero as a normal distribution's, these move the update by at most 2 sqrt(t) of its norm.

Sources: Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019), theorem 2.4, for sqrt(n) and
L (Hoeffding's inequality); Higham, "Accuracy and stability of numerical algorithms" (2002), section 4.2.
"""

from __future__ import annotations

import math

import torch

#: Probability of a false alarm in all comparisons of two runs together, under the model above.
FALSE_ALARM = 0.01


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of a rounding; 0 for dtypes without one.

    Example:
        >>> unit_roundoff("bfloat16") == 2**-8, unit_roundoff("int64")
        (True, 0.0)
    """
    kind = getattr(torch, dtype)
    return torch.finfo(kind).eps / 2 if kind.is_floating_point or kind.is_complex else 0.0


def variance(dtype: str, terms: int) -> float:
    """Return the square of the relative error of a tensor whose elements are sums of so many terms."""
    stored = unit_roundoff(dtype)
    summed = min(stored, unit_roundoff("float32"))
    return stored**2 + terms * summed**2


def digest_error(numel: int) -> float:
    """Return the relative error of a projection, which is a pairwise sum in float64.

    Source: Higham (2002), section 4.2: the error of a pairwise sum of n terms grows as log2(n).
    """
    return unit_roundoff("float64") * math.log2(max(2, numel))


def deviations(count: int) -> float:
    """Return L for the comparison with this number, counted from 1."""
    return math.sqrt(2 * math.log(2 * (math.pi * count) ** 2 / (6 * FALSE_ALARM)))


def understatement(blocks: int) -> float:
    """Return by which factor the norm of a difference may exceed its estimate from the projections of so many blocks.

    Squares of k normal projections have a chi-squared distribution of k degrees of freedom, whose lower tail is about
    ``(x / 2)**(k / 2) / Gamma(k / 2 + 1)``. The factor is exceeded with probability 0.001.

    Example:
        >>> round(understatement(8), 1), round(understatement(2), 1)
        (3.2, 31.6)
    """
    return math.sqrt(blocks / (2 * (0.001 * math.gamma(blocks / 2 + 1)) ** (2 / blocks)))
